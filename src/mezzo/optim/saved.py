"""An optimizer's own `state_dict`, with what lies beside its 16-bit parameters, loaded back to the bit.

torch casts every floating-point state to its parameter's dtype when it is loaded: of float32 moments beside bfloat16 parameters 16 bits would be left.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from mezzo._errors import PolicyError
from mezzo.optim.masters import Masters
from mezzo.policy.rule import Master
from mezzo.scaling.gradients import parameters

Optimizer = torch.optim.Optimizer
State = dict[str, Any]

_NO_MASTERS: State = {"kind": Master.NONE.value, "beside": {}}

MASTERS = "mezzo_masters"
"""Beside `state` and `param_groups`, where a plain optimizer overlooks it: in a parameter's own state it would stay for ever, and grow stale."""


def install(optimizer: Optimizer, masters: Masters, undo: ExitStack) -> None:
    """Hook an optimizer's saving and loading; the stack gets what takes the hooks off."""
    saving = _Saving(masters)
    undo.callback(optimizer.register_state_dict_post_hook(saving.after_saving).remove)
    undo.callback(optimizer.register_load_state_dict_pre_hook(saving.before_loading).remove)
    undo.callback(optimizer.register_load_state_dict_post_hook(saving.after_loading).remove)


class _Saving:
    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._came: State = {}
        """The state that is being loaded, as it came."""

    def after_saving(self, optimizer: Optimizer, state: State) -> None:
        """Add what lies beside each parameter, by the parameter's number. Live tensors, as torch's own state."""
        masters, beside = self._masters, {}
        for number, parameter in _numbered(optimizer).items():
            if parameter in masters:
                masters.follow(parameter)
                held = masters.beside(parameter)
                if held is not None:
                    beside[number] = held
        state[MASTERS] = {"kind": masters.kind.master.value, "beside": beside}

    def before_loading(self, optimizer: Optimizer, state: State) -> None:
        """Keep what came; refuse what does not fit before anything changes."""
        self._came = state
        refuse_misfits(optimizer, state)

    def after_loading(self, optimizer: Optimizer) -> None:
        """Put back what torch rounded, and what lay beside the parameters."""
        came, self._came = self._came, {}
        numbers = _numbers(optimizer, came)
        for number, state in came["state"].items():
            parameter = numbers.get(number)
            if parameter is not None and parameter in self._masters:
                optimizer.state[parameter] = _exactly(optimizer.state[parameter], state)
        self._take(came.get(MASTERS, _NO_MASTERS), numbers)

    def _take(self, held: State, numbers: dict[Any, torch.Tensor]) -> None:
        saved, own = Master.parse(held["kind"]), self._masters.kind
        both = [(numbers[number], beside) for number, beside in held["beside"].items() if numbers[number] in self._masters]
        if saved is own.master:
            for parameter, beside in both:
                self._masters.load(parameter, beside)
        elif saved is Master.FLOAT32:
            # A whole float32 value can be kept in any other way.
            for parameter, beside in both:
                self._masters.write(parameter, beside.to(parameter.device))
        elif both and own.saved_as is not None:
            warnings.warn(
                f"The state was saved with master={saved.value!r}, this optimizer keeps master={own.master.value!r}: its exact weights stay those of the model. "
                "To take exact weights over, load a mezzo.save_checkpoint, or a model state that was saved with save_dtype='float32'.",
                UserWarning,
                # Seen from the line that called load_state_dict, which torch wraps twice.
                stacklevel=6,
            )


def _exactly(loaded: Any, came: Any) -> Any:
    """What torch has loaded, with every tensor that it cast as it came; a tensor of its own, as after a cast."""
    if isinstance(came, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype is came.dtype else came.to(device=loaded.device, copy=True)
    if isinstance(came, Mapping) and isinstance(loaded, dict):
        return {key: _exactly(value, came[key]) if key in came else value for key, value in loaded.items()}
    if isinstance(came, list | tuple) and isinstance(loaded, list | tuple):
        return type(loaded)(_exactly(one, other) for one, other in zip(loaded, came, strict=True))
    return loaded


def _numbered(optimizer: Optimizer) -> dict[int, torch.Tensor]:
    """An optimizer's parameters by the numbers that torch saves them under."""
    return dict(enumerate(parameters(optimizer)))


def _numbers(optimizer: Optimizer, state: State) -> dict[Any, torch.Tensor]:
    """An optimizer's parameters by the numbers of a saved state; as far as they go, for torch itself refuses other groups."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    return dict(zip(saved, parameters(optimizer), strict=False))


def refuse_misfits(optimizer: Optimizer, state: State) -> None:
    """Refuse a saved state whose masters are not those of the optimizer's parameters."""
    held, numbers = state.get(MASTERS, _NO_MASTERS), _numbers(optimizer, state)
    Master.parse(held["kind"])
    for number, beside in held["beside"].items():
        parameter = numbers.get(number)
        if parameter is None or parameter.shape != beside.shape:
            shape = "nothing" if parameter is None else f"one of shape {tuple(parameter.shape)}"
            raise PolicyError(
                f"The saved state has a master of shape {tuple(beside.shape)} where this optimizer has {shape}. Load the state of an optimizer over the same model."
            )
