"""`mxnet.amp.list_*`: MXNet's op lists; checking and translating the user's lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


def parse_target_dtype(target_dtype: Any, complaint: str = "not supported type") -> torch.dtype:
    """Return the 16-bit dtype of a name, a NumPy dtype or a torch dtype; otherwise raise.

    >>> parse_target_dtype("bfloat16")
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
    """Return the ops that run in the 16-bit dtype.

    >>> "Convolution" in list_lp16_ops("float16")
    True
    """
    return listed_as("half", parse_target_dtype(target_dtype))


def list_fp32_ops(target_dtype: Any = "float16") -> list[str]:
    """Return the ops that run in float32."""
    return listed_as("full", parse_target_dtype(target_dtype))


def list_lp16_fp32_ops(target_dtype: Any = "float16") -> list[str]:
    """Return the ops that run in the dtype of their inputs."""
    return listed_as("keep", parse_target_dtype(target_dtype))


def list_widest_type_cast(target_dtype: Any = "float16") -> list[str]:
    """Return the ops that run in the widest dtype of their inputs."""
    return listed_as("promote", parse_target_dtype(target_dtype))


def list_conditional_fp32_ops(target_dtype: Any = "float16") -> list[Condition]:
    """Return the ops that run in float32 for some values of a parameter."""
    return [
        (op, parameter, list(values))
        for op, parameter, values in _CONDITIONAL[parse_target_dtype(target_dtype)]
    ]


def list_loss_output_functions(target_dtype: Any = "float16") -> list[str]:
    """Return the output layers, whose own gradient is multiplied by the loss scale."""
    return list(_LOSS_OUTPUTS[parse_target_dtype(target_dtype)])


def list_lp16_use_fp32_params(target_dtype: Any = "float16") -> dict[str, list[str]] | None:
    """Return the 16-bit ops with float32 parameters; None for float16.

    MXNet's float16 kernels take float32 parameters by themselves.
    """
    if parse_target_dtype(target_dtype) is torch.float16:
        return None
    return {name: list(parameters) for name, parameters in _FLOAT32_PARAMETERS.items()}


def check_lists(dtype: torch.dtype, target_ops: Any, fp32_ops: Any, conditional: Any) -> None:
    """Raise MXNet's errors for invalid, overlapping or unknown entries.

    None stands for MXNet's default list.
    """
    for name, value in (("target_dtype_ops", target_ops), ("fp32_ops", fp32_ops)):
        if value is not None and not (
            isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        ):
            raise AssertionError(f"{name} should be a list of strs, got {_type_of(value)}.")
    conditions = (
        list_conditional_fp32_ops(dtype) if conditional is None else check_conditions(conditional)
    )
    lists = {
        "target_dtype_ops": set(list_lp16_ops(dtype) if target_ops is None else target_ops),
        "fp32_ops": set(list_fp32_ops(dtype) if fp32_ops is None else fp32_ops),
        "conditional_fp32_ops": {op for op, _, _ in conditions},
    }
    _check_disjoint(lists, " A list that is not passed is MXNet's default: pass both.")
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


@dataclass(frozen=True)
class OpLists:
    """The arguments of `amp.init`; a list that was not passed is MXNet's."""

    target_dtype: torch.dtype
    target_precision_ops: frozenset[str]
    fp32_ops: frozenset[str]
    conditional_fp32_ops: frozenset[tuple[str, str, frozenset[str]]]


def check_init_lists(
    dtype: torch.dtype, target_ops: Any, fp32_ops: Any, conditional: Any
) -> OpLists:
    """Return the lists of `amp.init`, or raise for invalid, unknown or repeated entries.

    An op that is passed in one list leaves MXNet's other lists; in two lists that are passed it is
    an error.

    >>> lists = check_init_lists(torch.float16, ["Convolution"], None, None)
    >>> sorted(lists.target_precision_ops), "softmax" in lists.fp32_ops
    (['Convolution'], True)
    """
    passed = {"target_precision_ops": target_ops, "fp32_ops": fp32_ops}
    for name, names in passed.items():
        _check_names(name, names)
    conditions = [] if conditional is None else check_conditions(conditional)
    translate_ops(op for op, _, _ in conditions)
    _check_disjoint(
        {name: set(names) for name, names in passed.items() if names is not None}
        | {"conditional_fp32_ops": {op for op, _, _ in conditions}}
    )
    if conditional is None:
        conditions = list_conditional_fp32_ops(dtype)
    return OpLists(
        dtype,
        frozenset(list_lp16_ops(dtype) if target_ops is None else target_ops),
        frozenset(list_fp32_ops(dtype) if fp32_ops is None else fp32_ops),
        frozenset((op, argument, frozenset(values)) for op, argument, values in conditions),
    )


def _check_names(argument: str, names: Any) -> None:
    """Raise unless a list of op names is None or a collection of MXNet's ops."""
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Collection):
        raise AssertionError(
            f"{argument} should be a list of strs, got {type(names).__name__}. Pass for example"
            f" {argument}=['Convolution']."
        )
    for name in names:
        if not isinstance(name, str):
            raise AssertionError(
                f"{argument} should be a list of strs, got {name!r} in it. Pass op names such as"
                " 'Convolution'."
            )
    translate_ops(names)


def check_excluded_names(excluded: Any) -> list[str]:
    """Return `excluded_sym_names` as a list, or raise MXNet's error."""
    if excluded is None:
        return []
    if (
        isinstance(excluded, str)
        or not isinstance(excluded, Sequence)
        or not all(isinstance(name, str) for name in excluded)
    ):
        raise ValueError(
            "excluded_sym_names must be a list of strings representing the names of the symbols"
            f" that should not be casted, while received type {type(excluded)}: {excluded!r}."
        )
    return list(excluded)


def check_conditions(conditional: Any) -> list[Condition]:
    """Return `conditional_fp32_ops` as a list, or raise MXNet's error."""
    complaint = "conditional_fp32_ops should be a list of (str, str, list of str), got"
    if not isinstance(conditional, list | tuple):
        raise AssertionError(f"{complaint} {type(conditional).__name__}.")
    conditions: list[Condition] = []
    for entry in conditional:
        match entry:
            case (str() as op, str() as parameter, list() | tuple() as values):
                conditions.append((op, parameter, list(values)))
            case _:
                raise AssertionError(
                    f"{complaint} {entry!r}. Pass for example"
                    " [('Activation', 'act_type', ['softrelu'])]."
                )
    return conditions


def _check_disjoint(lists: Mapping[str, set[str]], remedy: str = "") -> None:
    for (name, names), (other_name, others) in combinations(lists.items(), 2):
        if common := names & others:
            raise AssertionError(
                f"Ops cannot be in two or more lists. Common ops in {name} and {other_name}:"
                f" {sorted(common)}.{remedy or ' Keep each op in one of them.'}"
            )


def _type_of(value: Any) -> str:
    """Return the type of a value, of a list with the types of its entries."""
    if not isinstance(value, list):
        return type(value).__name__
    return f"list of {', '.join(sorted({type(entry).__name__ for entry in value}))}"


_OUTPUT_LAYER_OPS: Mapping[str, tuple[str, ...]] = {
    "SoftmaxOutput": ("softmax",),
    "LogisticRegressionOutput": ("sigmoid",),
    "LinearRegressionOutput": (),
    "MAERegressionOutput": (),
}
"""The ops of the output layers' forward."""

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
"""Activation ops of MXNet by their `act_type`, which are separate ops in torch."""

_ARGUMENT_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def translate_ops(names: Iterable[str]) -> set[str]:
    """Return mezzo's op names for MXNet's; ops without a counterpart in torch are left out.

    >>> sorted(translate_ops(["Convolution", "FullyConnected", "SoftmaxOutput"]))
    ['conv1d', 'conv2d', 'conv3d', 'linear', 'softmax']
    """
    translated: set[str] = set()
    for name in names:
        if (
            name not in _OUTPUT_LAYER_OPS
            and name not in preset.NAMES.known
            and name not in preset.NAMES.unknown
        ):
            raise AttributeError(
                f"MXNet has no op {name!r} in its lists.{nearest(name, preset.NAMES.known)}"
                " See amp.list_lp16_ops() and the other amp.list_* functions."
            )
        translated.update(_OUTPUT_LAYER_OPS.get(name) or preset.NAMES.known.get(name, ()))
    return translated


def policy_fields(
    dtype: torch.dtype,
    target_ops: Collection[str] | None,
    fp32_ops: Collection[str] | None,
    conditional: Sequence[Condition] | None,
) -> dict[str, Any]:
    """Return the policy fields for the user's lists.

    Each list that is passed replaces MXNet's; ops that are only in the replaced list get the keep
    rule.
    """
    entries = preset.lists(Level.O1, dtype).entries
    conditional_full = {op for op in preset.conditional_ops(dtype) if op in entries}
    half = set() if target_ops is None else translate_ops(target_ops)
    full = set() if fp32_ops is None else translate_ops(fp32_ops)
    activations, conditions = _translate_conditions(conditional or ())
    full |= activations - half
    replaced: set[str] = set()
    if target_ops is not None:
        replaced |= {op for op, entry in entries.items() if entry.rule is Rule.HALF}
    if fp32_ops is not None:
        full_ops = {op for op, entry in entries.items() if entry.rule is Rule.FULL}
        replaced |= full_ops - conditional_full
    if conditional is not None:
        replaced |= conditional_full
    return {"half": half, "full": full, "keep": replaced - half - full, "conditional": conditions}


def _translate_conditions(
    entries: Sequence[Condition],
) -> tuple[set[str], list[tuple[str, str, list[Any]]]]:
    """Return the torch ops of conditional activations, and the other conditions translated."""
    activations: set[str] = set()
    conditions: list[tuple[str, str, list[Any]]] = []
    for op, argument, values in entries:
        if op in _ACTIVATIONS:
            by_type = _ACTIVATIONS[op]
            activations.update(by_type[value] for value in values if value in by_type)
        else:
            conditions.extend(
                (name, _ARGUMENT_NAMES.get(argument, argument), [_parse_value(v) for v in values])
                for name in sorted(translate_ops([op]))
            )
    return activations, conditions


def _parse_value(value: Any) -> Any:
    """Return the value of an argument, which MXNet's graphs store as a string."""
    if not isinstance(value, str):
        return value
    for parse in (int, float):
        try:
            return parse(value)
        except ValueError:
            continue
    return {"True": True, "False": False, "None": None}.get(value, value)
