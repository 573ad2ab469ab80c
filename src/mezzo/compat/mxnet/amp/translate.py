"""From op lists in MXNet's words to the words of a policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from mezzo._errors import nearest
from mezzo.compat.mxnet.amp.lists import Condition
from mezzo.policy.presets import mxnet as preset
from mezzo.policy.types import Level, Rule

_FORWARDS: Mapping[str, tuple[str, ...]] = {
    "SoftmaxOutput": ("softmax",),
    "LogisticRegressionOutput": ("sigmoid",),
    "LinearRegressionOutput": (),
    "MAERegressionOutput": (),
}
"""What the output layers compute on their way forward."""

_ACTIVATIONS: Mapping[str, Mapping[str, str]] = {
    "Activation": {
        "relu": "relu",
        "sigmoid": "sigmoid",
        "tanh": "tanh",
        "softrelu": "softplus",
        "softsign": "softsign",
        "mish": "mish",
        "log_sigmoid": "log_sigmoid",
    },
    "LeakyReLU": {"leaky": "leaky_relu", "elu": "elu", "selu": "selu", "gelu": "gelu", "prelu": "prelu", "rrelu": "rrelu"},
}
"""What is one op with a kind there, and several ops here."""

_ARGUMENTS = {"axis": "dim", "keepdims": "keepdim"}


def ops(names: Iterable[str]) -> set[str]:
    """Our names for MXNet's ops; what torch has no counterpart for falls out, for nothing here can call it.

    >>> sorted(ops(["Convolution", "FullyConnected", "SoftmaxOutput"]))
    ['conv1d', 'conv2d', 'conv3d', 'linear', 'softmax']
    """
    found: set[str] = set()
    for name in names:
        if name not in _FORWARDS and name not in preset.NAMES.known and name not in preset.NAMES.unknown:
            raise AttributeError(f"MXNet has no op {name!r} in its lists.{nearest(name, preset.NAMES.known)} amp.list_lp16_ops() and its neighbours give all.")
        found.update(_FORWARDS.get(name) or preset.NAMES.known.get(name, ()))
    return found


def overrides(
    dtype: torch.dtype, target_ops: Collection[str] | None, fp32_ops: Collection[str] | None, conditional: Sequence[Condition] | None
) -> dict[str, Any]:
    """Fields of a policy: each list that is given takes the place of MXNet's own, whose other ops are then left as they are."""
    entries = preset.lists(Level.O1, dtype).entries
    by_condition = {op for op in preset.conditional_ops(dtype) if op in entries}
    half = set() if target_ops is None else ops(target_ops)
    full = set() if fp32_ops is None else ops(fp32_ops)
    kinds, conditions = _conditions(conditional or ())
    full |= kinds - half
    dropped: set[str] = set()
    if target_ops is not None:
        dropped |= {op for op, entry in entries.items() if entry.rule is Rule.HALF}
    if fp32_ops is not None:
        dropped |= {op for op, entry in entries.items() if entry.rule is Rule.FULL} - by_condition
    if conditional is not None:
        dropped |= by_condition
    return {"half": half, "full": full, "keep": dropped - half - full, "conditional": conditions}


def _conditions(entries: Sequence[Condition]) -> tuple[set[str], list[tuple[str, str, list[Any]]]]:
    """Conditional entries: ops of their own for kinds of activation, and values of an argument for the rest."""
    kinds: set[str] = set()
    conditions: list[tuple[str, str, list[Any]]] = []
    for op, argument, values in entries:
        if op in _ACTIVATIONS:
            kinds.update(_ACTIVATIONS[op][value] for value in values if value in _ACTIVATIONS[op])
        else:
            conditions.extend((ours, _ARGUMENTS.get(argument, argument), [_value(value) for value in values]) for ours in sorted(ops([op])))
    return kinds, conditions


def _value(word: Any) -> Any:
    """A value of an argument. MXNet's graphs keep them as strings."""
    if not isinstance(word, str):
        return word
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return {"True": True, "False": False, "None": None}.get(word, word)
