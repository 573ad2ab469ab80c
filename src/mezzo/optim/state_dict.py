"""State dict hooks of an optimizer: save and load the companion tensors of its 16-bit parameters.

Companions are part of each parameter's state, because `torch.distributed.checkpoint` saves nothing
else. The tensors are live: a step updates them in place. Two things need care. torch's optimizers
initialize a state only if it is empty, and fail on one that holds only a companion: companions of
parameters without a step are saved beside `state`. And torch casts every state to its parameter's
dtype when it loads one, which would round float32 moments of bfloat16 parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from mezzo.optim.companion import KEYS, MASTERS, Companion, has_companion, without_companion
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.state_dict_checks import (
    OUR_KEYS,
    Optimizer,
    State,
    check_state_fits,
    parameters_by_key,
)
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import is_sharded, local


def hook_state_dict(optimizer: Optimizer, masters: MasterWeights, undo: ExitStack) -> None:
    """Register hooks that save and load companions; `undo` gets callbacks that remove them.

    Companions that a plain optimizer has loaded before are used from now on.
    """
    hooks = _StateDictHooks(masters)
    undo.callback(optimizer.register_state_dict_post_hook(hooks.after_saving).remove)
    undo.callback(optimizer.register_load_state_dict_pre_hook(hooks.before_loading).remove)
    undo.callback(optimizer.register_load_state_dict_post_hook(hooks.after_loading).remove)
    undo.callback(_remove_companions, optimizer)
    _use_loaded_companions(optimizer, masters)


def without_masters(state: State) -> State:
    """Return an optimizer's state dict without companion tensors."""
    rest = {name: value for name, value in state.items() if name != MASTERS}
    return {
        **rest,
        "state": {key: without_companion(entries) for key, entries in state["state"].items()},
    }


class _StateDictHooks:
    """The hooks around saving and loading the state dict of one optimizer."""

    def __init__(self, masters: MasterWeights) -> None:
        self._masters = masters
        self._loading: State = {}
        """The state dict that is being loaded, before torch casts its tensors."""

    def after_saving(self, optimizer: Optimizer, state: State) -> None:
        """Add the companion of each parameter to its state: live tensors, as torch's own state."""
        states, with_companions, not_stepped = state["state"], dict(state["state"]), {}
        for key, parameter in enumerate(parameters(optimizer)):
            if parameter in self._masters:
                self._masters.resync(parameter)
                companion = self._masters.companion(parameter)
                if companion is None:
                    continue
                entries = companion.entries(parameter, sharded=is_sharded(parameter))
                if states.get(key):
                    with_companions[key] = {**without_companion(states[key]), **entries}
                else:
                    not_stepped[key] = entries
        if with_companions and all(map(_has_only_our_keys, with_companions.values())):
            # torch.distributed.checkpoint needs an entry for every parameter or for none, and this
            # optimizer has no state of its own.
            with_companions = {
                key: with_companions.get(key, {}) for key, _ in enumerate(parameters(optimizer))
            }
        state["state"] = with_companions
        if not_stepped:
            state[MASTERS] = not_stepped

    def before_loading(self, optimizer: Optimizer, state: State) -> State:
        """Check the state dict, then return it without companions, which torch would round."""
        check_state_fits(optimizer, state)
        self._loading = state
        return without_masters(state)

    def after_loading(self, optimizer: Optimizer) -> None:
        """Restore tensors that torch has rounded, and load the companions."""
        loading, self._loading = self._loading, {}
        unreadable = False
        for key, parameter in parameters_by_key(optimizer, loading).items():
            if parameter not in self._masters:
                continue
            state = loading["state"].get(key)
            if state:
                optimizer.state[parameter] = _unrounded(optimizer.state[parameter], state)
                self._masters.add_to_state(parameter, optimizer.state)
            entries = state if has_companion(state) else loading.get(MASTERS, {}).get(key, {})
            if not has_companion(entries):
                continue
            companion = Companion.read(entries, parameter)
            if companion is not None:
                self._masters.load(parameter, companion)
            elif self._masters.companion_tensor(parameter) is not None:
                unreadable = True
        if unreadable:
            warnings.warn(
                "The state holds master weights of another format or dtype, which cannot be"
                f" converted to master={self._masters.format.master.value!r}: the master weights"
                " start from the model's 16-bit weights. To keep exact weights, load a"
                " mezzo.save_checkpoint, or a model state that was saved with"
                " save_dtype='float32'.",
                UserWarning,
                # The line that called load_state_dict, which torch wraps twice.
                stacklevel=5,
            )


def _has_only_our_keys(entries: Any) -> bool:
    return isinstance(entries, Mapping) and entries.keys() <= OUR_KEYS


def _use_loaded_companions(optimizer: Optimizer, masters: MasterWeights) -> None:
    """Use companions in the optimizer's state where the parameter has the value they are for."""
    for parameter in parameters(optimizer):
        state = optimizer.state.get(parameter)
        if state and parameter in masters and masters.companion_tensor(parameter) is not None:
            companion = Companion.read(state, parameter)
            if companion is not None:
                value = local(masters.read(parameter))
                # A float32 parameter with a 16-bit value is as it was saved with the companion; any
                # other value was trained since.
                unchanged = value == local(parameter.detach()).float()
                exact = torch.where(unchanged, companion.value(local(parameter.detach())), value)
                masters.write(parameter, exact)
    _remove_companions(optimizer)
    for parameter in masters:
        if optimizer.state.get(parameter):
            masters.add_to_state(parameter, optimizer.state)


def _remove_companions(optimizer: Optimizer) -> None:
    for parameter in parameters(optimizer):
        state = optimizer.state.get(parameter)
        if state:
            for key in KEYS & state.keys():
                del state[key]
            if not state:
                # torch.distributed.checkpoint takes an optimizer with any entry for one that has
                # stepped.
                del optimizer.state[parameter]


def _unrounded(loaded: Any, saved: Any) -> Any:
    """Return what torch has loaded, with copies of the saved tensors where torch cast them."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype is saved.dtype else saved.to(device=loaded.device, copy=True)
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        return {
            key: _unrounded(value, saved[key]) if key in saved else value
            for key, value in loaded.items()
        }
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple):
        return type(loaded)(
            _unrounded(one, other) for one, other in zip(loaded, saved, strict=True)
        )
    return loaded
