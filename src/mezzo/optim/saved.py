"""An optimizer's own `state_dict`, with the companion tensors of its 16-bit parameters, loaded back to the bit.

Companions are part of each parameter's state, so that they travel wherever the state does: `torch.distributed.checkpoint` keeps nothing else. The tensors are live: a
step updates them where they are. Two things need care. torch's optimizers begin a state that is empty, and fail on one that holds nothing but a companion, so
companions of parameters that have not been stepped are saved beside `state`. And torch casts every state to its parameter's dtype when it is loaded: of float32
moments beside bfloat16 parameters 16 bits would be left.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from mezzo._errors import CheckpointError, PolicyError
from mezzo.optim.companion import KEYS, MASTER, Companion, has_companion, misfit, without_companion
from mezzo.optim.masters import Masters
from mezzo.scaling.gradients import parameters

Optimizer = torch.optim.Optimizer
State = dict[str, Any]

MASTERS = "mezzo_masters"
"""Beside `state` and `param_groups`: the companions of parameters whose state the optimizer has not begun. A plain optimizer ignores it."""

_OURS = KEYS | {"draws"}


def install(optimizer: Optimizer, masters: Masters, undo: ExitStack) -> None:
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
    return {**kept, "state": {number: without_companion(held) for number, held in state["state"].items()}}


class _Saving:
    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._came: State = {}
        """The state that is being loaded, as it came."""

    def after_saving(self, optimizer: Optimizer, state: State) -> None:
        """Add the companion of each parameter to its state. Live tensors, as torch's own state."""
        states, begun, waiting = state["state"], dict(state["state"]), {}
        for number, parameter in enumerate(parameters(optimizer)):
            if parameter in self._masters:
                self._masters.follow(parameter)
                companion = self._masters.companion(parameter)
                if companion is not None and states.get(number):
                    begun[number] = {**without_companion(states[number]), **companion.entries()}
                elif companion is not None:
                    waiting[number] = companion.entries()
        if begun and all(isinstance(held, Mapping) and held.keys() <= _OURS for held in begun.values()):
            # torch.distributed.checkpoint wants an entry for every parameter or for none, and this optimizer has no state of its own.
            begun = {number: begun.get(number, {}) for number, _ in enumerate(parameters(optimizer))}
        state["state"] = begun
        if waiting:
            state[MASTERS] = waiting

    def before_loading(self, optimizer: Optimizer, state: State) -> State:
        """Keep what came; refuse what does not fit before anything changes. torch does not see the companions, which it would round."""
        refuse_misfits(optimizer, state)
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
            unread = unread or (companion is None and self._masters.beside(parameter) is not None)
        if unread:
            warnings.warn(
                f"The state holds master weights of another kind or dtype, which cannot be turned into master={self._masters.kind.master.value!r} here: the masters "
                "start from the model's weights. To take exact weights over, load a mezzo.save_checkpoint, or a model state that was saved with save_dtype='float32'.",
                UserWarning,
                # Seen from the line that called load_state_dict, which torch wraps twice.
                stacklevel=5,
            )


def _take_over(optimizer: Optimizer, masters: Masters) -> None:
    """Use companions that a plain optimizer has loaded, wherever the parameter still has the very value that they belong to."""
    for parameter in parameters(optimizer):
        state = optimizer.state.get(parameter)
        if state and parameter in masters and masters.beside(parameter) is not None:
            companion = Companion.read(state, parameter)
            if companion is not None:
                value = masters.read(parameter)
                # A 16-bit value in a float32 parameter is what was saved with the companion; any other was trained since.
                masters.write(parameter, torch.where(value == parameter.detach().float(), companion.value(parameter), value))
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
                # torch.distributed.checkpoint takes an optimizer with any state for one that has begun.
                del optimizer.state[parameter]


def _exactly(loaded: Any, came: Any) -> Any:
    """What torch has loaded, with every tensor that it cast as it came; a tensor of its own, as after a cast."""
    if isinstance(came, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype is came.dtype else came.to(device=loaded.device, copy=True)
    if isinstance(came, Mapping) and isinstance(loaded, dict):
        return {key: _exactly(value, came[key]) if key in came else value for key, value in loaded.items()}
    if isinstance(came, list | tuple) and isinstance(loaded, list | tuple):
        return type(loaded)(_exactly(one, other) for one, other in zip(loaded, came, strict=True))
    return loaded


def _numbers(optimizer: Optimizer, state: State) -> dict[Any, torch.Tensor]:
    """An optimizer's parameters by the numbers of a saved state; as far as they go, for torch itself refuses other groups."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    return dict(zip(saved, parameters(optimizer), strict=False))


def refuse_misfits(optimizer: Optimizer, state: State) -> None:
    """Refuse a saved state whose masters are not those of the optimizer's parameters."""
    waiting = state.get(MASTERS, {})
    if not isinstance(waiting, Mapping) or "kind" in waiting:
        raise CheckpointError(
            "The optimizer's state was saved by an older mezzo, which kept master weights in another way. Load it there, and save a mezzo.save_checkpoint."
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
                f"The saved state has a master of shape {tuple(wrong.shape)} where this optimizer has {shape}. Load the state of an optimizer over the same model."
            )
