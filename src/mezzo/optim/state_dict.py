"""An optimizer's own `state_dict`, with the companion tensors of its 16-bit parameters, loaded back to the bit.

Companions are part of each parameter's state, so that they travel wherever the state does:
`torch.distributed.checkpoint` keeps nothing else. The tensors are live: a step updates them where
they are. Two things need care. torch's optimizers begin a state that is empty, and fail on one that
holds nothing but a companion, so companions of parameters that have not been stepped are saved
beside `state`. And torch casts every state to its parameter's dtype when it is loaded: of float32
moments beside bfloat16 parameters 16 bits would be left.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from mezzo._errors import CheckpointError, PolicyError
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name
from mezzo.optim.master_weights import (
    KEYS,
    MASTER,
    Companion,
    MasterWeights,
    has_companion,
    misfit,
    without_companion,
)
from mezzo.scaling.gradients import parameters
from mezzo.scaling.scale_state import LARGEST
from mezzo.scaling.schedule_sync import groups_of

Optimizer = torch.optim.Optimizer
State = dict[str, Any]

MASTERS = "mezzo_masters"
"""Beside `state` and `param_groups`: the companions of parameters whose state the optimizer has
not begun. A plain optimizer ignores it."""

_OURS = KEYS | {"draws"}
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
"""Optimizers whose states are numbers, or tensors of their parameter's shape."""
_REMEDY = "Load what the state_dict() of an optimizer over the same model gave."


def hook_state_dict(optimizer: Optimizer, masters: MasterWeights, undo: ExitStack) -> None:
    """Hook an optimizer's saving and loading, and take over the companions that it has loaded before; the stack gets what takes everything off."""
    saving = _Saving(masters)
    undo.callback(optimizer.register_state_dict_post_hook(saving.after_saving).remove)
    undo.callback(optimizer.register_load_state_dict_pre_hook(saving.before_loading).remove)
    undo.callback(optimizer.register_load_state_dict_post_hook(saving.after_loading).remove)
    undo.callback(_remove_companions, optimizer)
    _take_over(optimizer, masters)


def without_masters(state: State) -> State:
    """Return an optimizer's saved state without companion tensors."""
    kept = {name: value for name, value in state.items() if name != MASTERS}
    return {
        **kept,
        "state": {number: without_companion(held) for number, held in state["state"].items()},
    }


class _Saving:
    def __init__(self, masters: MasterWeights) -> None:
        self._masters = masters
        self._came: State = {}
        """The state that is being loaded, as it came."""

    def after_saving(self, optimizer: Optimizer, state: State) -> None:
        """Add the companion of each parameter to its state. Live tensors, as torch's own state."""
        states, begun, waiting = state["state"], dict(state["state"]), {}
        for number, parameter in enumerate(parameters(optimizer)):
            if parameter in self._masters:
                self._masters.resync(parameter)
                companion = self._masters.companion(parameter)
                if companion is not None and states.get(number):
                    begun[number] = {**without_companion(states[number]), **companion.entries()}
                elif companion is not None:
                    waiting[number] = companion.entries()
        if begun and all(
            isinstance(held, Mapping) and held.keys() <= _OURS for held in begun.values()
        ):
            # torch.distributed.checkpoint wants an entry for every parameter or for none, and this
            # optimizer has no state of its own.
            begun = {
                number: begun.get(number, {}) for number, _ in enumerate(parameters(optimizer))
            }
        state["state"] = begun
        if waiting:
            state[MASTERS] = waiting

    def before_loading(self, optimizer: Optimizer, state: State) -> State:
        """Keep what came; refuse what does not fit before anything changes. torch does not see the companions, which it would round."""
        check_masters_fit(optimizer, state)
        self._came = state
        return without_masters(state)

    def after_loading(self, optimizer: Optimizer) -> None:
        """Put back what torch rounded, and load the companions."""
        came, self._came = self._came, {}
        unread = False
        for number, parameter in _numbers(optimizer, came).items():
            if parameter not in self._masters:
                continue
            state = came["state"].get(number)
            if state:
                optimizer.state[parameter] = _exactly(optimizer.state[parameter], state)
                self._masters.show(parameter, optimizer.state)
            held = state if has_companion(state) else came.get(MASTERS, {}).get(number, {})
            if not has_companion(held):
                continue
            companion = Companion.read(held, parameter)
            if companion is not None:
                self._masters.load(parameter, companion)
            unread = unread or (
                companion is None and self._masters.companion_tensor(parameter) is not None
            )
        if unread:
            warnings.warn(
                "The state holds master weights of another kind or dtype, which cannot be turned"
                f" into master={self._masters.kind.master.value!r} here: the masters start from the"
                " model's weights. To take exact weights over, load a mezzo.save_checkpoint, or a"
                " model state that was saved with save_dtype='float32'.",
                UserWarning,
                # Seen from the line that called load_state_dict, which torch wraps twice.
                stacklevel=5,
            )


def _take_over(optimizer: Optimizer, masters: MasterWeights) -> None:
    """Use companions that a plain optimizer has loaded, wherever the parameter still has the very value that they belong to."""
    for parameter in parameters(optimizer):
        state = optimizer.state.get(parameter)
        if state and parameter in masters and masters.companion_tensor(parameter) is not None:
            companion = Companion.read(state, parameter)
            if companion is not None:
                value = masters.read(parameter)
                # A 16-bit value in a float32 parameter is what was saved with the companion; any
                # other was trained since.
                masters.write(
                    parameter,
                    torch.where(
                        value == parameter.detach().float(), companion.value(parameter), value
                    ),
                )
    _remove_companions(optimizer)
    for parameter in masters:
        if optimizer.state.get(parameter):
            masters.show(parameter, optimizer.state)


def _remove_companions(optimizer: Optimizer) -> None:
    for parameter in parameters(optimizer):
        state = optimizer.state.get(parameter)
        if state:
            for key in KEYS & state.keys():
                del state[key]
            if not state:
                # torch.distributed.checkpoint takes an optimizer with any state for one that has
                # begun.
                del optimizer.state[parameter]


def _exactly(loaded: Any, came: Any) -> Any:
    """What torch has loaded, with every tensor that it cast as it came; a tensor of its own, as after a cast."""
    if isinstance(came, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype is came.dtype else came.to(device=loaded.device, copy=True)
    if isinstance(came, Mapping) and isinstance(loaded, dict):
        return {
            key: _exactly(value, came[key]) if key in came else value
            for key, value in loaded.items()
        }
    if isinstance(came, list | tuple) and isinstance(loaded, list | tuple):
        return type(loaded)(_exactly(one, other) for one, other in zip(loaded, came, strict=True))
    return loaded


def _numbers(optimizer: Optimizer, state: State) -> dict[Any, torch.Tensor]:
    """An optimizer's parameters by the numbers of a saved state; as far as they go, for torch itself refuses other groups."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    return dict(zip(saved, parameters(optimizer), strict=False))


def check_masters_fit(optimizer: Optimizer, state: State) -> None:
    """Refuse a saved state that an optimizer over these parameters could not go on from."""
    refuse_other_content(state)
    waiting = state.get(MASTERS, {})
    if not isinstance(waiting, Mapping) or "kind" in waiting:
        raise CheckpointError(
            "The optimizer's state was saved by an older mezzo, which kept master weights in"
            " another way. Load it there, and save a mezzo.save_checkpoint."
        )
    numbers = _numbers(optimizer, state)
    for number, held in [*state["state"].items(), *waiting.items()]:
        if not has_companion(held):
            continue
        parameter = numbers.get(number)
        wrong = held[MASTER] if parameter is None else misfit(held, parameter)
        if wrong is not None:
            shape = "nothing" if parameter is None else f"one of shape {tuple(parameter.shape)}"
            raise PolicyError(
                f"The saved state has a master of shape {tuple(wrong.shape)} where this optimizer"
                f" has {shape}. Load the state of an optimizer over the same model."
            )
    groups = list(zip(groups_of(optimizer), state["param_groups"], strict=False))
    for place, (own, saved) in enumerate(groups):
        _refuse_other_options(f"param_groups[{place}]", own, saved, optimizer)
    merged = {number: {**own, **saved} for own, saved in groups for number in saved["params"]}
    for number, held in state["state"].items():
        if number in numbers:
            _refuse_other_state(
                optimizer, f"state[{number!r}]", held, numbers[number], merged[number]
            )
        elif not isinstance(number, str):
            # torch keeps what belongs to no parameter; some optimizers have such state, by a name.
            raise CheckpointError(
                f"The optimizer's state has an entry for parameter {number!r}, which none of its"
                f" groups has. {_REMEDY}"
            )


def refuse_other_content(state: State) -> None:
    """Refuse what is not the content of an optimizer's state at all."""
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
    numbers = [number for group in groups for number in group["params"]]
    if not all(isinstance(number, int | str) for number in numbers) or len(set(numbers)) != len(
        numbers
    ):
        raise CheckpointError(
            "The groups of the optimizer's state list a parameter twice, or something that is no"
            f" number of a parameter. {_REMEDY}"
        )


def _refuse_other_options(
    where: str, own: Mapping[str, Any], saved: Mapping[str, Any], optimizer: Optimizer
) -> None:
    """Refuse options of a group that are of another type. Those that later versions of torch added may be missing: torch sets them, and all are flags."""
    for name, value in own.items():
        if name in {"params", "param_names"}:
            continue
        if name not in saved and name in optimizer.defaults and isinstance(value, float | tuple):
            raise CheckpointError(f"{where} of the optimizer's state has no {name!r}. {_REMEDY}")
        # These are flags, though None by default.
        example = False if value is None and name in {"foreach", "fused"} else value
        if name in saved and not alike(example, saved[name]):
            raise CheckpointError(
                f"{where}[{name!r}] of the optimizer's state is {saved[name]!r:.80}, and this"
                f" optimizer has {value!r:.80}. {_REMEDY}"
            )

    numbers = {
        name: saved[name]
        for name, value in own.items()
        if name in optimizer.defaults and name in saved and isinstance(value, float | tuple)
    }
    kind = algorithm_name(optimizer)
    if kind in _ELEMENTWISE:
        try:
            # Its constructor knows which numbers make sense.
            kind([torch.zeros(1)], **numbers)
        except ValueError as error:
            raise CheckpointError(
                f"{where} of the optimizer's state has numbers that {kind.__name__} does not take:"
                f" {error}. {_REMEDY}"
            ) from error


def _refuse_other_state(
    optimizer: Optimizer, where: str, held: Any, parameter: torch.Tensor, group: Mapping[str, Any]
) -> None:
    """Refuse the state of a parameter whose tensors are of another size or kind, or which is incomplete."""
    if not isinstance(held, Mapping):
        raise CheckpointError(
            f"{where} of the optimizer's state is {held!r:.80}, not a dictionary. {_REMEDY}"
        )
    kind, own = algorithm_name(optimizer), optimizer.state.get(parameter) or {}
    algorithm = ALGORITHMS.get(kind)
    names = () if algorithm is None else algorithm.states(group)
    begun = held.keys() - _OURS
    # SGD makes its momentum at the first step that needs one, and reads no counter.
    wanted = (
        (*names, *(("step",) if algorithm.has_step_count else ()))
        if begun and algorithm is not None and kind is not torch.optim.SGD
        else ()
    )
    if missing := [name for name in wanted if held.get(name) is None]:
        raise CheckpointError(
            f"{where} of the optimizer's state has no {', '.join(map(repr, missing))}. {_REMEDY}"
        )
    for name, value in held.items():
        example = (
            own.get(name)
            if isinstance(own.get(name), torch.Tensor)
            else parameter
            if name in names
            else None
        )
        if (
            example is None
            and kind in _ELEMENTWISE
            and isinstance(value, torch.Tensor)
            and value.dim()
        ):
            example = parameter
        reason = _companion_misfit(value) if name in KEYS else _misfit(name, value, example)
        if reason:
            raise CheckpointError(f"{where}[{name!r}] of the optimizer's state {reason}. {_REMEDY}")


def _companion_misfit(value: Any) -> str | None:
    # torch.distributed.checkpoint reads what is missing as an empty dict.
    return (
        None
        if isinstance(value, torch.Tensor) or value == {}
        else f"is {value!r:.80}, not a tensor"
    )


def _misfit(name: str, value: Any, example: torch.Tensor | None) -> str | None:
    """Why a value cannot be an entry of a parameter's state that is like an example, or a counter."""
    if name in _COUNTERS:
        counted = is_number(value) and (
            (isinstance(value, torch.Tensor) and value.device.type != "cpu") or bool(value >= 0)
        )
        return None if counted else f"is {value!r:.80}, not a number of steps"
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return f"is a {value.layout} tensor on {value.device}"
        if value.numel() > 1 + sum(
            (size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)
        ):
            return "is expanded: some of its elements share their memory, and cannot be updated"
        if example is not None and (value.shape != example.shape or not same_kind(value, example)):
            return (
                f"has shape {tuple(value.shape)} and {value.dtype}, where {tuple(example.shape)}"
                f" and {example.dtype} was expected"
            )
        return None
    if example is not None and value is not None and (example.numel() != 1 or not is_number(value)):
        return f"is {value!r:.80}, not a tensor"
    return None


def same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both tensors are floating-point, both complex, both boolean or both integer.

    >>> same_kind(torch.ones(1), torch.ones(1).half()), same_kind(torch.ones(1), torch.ones(1).int())
    (True, False)
    """
    bool_ = torch.bool
    return (one.is_floating_point(), one.is_complex(), one.dtype is bool_) == (
        other.is_floating_point(),
        other.is_complex(),
        other.dtype is bool_,
    )


def is_number(value: Any) -> bool:
    """Whether a value is a number that is not NaN and fits into float32, or a tensor of one. Only a tensor on the CPU is read.

    >>> is_number(2), is_number(torch.tensor(2.0)), is_number(True), is_number(float("nan"))
    (True, True, False, False)
    """
    if isinstance(value, torch.Tensor):
        plain = (
            value.numel() == 1
            and value.layout is torch.strided
            and not value.is_meta
            and not value.is_complex()
            and value.dtype is not torch.bool
        )
        return plain and (value.device.type != "cpu" or not bool(value.isnan().any()))
    # torch's kernels take float32 numbers: what is larger is refused in the middle of a step.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (abs(value) <= LARGEST or math.isinf(value))
    )


def alike(own: Any, saved: Any) -> bool:
    """Whether a saved option or counter can take the place of one's own: numbers of numbers, texts of texts, sequences of as many numbers.

    >>> alike(0.1, 2), alike((0.9, 0.99), [0.5, 0.6]), alike(0.1, "2"), alike((0.9, 0.99), (0.5,))
    (True, True, False, False)
    """
    if isinstance(own, bool):
        return saved is None or isinstance(saved, bool)
    if own is None:
        return saved is None or isinstance(
            saved, bool | int | float | str | torch.Tensor | list | tuple
        )
    if isinstance(own, int | float | torch.Tensor):
        return is_number(saved) or not is_number(own)
    if isinstance(own, list | tuple):
        numbers = bool(own) and all(map(is_number, own))
        return isinstance(saved, list | tuple) and (
            not numbers or (len(saved) == len(own) and all(map(is_number, saved)))
        )
    return isinstance(saved, type(own)) or not isinstance(own, str | dict)
