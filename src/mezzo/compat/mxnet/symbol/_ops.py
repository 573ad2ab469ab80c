"""The registry of MXNet's ops: their inputs, their attributes, and the torch function that runs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mezzo._errors import CheckpointError
from mezzo.compat.mxnet.symbol._graph import Node

_NO_DEFAULT = inspect.Parameter.empty
_MAX_LENGTH = 4096
"""Longer attributes are not parsed: no op here has such."""

_WITHOUT_EFFECT = frozenset(
    (
        "workspace cudnn_tune cudnn_off num_args sparse_grad min_calib_range max_calib_range"
        " multi_input_mode forward_stype dtype_hint"
    ).split()
)
"""Attributes about MXNet's kernels, or that repeat the number of inputs."""

_DTYPES = {
    name: getattr(torch, name)
    for name in "float16 float32 float64 bfloat16 uint8 int8 int32 int64 bool".split()
}

Shape = tuple[int, ...]
Bounds = tuple[int | None, ...]
ParameterShapes = Mapping[str, tuple[int | None, ...]]
"""The shapes of an op's parameters by the names of the inputs; None where the data decide."""

Run = Callable[..., torch.Tensor | Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Op:
    """An op of MXNet. Its function has the inputs as arguments, and the attributes by keyword."""

    name: str
    run: Run
    inputs: tuple[str, ...]
    """Names of the inputs, without which MXNet creates variables."""
    variadic: bool
    """Whether any number of inputs is allowed."""
    optional: int
    """How many of the last inputs may be missing."""
    attributes: Mapping[str, tuple[str, Any]]
    """The annotation and the default of each attribute; `_NO_DEFAULT` if it is required."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Attributes that have only these values here; the function may lack them."""
    ignored: frozenset[str] = frozenset()
    """Attributes that the inputs make superfluous."""
    float32_inputs: frozenset[str] = frozenset()
    """Inputs that are never cast to 16 bits: statistics of a normalization, and indices."""
    takes_mode: bool = False
    """Whether the function has an argument `training`."""
    count_outputs: Callable[[Mapping[str, Any]], int] = lambda _: 1
    shapes: Callable[[Mapping[str, Any]], ParameterShapes] = lambda _: {}
    """The shapes of the parameters that the attributes determine."""

    @property
    def auxiliary(self) -> range:
        """Positions of the inputs that training changes: moving averages."""
        first = next(
            (place for place, name in enumerate(self.inputs) if name.startswith("moving_")),
            len(self.inputs),
        )
        return range(first, len(self.inputs))

    def parse(self, node: Node) -> dict[str, Any]:
        """Return the attributes of a node; raise `CheckpointError` for one that is not valid."""
        values = {}
        for name, text in node.attributes.items():
            if name in self.attributes:
                values[name] = self._parse_attribute(node, name, text)
            elif name in self.allowed:
                self._check_allowed(node, name, text, parse_value(text))
            elif name not in self.ignored | _WITHOUT_EFFECT and not name.startswith("__"):
                raise _invalid(node, name, text, f"this attribute is not one of {self.name}'s here")
        missing = [
            name
            for name, (_, default) in self.attributes.items()
            if default is _NO_DEFAULT and name not in values
        ]
        if missing:
            raise CheckpointError(
                f"{node.op} {node.name!r} lacks the attributes {', '.join(missing)}."
            )
        return {name: default for name, (_, default) in self.attributes.items()} | values

    def _parse_attribute(self, node: Node, name: str, text: str) -> Any:
        kind, _ = self.attributes[name]
        value = parse_value(text)
        if value is None and kind.endswith("None"):
            return None
        kind = kind.removesuffix(" | None")
        convert, expected = _KINDS[kind]
        try:
            value = convert(text.strip() if kind in ("str", "torch.dtype") else value)
        except (ValueError, TypeError, KeyError):
            raise _invalid(node, name, text, f"expected {expected}") from None
        self._check_allowed(node, name, text, value)
        return value

    def _check_allowed(self, node: Node, name: str, text: str, value: Any) -> None:
        if name in self.allowed and value not in self.allowed[name]:
            choices = ", ".join(map(str, self.allowed[name]))
            raise _invalid(node, name, text, f"supported here: {choices}")


def _to_bool(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError
    return bool(value)


def _to_number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise TypeError
    return value


def _to_int(value: Any) -> int:
    return operator.index(value)


def _to_shape(value: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, value if isinstance(value, tuple) else (value,)))


def _to_bounds(value: Any) -> tuple[int | None, ...]:
    bounds = value if isinstance(value, tuple) else (value,)
    return tuple(None if bound is None else operator.index(bound) for bound in bounds)


_KINDS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "bool": (_to_bool, "True or False"),
    "int": (_to_int, "an integer"),
    "float": (_to_number, "a number"),
    "str": (str, "a string"),
    "Shape": (_to_shape, "a tuple of integers"),
    "Bounds": (_to_bounds, "a tuple of integers or None"),
    "torch.dtype": (_DTYPES.__getitem__, f"one of {', '.join(_DTYPES)}"),
}
"""How attributes are parsed, by the annotations of the functions' arguments."""


def _invalid(node: Node, name: str, text: str, why: str) -> CheckpointError:
    return CheckpointError(f"{node.op} {node.name!r} has {name}={text[:80]!r}: {why}.")


def parse_value(text: str) -> Any:
    """Return a number, truth value, None or flat tuple of them; otherwise the text itself.

    >>> parse_value("(3, 3)"), parse_value("2e-05"), parse_value("True"), parse_value("relu")
    ((3, 3), 2e-05, True, 'relu')
    """
    text = text.strip()
    if len(text) > _MAX_LENGTH:
        return text
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        return tuple(_parse_scalar(item) for item in text[1:-1].split(",") if item.strip())
    return _parse_scalar(text)


def _parse_scalar(text: str) -> Any:
    text = text.strip()
    constants = {"True": True, "true": True, "False": False, "false": False, "None": None}
    if text in constants:
        return constants[text]
    # Python 2 wrote long integers with an L.
    for kind in (int, float):
        try:
            return kind(text.rstrip("L"))
        except ValueError:
            continue
    return text


_OPS: dict[str, Op] = {}


def find_op(name: str) -> Op | None:
    """Return an op by its name or an alias; None if it is not supported."""
    return _OPS.get(name)


def supported_ops() -> list[str]:
    """Return the names of all ops, without their aliases."""
    return sorted({op.name for op in _OPS.values()}, key=lambda name: (name.lower(), name))


def op_names() -> list[str]:
    """Return the names and the aliases of all ops."""
    return sorted(_OPS)


def register(
    names: str,
    *,
    allowed: Mapping[str, tuple[Any, ...]] | None = None,
    ignored: str = "",
    float32: str = "",
    outputs: Callable[[Mapping[str, Any]], int] = lambda _: 1,
    shapes: Callable[[Mapping[str, Any]], ParameterShapes] = lambda _: {},
) -> Callable[[Run], Run]:
    """Register a function for an op: its name in MXNet's lists, and then its aliases."""

    def add(run: Run) -> Run:
        parameters = inspect.signature(run).parameters.values()
        inputs = [
            parameter
            for parameter in parameters
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        attributes = {
            parameter.name: (parameter.annotation, parameter.default)
            for parameter in parameters
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        name, *aliases = names.split()
        op = Op(
            name,
            run,
            tuple(input_.name for input_ in inputs),
            variadic=any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters),
            optional=sum(input_.default is not _NO_DEFAULT for input_ in inputs),
            takes_mode=attributes.pop("training", None) is not None,
            attributes=attributes,
            allowed=allowed or {},
            ignored=frozenset(ignored.split()),
            float32_inputs=frozenset(float32.split()),
            count_outputs=outputs,
            shapes=shapes,
        )
        _OPS.update(dict.fromkeys((name, *aliases), op))
        return run

    return add
