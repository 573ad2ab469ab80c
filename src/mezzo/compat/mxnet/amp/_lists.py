"""MXNet's op lists: give them, check the user's, translate them to policy fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import nearest
from mezzo.policy.presets import mxnet as preset
from mezzo.policy.presets.mxnet import listed_as
from mezzo.policy.types import Level, Rule

Condition = tuple[str, str, list[str]]
"""An op, one of its parameters, and the values for which it runs in float32."""

_CONDITIONAL = {
    torch.float16: [
        ("Activation", "act_type", ["softrelu"]),
        ("LeakyReLU", "act_type", ["elu", "selu"]),
    ],
    torch.bfloat16: [("LeakyReLU", "act_type", ["selu"])],
}
_LOSS_OUTPUTS = {
    torch.float16: [
        "SoftmaxOutput",
        "LinearRegressionOutput",
        "LogisticRegressionOutput",
        "MAERegressionOutput",
    ],
    torch.bfloat16: ["SoftmaxOutput"],
}
_FLOAT32_PARAMETERS = {
    name: ["", "gamma", "beta", "moving_mean", "moving_var"]
    for name in ("BatchNormWithReLU", "BatchNorm")
}


def read_dtype(target_dtype: Any, complaint: str = "not supported type") -> torch.dtype:
    """A 16-bit dtype from MXNet's words: a name, one of NumPy's or one of torch's.

    >>> read_dtype("bfloat16")
    torch.bfloat16
    """
    for dtype in HALF_DTYPES:
        name = dtype_name(dtype)
        if target_dtype in (dtype, name) or name in (
            getattr(target_dtype, "__name__", None),
            getattr(target_dtype, "name", None),
        ):
            return dtype
    raise AssertionError(f"{complaint}, got {target_dtype!r}. Choose float16 or bfloat16.")


def list_lp16_ops(target_dtype: Any = "float16") -> list[str]:
    """Ops that run in the 16-bit dtype.

    >>> "Convolution" in list_lp16_ops("float16")
    True
    """
    return listed_as("half", read_dtype(target_dtype))


def list_fp32_ops(target_dtype: Any = "float16") -> list[str]:
    """Ops that run in float32."""
    return listed_as("full", read_dtype(target_dtype))


def list_lp16_fp32_ops(target_dtype: Any = "float16") -> list[str]:
    """Ops that run in the dtype they are given."""
    return listed_as("keep", read_dtype(target_dtype))


def list_widest_type_cast(target_dtype: Any = "float16") -> list[str]:
    """Ops that run in the widest dtype of their inputs."""
    return listed_as("promote", read_dtype(target_dtype))


def list_conditional_fp32_ops(target_dtype: Any = "float16") -> list[Condition]:
    """Ops that run in float32 for some values of a parameter."""
    return [
        (op, parameter, list(values))
        for op, parameter, values in _CONDITIONAL[read_dtype(target_dtype)]
    ]


def list_loss_output_functions(target_dtype: Any = "float16") -> list[str]:
    """Output layers whose backward ignores the incoming gradient, and which get the scale themselves."""
    return list(_LOSS_OUTPUTS[read_dtype(target_dtype)])


def list_lp16_use_fp32_params(target_dtype: Any = "float16") -> dict[str, list[str]] | None:
    """Ops of the 16-bit lists that keep float32 parameters; None for float16, whose kernels see to it themselves."""
    if read_dtype(target_dtype) is torch.float16:
        return None
    return {name: list(parameters) for name, parameters in _FLOAT32_PARAMETERS.items()}


def check_lists(dtype: torch.dtype, target_ops: Any, fp32_ops: Any, conditional: Any) -> None:
    """Refuse lists that are none, that overlap, or that name an op which MXNet does not list. A list that is not given is MXNet's own."""
    for name, given in (
        ("target_dtype_ops", target_ops),
        ("fp32_ops", fp32_ops),
        ("conditional_fp32_ops", conditional),
    ):
        if given is not None and not isinstance(given, list):
            raise AssertionError(f"{name} should be a list of strs, got {type(given).__name__}.")
    conditions = (
        list_conditional_fp32_ops(dtype)
        if conditional is None
        else [_condition(one) for one in conditional]
    )
    lists = {
        "target_dtype_ops": set(list_lp16_ops(dtype) if target_ops is None else target_ops),
        "fp32_ops": set(list_fp32_ops(dtype) if fp32_ops is None else fp32_ops),
        "conditional_fp32_ops": {op for op, _, _ in conditions},
    }
    for (one, ones), (other, others) in combinations(lists.items(), 2):
        if ones & others:
            raise AssertionError(
                f"Ops cannot be in two or more lists. Common ops in {one} and {other}:"
                f" {sorted(ones & others)}. A list that is not given is MXNet's own: give both."
            )
    known = {
        *list_lp16_ops(dtype),
        *list_fp32_ops(dtype),
        *list_lp16_fp32_ops(dtype),
        *(op for op, _, _ in list_conditional_fp32_ops(dtype)),
    }
    if illegal := set().union(*lists.values()) - known:
        raise AssertionError(
            "Can only choose ops from one of the four lists for lp16_ops and fp32_ops: 1."
            " amp.list_lp16_ops(target_dtype) 2. amp.list_fp32_ops(target_dtype) 3."
            " amp.list_lp16_fp32_ops(target_dtype) 4. amp.list_conditional_fp32_ops(target_dtype)."
            f" Op {sorted(illegal)} not in any of them."
        )


def check_names(excluded: Any) -> list[str]:
    """The names that are left out, or an error."""
    if excluded is None:
        return []
    if isinstance(excluded, str) or not isinstance(excluded, Sequence):
        raise ValueError(
            "excluded_sym_names must be a list of strings representing the names of the symbols"
            f" that should not be casted, while received type {type(excluded)}."
        )
    return list(excluded)


def _condition(entry: Any) -> Condition:
    match entry:
        case (str() as op, str() as parameter, list() as values):
            return op, parameter, values
    raise AssertionError(
        f"conditional_fp32_ops should be a list of (str, str, list of str), got {entry!r}."
    )


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
    "LeakyReLU": {
        "leaky": "leaky_relu",
        "elu": "elu",
        "selu": "selu",
        "gelu": "gelu",
        "prelu": "prelu",
        "rrelu": "rrelu",
    },
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
        if (
            name not in _FORWARDS
            and name not in preset.NAMES.known
            and name not in preset.NAMES.unknown
        ):
            raise AttributeError(
                f"MXNet has no op {name!r} in its lists.{nearest(name, preset.NAMES.known)}"
                " amp.list_lp16_ops() and its neighbours give all."
            )
        found.update(_FORWARDS.get(name) or preset.NAMES.known.get(name, ()))
    return found


def overrides(
    dtype: torch.dtype,
    target_ops: Collection[str] | None,
    fp32_ops: Collection[str] | None,
    conditional: Sequence[Condition] | None,
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
            conditions.extend(
                (ours, _ARGUMENTS.get(argument, argument), [_value(value) for value in values])
                for ours in sorted(ops([op]))
            )
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
