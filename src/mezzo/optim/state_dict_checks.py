"""Check that a saved state fits an optimizer, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from mezzo._errors import CheckpointError, PolicyError
from mezzo.optim.companion import KEYS, MASTER, MASTERS, has_companion, mismatched_tensor
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name
from mezzo.scaling.gradients import parameters
from mezzo.scaling.scale_state import LARGEST
from mezzo.scaling.schedule_sync import groups_of

Optimizer = torch.optim.Optimizer
State = dict[str, Any]

OUR_KEYS = KEYS | {"draws"}
"""Keys of a parameter's state that mezzo adds."""

_COUNTERS = frozenset({"step", "draws"})
_ELEMENTWISE = {
    *ALGORITHMS,
    *(
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ),
}
"""Optimizers whose states are numbers, or tensors of the shape of their parameter."""
_REMEDY = "Load what the state_dict() of an optimizer over the same model returned."


def parameters_by_key(optimizer: Optimizer, state: State) -> dict[Any, torch.Tensor]:
    """Return an optimizer's parameters by their keys in a saved state.

    Groups of other sizes are not an error here, because torch checks them.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    return dict(zip(keys, parameters(optimizer), strict=False))


def check_state_fits(optimizer: Optimizer, state: State) -> None:
    """Raise an error if an optimizer could not continue from a saved state."""
    check_is_optimizer_state(state)
    by_key = parameters_by_key(optimizer, state)
    _check_masters_fit(by_key, state)
    groups = list(zip(groups_of(optimizer), state["param_groups"], strict=False))
    for index, (group, saved) in enumerate(groups):
        _check_options(f"param_groups[{index}]", group, saved, optimizer)
    merged = {key: {**group, **saved} for group, saved in groups for key in saved["params"]}
    for key, entries in state["state"].items():
        if key in by_key:
            _check_parameter_state(optimizer, f"state[{key!r}]", entries, by_key[key], merged[key])
        elif not isinstance(key, str):
            # Some optimizers have state that is not a parameter's, under a name; torch keeps it.
            raise CheckpointError(
                f"The optimizer's state has an entry for parameter {key!r}, which is in none of its"
                f" groups. {_REMEDY}"
            )


def check_is_optimizer_state(state: State) -> None:
    """Raise `CheckpointError` unless a value has the structure of an optimizer's state dict."""
    if (
        not isinstance(state, Mapping)
        or not isinstance(state.get("state"), Mapping)
        or not isinstance(state.get("param_groups"), list | tuple)
    ):
        raise CheckpointError(
            "This is not the state of an optimizer: it has no dictionary 'state' or no list"
            f" 'param_groups'. {_REMEDY}"
        )
    groups = state["param_groups"]
    if not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
        for group in groups
    ):
        raise CheckpointError(
            f"This is not the state of an optimizer: a group has no list 'params'. {_REMEDY}"
        )
    keys = [key for group in groups for key in group["params"]]
    if not all(isinstance(key, int | str) for key in keys) or len(set(keys)) != len(keys):
        raise CheckpointError(
            "The groups of the optimizer's state list a parameter twice, or something that is not"
            f" the number of a parameter. {_REMEDY}"
        )


def _check_masters_fit(by_key: dict[Any, torch.Tensor], state: State) -> None:
    not_stepped = state.get(MASTERS, {})
    if not isinstance(not_stepped, Mapping) or "kind" in not_stepped:
        raise CheckpointError(
            "The optimizer's state was saved by an older version of mezzo, which stored master"
            " weights in another format. Load it with that version, and save a"
            " mezzo.save_checkpoint."
        )
    for key, entries in [*state["state"].items(), *not_stepped.items()]:
        if not has_companion(entries):
            continue
        parameter = by_key.get(key)
        wrong = entries[MASTER] if parameter is None else mismatched_tensor(entries, parameter)
        if wrong is not None:
            own = (
                "no parameter"
                if parameter is None
                else f"a parameter of shape {tuple(parameter.shape)}"
            )
            raise PolicyError(
                f"The saved state has a master of shape {tuple(wrong.shape)} where this optimizer"
                f" has {own}. Load the state of an optimizer over the same model."
            )


def _check_options(
    where: str, group: Mapping[str, Any], saved: Mapping[str, Any], optimizer: Optimizer
) -> None:
    """Raise `CheckpointError` for options of a group with other types or invalid values.

    Flags may be missing: later versions of torch have added some, and torch sets them.
    """
    for name, value in group.items():
        if name in {"params", "param_names"}:
            continue
        if name not in saved and name in optimizer.defaults and isinstance(value, float | tuple):
            raise CheckpointError(f"{where} of the optimizer's state has no {name!r}. {_REMEDY}")
        # These are flags, though None by default.
        example = False if value is None and name in {"foreach", "fused"} else value
        if name in saved and not is_compatible(example, saved[name]):
            raise CheckpointError(
                f"{where}[{name!r}] of the optimizer's state is {saved[name]!r:.80}, and this"
                f" optimizer has {value!r:.80}. {_REMEDY}"
            )
    numbers = {
        name: saved[name]
        for name, value in group.items()
        if name in optimizer.defaults and name in saved and isinstance(value, float | tuple)
    }
    optimizer_class = algorithm_name(optimizer)
    if optimizer_class in _ELEMENTWISE:
        try:
            # The constructor checks the ranges of the numbers.
            optimizer_class([torch.zeros(1)], **numbers)
        except ValueError as error:
            raise CheckpointError(
                f"{where} of the optimizer's state has numbers that {optimizer_class.__name__} does"
                f" not accept: {error}. {_REMEDY}"
            ) from error


def _check_parameter_state(
    optimizer: Optimizer,
    where: str,
    entries: Any,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
) -> None:
    """Raise `CheckpointError` if the state of a parameter is incomplete or has other shapes."""
    if not isinstance(entries, Mapping):
        raise CheckpointError(
            f"{where} of the optimizer's state is {entries!r:.80}, not a dictionary. {_REMEDY}"
        )
    optimizer_class = algorithm_name(optimizer)
    algorithm = ALGORITHMS.get(optimizer_class)
    names = () if algorithm is None else algorithm.states(group)
    # SGD creates its momentum at the first step that needs it, and reads no step count.
    if (
        algorithm is not None
        and optimizer_class is not torch.optim.SGD
        and entries.keys() - OUR_KEYS
    ):
        required = (*names, "step") if algorithm.has_step_count else names
        if missing := [name for name in required if entries.get(name) is None]:
            listed = ", ".join(map(repr, missing))
            raise CheckpointError(f"{where} of the optimizer's state has no {listed}. {_REMEDY}")
    current = optimizer.state.get(parameter) or {}
    for name, value in entries.items():
        is_shaped = name in names or (
            optimizer_class in _ELEMENTWISE and isinstance(value, torch.Tensor) and value.dim() > 0
        )
        example = parameter if is_shaped else None
        if isinstance(current.get(name), torch.Tensor):
            example = current[name]
        problem = _companion_problem(value) if name in KEYS else _problem(name, value, example)
        if problem:
            raise CheckpointError(
                f"{where}[{name!r}] of the optimizer's state {problem}. {_REMEDY}"
            )


def _companion_problem(value: Any) -> str | None:
    # torch.distributed.checkpoint reads what is missing as an empty dict.
    if isinstance(value, torch.Tensor) or value == {}:
        return None
    return f"is {value!r:.80}, not a tensor"


def _problem(name: str, value: Any, example: torch.Tensor | None) -> str | None:
    """Return why a value cannot be a counter, or an entry of a state like an example."""
    if name in _COUNTERS:
        on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
        is_count = is_number(value) and (on_device or bool(value >= 0))
        return None if is_count else f"is {value!r:.80}, not a number of steps"
    if isinstance(value, torch.Tensor):
        return _tensor_problem(value, example)
    if example is not None and value is not None and (example.numel() != 1 or not is_number(value)):
        return f"is {value!r:.80}, not a tensor"
    return None


def _tensor_problem(value: torch.Tensor, example: torch.Tensor | None) -> str | None:
    if value.layout is not torch.strided or value.is_meta:
        return f"is a {value.layout} tensor on {value.device}"
    strides = zip(value.shape, value.stride(), strict=True)
    if value.numel() > 1 + sum((size - 1) * stride for size, stride in strides):
        return "is expanded: some of its elements share their memory, and cannot be updated"
    if example is not None and (value.shape != example.shape or not same_kind(value, example)):
        return (
            f"has shape {tuple(value.shape)} and {value.dtype}, where {tuple(example.shape)} and"
            f" {example.dtype} was expected"
        )
    return None


def same_kind(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether tensors are both floating-point, both complex, both boolean or both integer.

    >>> ones = torch.ones(1)
    >>> same_kind(ones, ones.half()), same_kind(ones, ones.int())
    (True, False)
    """
    bool_ = torch.bool
    return (first.is_floating_point(), first.is_complex(), first.dtype is bool_) == (
        second.is_floating_point(),
        second.is_complex(),
        second.dtype is bool_,
    )


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor of one, that is not NaN and fits float32.

    Reads only tensors on the CPU.

    >>> is_number(2), is_number(torch.tensor(2.0)), is_number(True), is_number(float("nan"))
    (True, True, False, False)
    """
    if isinstance(value, torch.Tensor):
        is_plain = (
            value.numel() == 1
            and value.layout is torch.strided
            and not value.is_meta
            and not value.is_complex()
            and value.dtype is not torch.bool
        )
        return is_plain and (value.device.type != "cpu" or not bool(value.isnan().any()))
    # torch's kernels take float32 numbers: larger ones would raise in the middle of a step.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (abs(value) <= LARGEST or math.isinf(value))
    )


def is_compatible(current: Any, saved: Any) -> bool:
    """Return whether a saved option or counter can replace the current one.

    Numbers can replace numbers, strings strings, and sequences sequences of as many numbers.

    >>> is_compatible(0.1, 2), is_compatible((0.9, 0.99), [0.5, 0.6])
    (True, True)
    >>> is_compatible(0.1, "2"), is_compatible((0.9, 0.99), (0.5,))
    (False, False)
    """
    if isinstance(current, bool):
        return saved is None or isinstance(saved, bool)
    if current is None:
        return saved is None or isinstance(
            saved, bool | int | float | str | torch.Tensor | list | tuple
        )
    if isinstance(current, int | float | torch.Tensor):
        return is_number(saved) or not is_number(current)
    if isinstance(current, list | tuple):
        has_numbers = bool(current) and all(map(is_number, current))
        return isinstance(saved, list | tuple) and (
            not has_numbers or (len(saved) == len(current) and all(map(is_number, saved)))
        )
    return isinstance(saved, type(current)) or not isinstance(current, str | dict)
