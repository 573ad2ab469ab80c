"""Registry of known ops: one name each, the Python functions that call it, its ATen overloads.

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

# In torch's autocast lists, but without a public function.
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
    """One op."""

    name: str
    functions: tuple[Function, ...] = field(repr=False)
    """The Python functions and methods that call it."""
    entry: Entry | None = None
    """Rule and reason of an op that `register_op` added, for policies that do not list it; None for
    torch's ops."""


class Registry:
    """All known ops, by name and by the functions that call them."""

    def __init__(self) -> None:
        self._ops: dict[str, Op] = {
            name: Op(name, tuple(functions))
            for name, functions in sorted(_torch_functions().items())
        }
        self._names: dict[Function, str] = {
            function: op.name for op in self._ops.values() for function in op.functions
        }
        self.generation = 0
        """Incremented by every registration; part of the key of caches that depend on the ops."""
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops.values())

    def __contains__(self, name: object) -> bool:
        return name in self._ops

    def __getitem__(self, name: str) -> Op:
        return self._ops[name]

    @property
    def names(self) -> frozenset[str]:
        """The names of all known ops."""
        return frozenset(self._ops)

    def parse(self, name: str) -> str:
        """Return the canonical name of an op for any of its spellings.

        >>> registry().parse("true_divide"), registry().parse("F.softmax")
        ('div', 'softmax')
        >>> registry().parse("aten::softmax.int")
        'softmax'
        """
        if not isinstance(name, str):
            example = (callable(name) and self.name_of(name)) or "softmax"
            raise PolicyError(
                f"An op is named by a string such as {example!r}, got {name!r}."
                " `mezzo.ops()` lists them."
            )
        base = _base_name(name)
        op = name if name in self._ops else canonical(base)
        if op in self._ops:
            return op
        if op in NOT_OPS:
            raise PolicyError(
                f"No rule applies to {name!r}: it carries, describes, makes or converts a tensor."
                " `mezzo.ops()` lists the ops that have one."
            )
        raise PolicyError(
            f"Unknown op {name!r}.{nearest(base, self._ops)} `mezzo.ops()` lists the known ones,"
            " `mezzo.register_op` adds your own."
        )

    def name_of(self, function: Function) -> str | None:
        """Return the op that a Python function, a method or an ATen overload calls, if any."""
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
        """Return all ATen overloads of an op, with the in-place and out variants."""
        return tuple(
            getattr(getattr(torch.ops.aten, base), overload or "default")
            for base, overload in aten_overloads().get(name, ())
        )

    def register(self, name: str, functions: tuple[Function, ...], entry: Entry) -> None:
        """Add or replace an op that is not torch's."""
        for spelling in (name, canonical(name)):
            if spelling in self._ops and self._ops[spelling].entry is None:
                also = "" if spelling == name else f" ({spelling!r} here)"
                raise PolicyError(
                    f"{name!r}{also} is an op of torch and cannot be registered again. Choose"
                    " another name, or list it in a policy to change its rule."
                )
        with self._lock:
            self._names = {
                function: known for function, known in self._names.items() if known != name
            } | dict.fromkeys(functions, name)
            self._ops = self._ops | {name: Op(name, functions, entry)}
            self.generation += 1

    def unregister(self, name: str) -> None:
        """Remove an op that `register` added."""
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


_creation_lock = threading.Lock()


@cache
def registry() -> Registry:
    """Return the registry of this process, which the first call creates."""
    # Without the lock two threads could each create a registry, and ops registered in one of them
    # would be lost.
    with _creation_lock:
        return _created()


@cache
def _created() -> Registry:
    return Registry()


@cache
def parameters(function: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters in order; a builtin's from its ATen schema.

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
    # A dunder such as `__add__` has no schema: it takes the arguments of its op.
    requested = base if base in dict(overloads) else canonical(base)
    schemas = (
        get_schema(f"aten::{known}", overload)
        for known, overload in overloads
        if known == requested
    )
    return [schema for schema in schemas if _is_functional(schema)]


def _is_functional(schema: Any) -> bool:
    """Return whether a schema has no `out=` argument and no named dimensions."""
    has_out = any(argument.is_out for argument in schema.arguments)
    return not has_out and "Dimname" not in str(schema)


@cache
def aten_overloads() -> dict[str, tuple[tuple[str, str], ...]]:
    """Return the (base name, overload name) pairs of torch's dispatcher, by op."""
    overloads: dict[str, list[tuple[str, str]]] = {}
    for qualified in all_op_names():
        namespace, _, rest = qualified.partition("::")
        if namespace == "aten":
            base, _, overload = rest.partition(".")
            overloads.setdefault(canonical(base), []).append((base, overload))
    return {name: tuple(sorted(pairs)) for name, pairs in overloads.items()}


def functional_overloads(base: str) -> frozenset[str]:
    """Return the qualified overloads of an ATen function that return a new tensor.

    Empty if ATen has no function of this name.

    >>> sorted(functional_overloads("softmax"))
    ['aten::softmax.int']
    """
    return _functional().get(base, frozenset())


@cache
def _functional() -> dict[str, frozenset[str]]:
    functional: dict[str, set[str]] = {}
    for base, overload in (pair for pairs in aten_overloads().values() for pair in pairs):
        if not base.endswith("_") and _is_functional(get_schema(f"aten::{base}", overload)):
            qualified = f"aten::{base}.{overload}".rstrip(".")
            functional.setdefault(base, set()).add(qualified)
    return {base: frozenset(overloads) for base, overloads in functional.items()}


def _torch_functions() -> dict[str, list[Function]]:
    """Return the functions of torch's namespaces that call each op."""
    by_op: dict[str, list[Function]] = {}
    for namespace, prefix in _NAMESPACES:
        for attribute in dir(namespace):
            function = getattr(namespace, attribute, None)
            name = canonical(attribute if attribute.startswith(prefix) else prefix + attribute)
            if not callable(function) or isinstance(function, type | ModuleType):
                continue
            is_listed = name in _PRIVATE_OPS or _is_public(attribute)
            if is_listed and attribute not in _HELPERS and is_op(name):
                by_op.setdefault(name, []).append(function)
    private: dict[str, list[Function]] = {
        name: [] for name in _PRIVATE_OPS if name in aten_overloads()
    }
    return private | {
        name: list(dict.fromkeys(functions))
        for name, functions in by_op.items()
        if _is_tensor_op(name, functions)
    }


_PATH = re.compile(
    r"(?:torch\.)?(?:(?:nn\.)?functional\.|F\.|Tensor\.)?((?:linalg|fft|special)\.)?(\w+)"
)
_ATEN = re.compile(r"(?:torch\.ops\.)?aten(?:::|\.)(\w+)(?:\.\w+)?")


def _base_name(path: str) -> str:
    """Return the last part of the path of an op, as pasted from code.

    >>> _base_name("torch.nn.functional.softmax"), _base_name("aten.softmax.int")
    ('softmax', 'softmax')
    >>> _base_name("torch.linalg.qr")
    'linalg_qr'
    """
    if aten := _ATEN.fullmatch(path):
        return aten[1]
    if match := _PATH.fullmatch(path):
        return (match[1] or "").replace(".", "_") + match[2]
    return path


def _is_public(name: str) -> bool:
    if name.startswith("__"):
        # Python's conversions of a tensor (`__nonzero__`, `__index__`, `__complex__`) are not ops,
        # although the name without underscores may be one.
        return name in DUNDERS
    return (
        not name.startswith("_")
        or canonical(name) != name.strip("_")
        or hasattr(torch.Tensor, name)
    )


def _is_tensor_op(name: str, functions: list[Function]) -> bool:
    """Return whether a name is in ATen, or one of its functions is visible to function modes."""
    return name in aten_overloads() or any(function in _overridable() for function in functions)


@cache
def _overridable() -> frozenset[Function]:
    return frozenset(
        function
        for functions in torch.overrides.get_overridable_functions().values()
        for function in functions
    )
