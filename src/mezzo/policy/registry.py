"""The ops mezzo knows: one name each, the Python functions that call it, and its ATen overloads.

>>> registry().name_of(torch.Tensor.__add__), registry().name_of(torch.ops.aten.add_.Tensor)
('add', 'add')
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from mezzo._errors import PolicyError, nearest
from mezzo._torch import (
    OpOverload,
    OpOverloadPacket,
    all_op_names,
    functions,
    get_schema,
    nn_functions,
)
from mezzo.policy.op_names import DUNDERS, NOT_OPS, canonical, is_op
from mezzo.policy.types import Entry

Function = Callable[..., Any]

_NAMESPACES: tuple[tuple[ModuleType | type, str], ...] = (
    (torch, ""),
    (functions, ""),
    (torch.functional, ""),
    (F, ""),
    (nn_functions, ""),
    (torch.Tensor, ""),
    (torch.linalg, "linalg_"),
    (torch.fft, "fft_"),
    (torch.special, "special_"),
)

# torch's own autocast lists name these, though no public function does.
_PRIVATE_OPS = frozenset(
    "convolution thnn_fused_lstm_cell thnn_fused_gru_cell native_multi_head_attention"
    " mkldnn_rnn_layer addmm_activation lu_with_info upsample_nearest1d upsample_nearest2d"
    " upsample_nearest3d upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d"
    " upsample_linear1d upsample_bilinear2d upsample_bilinear2d_aa upsample_trilinear3d"
    " upsample_bicubic2d upsample_bicubic2d_aa reflection_pad1d reflection_pad2d reflection_pad3d"
    " replication_pad1d replication_pad2d replication_pad3d lstm_cell gru_cell rnn_tanh_cell"
    " rnn_relu_cell transformer_encoder_layer_fwd".split()
)

_HELPERS = frozenset(
    "boolean_dispatch handle_torch_function has_torch_function assert_int_or_pair overload".split()
)


@dataclass(frozen=True)
class Op:
    """One op under its one name."""

    name: str
    functions: tuple[Function, ...] = field(repr=False)
    """The Python functions and methods that call it."""
    entry: Entry | None = None
    """For a registered op of the user's: its rule and reason in every policy that does not list
    it itself."""


class Registry:
    """Every op by its name and by everything that calls it."""

    def __init__(self) -> None:
        self._ops: dict[str, Op] = {
            name: Op(name, tuple(functions))
            for name, functions in sorted(_torch_functions().items())
        }
        self._names: dict[Function, str] = {
            function: op.name for op in self._ops.values() for function in op.functions
        }
        self.generation = 0
        """Grows with every registration, so that what was computed from the registry knows when
        it is stale."""
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops.values())

    def __contains__(self, name: object) -> bool:
        return name in self._ops

    def __getitem__(self, name: str) -> Op:
        return self._ops[name]

    @property
    def names(self) -> frozenset[str]:
        """The name of every known op."""
        return frozenset(self._ops)

    def parse(self, word: str) -> str:
        """Read an op's name from any of its spellings, or say which are close.

        >>> registry().parse("true_divide"), registry().parse("F.softmax"), registry().parse("aten::softmax.int")
        ('div', 'softmax', 'softmax')
        """
        if not isinstance(word, str):
            raise PolicyError(
                f"An op is named by a string such as {self._called(word)!r}, got {word!r}."
                " `mezzo.ops()` lists them."
            )
        bare = _bare(word)
        name = word if word in self._ops else canonical(bare)
        if name in self._ops:
            return name
        if name in NOT_OPS:
            raise PolicyError(
                f"No rule applies to {word!r}: it carries, describes, makes or converts a tensor."
                " `mezzo.ops()` lists the ops that have one."
            )
        raise PolicyError(
            f"Unknown op {word!r}.{nearest(bare, self._ops)} `mezzo.ops()` lists the known ones,"
            " `mezzo.register_op` adds your own."
        )

    def _called(self, function: Any) -> str:
        return (callable(function) and self.name_of(function)) or "softmax"

    def name_of(self, function: Function) -> str | None:
        """Name the op behind a Python function, a method or an ATen overload; nothing when no rule applies to it."""
        if isinstance(function, OpOverload | OpOverloadPacket):
            return self._name_of_overload(function)
        return self._names.get(function)

    def _name_of_overload(
        self, overload: OpOverload[..., Any] | OpOverloadPacket[..., Any]
    ) -> str | None:
        known = self._names.get(overload)
        if known is not None:
            return known
        if isinstance(overload, OpOverload):
            known = self._names.get(overload.overloadpacket)
            if known is not None:
                return known
        namespace, _, base = (
            overload._schema.name
            if isinstance(overload, OpOverload)
            else overload._qualified_op_name
        ).partition("::")
        name = canonical(base)
        return name if namespace == "aten" and name in self._ops else None

    def overloads(self, name: str) -> tuple[OpOverload[..., Any], ...]:
        """Every ATen overload of an op, in-place and out variants included."""
        return tuple(
            getattr(getattr(torch.ops.aten, base), overload or "default")
            for base, overload in aten_overloads().get(name, ())
        )

    def register(self, name: str, functions: tuple[Function, ...], entry: Entry) -> None:
        """Add an op of the user's own; the same name again replaces it, a torch op's name is refused."""
        for word in (name, canonical(name)):
            if word in self._ops and self._ops[word].entry is None:
                also = "" if word == name else f" ({word!r} here)"
                raise PolicyError(
                    f"{name!r}{also} is an op of torch's and cannot be registered again. Choose"
                    " another name, or list it in a policy to change its rule."
                )
        with self._lock:
            self._names = {
                function: known for function, known in self._names.items() if known != name
            } | dict.fromkeys(functions, name)
            self._ops = self._ops | {name: Op(name, functions, entry)}
            self.generation += 1

    def unregister(self, name: str) -> None:
        """Forget an op of the user's own."""
        if name not in self._ops or self._ops[name].entry is None:
            raise PolicyError(
                f"{name!r} was not registered with mezzo.register_op, so it cannot be removed."
            )
        with self._lock:
            self._names = {
                function: known for function, known in self._names.items() if known != name
            }
            self._ops = {known: op for known, op in self._ops.items() if known != name}
            self.generation += 1


_making = threading.Lock()


@cache
def registry() -> Registry:
    """The registry of this process, made when it is first asked for."""
    # Two threads that ask first at once would each make one, and what is registered in the other
    # would be lost.
    with _making:
        return _made()


@cache
def _made() -> Registry:
    return Registry()


@cache
def parameters(function: Function) -> tuple[str, ...]:
    """Name a function's parameters in order; builtins are asked through the ATen schema that they bind.

    >>> parameters(torch.softmax)
    ('self', 'dim', 'dtype')
    """
    if isinstance(function, OpOverloadPacket):
        schemas = [schema for schema in function._schemas.values() if schema is not None]
    elif isinstance(function, OpOverload):
        schemas = [function._schema]
    else:
        try:
            return tuple(inspect.signature(function).parameters)
        except (ValueError, TypeError):
            schemas = _schemas(getattr(function, "__name__", ""))
    longest = max(schemas, key=lambda schema: len(schema.arguments), default=None)
    return (
        tuple(argument.name for argument in longest.arguments if not argument.is_out)
        if longest is not None
        else ()
    )


def _schemas(base: str) -> list[Any]:
    overloads = aten_overloads().get(canonical(base), ())
    # An operator's dunder has no schema of its own and takes the arguments of its op.
    bases = {base} if base in dict(overloads) else {canonical(base)}
    named = [
        get_schema(f"aten::{known}", overload) for known, overload in overloads if known in bases
    ]
    return [
        schema
        for schema in named
        if not any(argument.is_out for argument in schema.arguments)
        and "Dimname" not in str(schema)
    ]


@cache
def aten_overloads() -> dict[str, tuple[tuple[str, str], ...]]:
    """The (base name, overload name) pairs that torch's dispatcher knows, by op."""
    found: dict[str, list[tuple[str, str]]] = {}
    for qualified in all_op_names():
        namespace, _, rest = qualified.partition("::")
        if namespace == "aten":
            base, _, overload = rest.partition(".")
            found.setdefault(canonical(base), []).append((base, overload))
    return {name: tuple(sorted(overloads)) for name, overloads in found.items()}


@cache
def _functional() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for base, overload in (pair for pairs in aten_overloads().values() for pair in pairs):
        schema = get_schema(f"aten::{base}", overload)
        if (
            not any(argument.is_out for argument in schema.arguments)
            and "Dimname" not in str(schema)
            and not base.endswith("_")
        ):
            found.setdefault(base, set()).add(f"aten::{base}.{overload}".rstrip("."))
    return {base: frozenset(overloads) for base, overloads in found.items()}


def functional_overloads(base: str) -> frozenset[str]:
    """The dispatcher's names for the ways to call an ATen function that returns its result; empty for what ATen does not know.

    >>> sorted(functional_overloads("softmax"))
    ['aten::softmax.int']
    """
    return _functional().get(base, frozenset())


def _torch_functions() -> dict[str, list[Function]]:
    found: dict[str, list[Function]] = {}
    for namespace, prefix in _NAMESPACES:
        for word in dir(namespace):
            function = getattr(namespace, word, None)
            name = canonical(prefix + word if not word.startswith(prefix) else word)
            if (
                not callable(function)
                or isinstance(function, type | ModuleType)
                or word in _HELPERS
                or not is_op(name)
            ):
                continue
            if name in _PRIVATE_OPS or _is_public(word):
                found.setdefault(name, []).append(function)
    private: dict[str, list[Function]] = {
        name: [] for name in _PRIVATE_OPS if name in aten_overloads()
    }
    return private | {
        name: list(dict.fromkeys(functions))
        for name, functions in found.items()
        if _is_tensor_op(name, functions)
    }


_PATH = re.compile(
    r"(?:torch\.)?(?:(?:nn\.)?functional\.|F\.|Tensor\.)?((?:linalg|fft|special)\.)?(\w+)"
)
_ATEN = re.compile(r"(?:torch\.ops\.)?aten(?:::|\.)(\w+)(?:\.\w+)?")


def _bare(word: str) -> str:
    """What an op is called in the paths that people paste: `torch.nn.functional.softmax`, `torch.linalg.qr`, `aten.softmax.int`."""
    if aten := _ATEN.fullmatch(word):
        return aten[1]
    if path := _PATH.fullmatch(word):
        return (path[1] or "").replace(".", "_") + path[2]
    return word


def _is_public(word: str) -> bool:
    if word.startswith("__"):
        # What Python asks of a tensor (`__nonzero__`, `__index__`, `__complex__`) is no op, though
        # an op has the bare name.
        return word in DUNDERS
    return (
        not word.startswith("_")
        or canonical(word) != word.strip("_")
        or hasattr(torch.Tensor, word)
    )


def _is_tensor_op(name: str, functions: list[Function]) -> bool:
    """Tell ops from the other things that live in torch's namespaces: an op is known to ATen, or is a Python function that torch lets modes see."""
    return name in aten_overloads() or any(function in _overridable() for function in functions)


@cache
def _overridable() -> frozenset[Function]:
    return frozenset(
        function
        for functions in torch.overrides.get_overridable_functions().values()
        for function in functions
    )
