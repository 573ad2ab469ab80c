"""Whether the parts of a checkpoint fit what they are to be loaded into: asked before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mezzo._errors import CheckpointError
from mezzo.optim.state_dict_checks import (
    check_is_optimizer_state,
    check_state_fits,
    is_compatible,
    same_kind,
)

_SHOWN = 5

Pairs = dict[str, list[tuple[Any, Any]]]
"""By the name of a part: what to load into, and the state that was saved."""


def match_parts(path: str, parts: dict[str, Any], asked: dict[str, tuple[Any, ...]]) -> Pairs:
    """Each thing beside its saved state; a file without a part that is asked for, or with another number of them, is refused."""
    _refuse_other_content(path, parts, asked)
    parts = _with_parts_of_step(path, parts, asked)
    for name, wanted in asked.items():
        saved = parts[name]
        if wanted and saved is None:
            there = ", ".join(one for one in asked if parts[one] is not None) or "none of them"
            raise CheckpointError(
                f"{path!r} has no {name}. It has: {there}. Leave {name}= out, or save it with the"
                " next checkpoint."
            )
        if wanted and len(saved) != len(wanted):
            raise CheckpointError(
                f"{path!r} has {len(saved)} of {name}, got {len(wanted)} to load into. Pass as many"
                " as were saved, in the same order."
            )
    return {
        name: list(zip(wanted, parts[name] or (), strict=False)) for name, wanted in asked.items()
    }


def _refuse_other_content(
    path: str, parts: dict[str, Any], asked: dict[str, tuple[Any, ...]]
) -> None:
    """Refuse a file whose parts are not what `save_checkpoint` writes: lists of states or None."""
    wrong = [
        name
        for name in asked
        if name != "step" and (name not in parts or not isinstance(parts[name], list | None))
    ]
    wrong += ["step"] if not _is_step(parts.get("step")) else []
    if wrong:
        raise CheckpointError(
            f"{path!r} is damaged: {', '.join(wrong)} in it is missing, or not what save_checkpoint"
            " writes. Pass another checkpoint."
        )


def _is_step(step: Any) -> bool:
    """Whether this is None, or can be the state of a step as far as its parts are looked for."""
    if not isinstance(step, dict):
        return step is None
    return (
        isinstance(step.get("position"), int)
        and "scaler" in step
        and all(isinstance(step.get(name), list) for name in ("models", "optimizers", "schedulers"))
    )


def _with_parts_of_step(
    path: str, parts: dict[str, Any], asked: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The parts of a file, among them those of a step that was saved whole."""
    step = parts.get("step")
    if step is None:
        return {**parts, "step": None}
    if step["position"] and asked["optimizer"]:
        raise CheckpointError(
            f"{path!r} was saved with the gradients of {step['position']} calls since the last"
            " update, which an optimizer does not take. Load it with step=."
        )
    scaler = None if step["scaler"] is None else [step["scaler"]]
    return {
        **parts,
        "step": [step],
        "model": step["models"],
        "optimizer": step["optimizers"],
        "scaler": scaler,
        "scheduler": step["schedulers"] or None,
    }


def check_fit(found: Pairs, *, strict: bool) -> None:
    """Refuse what does not fit."""
    for model, state in found["model"]:
        refuse_other_model(model, state, strict=strict)
    for optimizer, state in found["optimizer"]:
        refuse_other_optimizer(optimizer, state)
    for scheduler, state in found["scheduler"]:
        refuse_other_scheduler(scheduler, state)


def refuse_other_model(model: nn.Module, state: dict[str, Any], *, strict: bool) -> None:
    """Refuse the state of a model with other names, shapes or kinds of numbers."""
    _refuse_no_dictionary("model", state)
    own = model.state_dict()
    missing, unexpected = (
        [name for name in own if name not in state],
        [name for name in state if name not in own],
    )
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"The checkpoint is of another model than this {type(model).__name__}:"
            f" {_few('it lacks', missing)}{_few('it also has', unexpected)}Build the model that was"
            " saved, or pass strict=False to load what both have."
        )
    for name in own:
        if name in state and isinstance(own[name], torch.Tensor):
            refuse_other_tensor(name, state[name], own[name], type(model).__name__)


def refuse_other_tensor(name: str, saved: Any, own: torch.Tensor, where: str) -> None:
    """Refuse what cannot be copied into a tensor of one's own without loss of meaning."""
    if not isinstance(saved, torch.Tensor) or saved.layout is not torch.strided or saved.is_meta:
        raise CheckpointError(
            f"{name!r} is {saved!r:.80} in the checkpoint, not a tensor with values. Pass another"
            " checkpoint."
        )
    if own.is_meta:
        raise CheckpointError(
            f"{name!r} of this {where} is on the meta device, and holds no values. Make them first:"
            " model.to_empty(device=...)."
        )
    if own.shape != saved.shape:
        raise CheckpointError(
            f"{name!r} has shape {tuple(saved.shape)} in the checkpoint and {tuple(own.shape)} in"
            f" this {where}. Build the model that was saved."
        )
    if not same_kind(saved, own):
        raise CheckpointError(
            f"{name!r} is {saved.dtype} in the checkpoint and {own.dtype} in this {where}. Build"
            " the model that was saved."
        )


def refuse_other_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Refuse the state of an optimizer over other parameters."""
    check_is_optimizer_state(state)
    own, saved = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if own != saved:
        raise CheckpointError(
            f"The checkpoint's optimizer has groups of {saved} parameters, this"
            f" {type(optimizer).__name__} has {own}. Make it over the same groups as the saved one."
        )
    check_state_fits(optimizer, state)


def refuse_other_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Refuse the state of a scheduler of another kind."""
    _refuse_no_dictionary("scheduler", state)
    own = scheduler.state_dict()
    if own.keys() == state.keys():
        for name, value in own.items():
            if not is_compatible(value, state[name]):
                raise CheckpointError(
                    f"{name!r} of the checkpoint's scheduler is {state[name]!r:.80}, and this"
                    f" {type(scheduler).__name__} has {value!r:.80}. Pass another checkpoint."
                )
    else:
        raise CheckpointError(
            f"The checkpoint's scheduler is not a {type(scheduler).__name__}:"
            f" {_few('it lacks', [name for name in own if name not in state])}{_few('it also has', [name for name in state if name not in own])}Make"
            " the scheduler that was saved."
        )


def _refuse_no_dictionary(what: str, state: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(
            f"The checkpoint's {what} is {state!r:.80}, not a dictionary. Pass another checkpoint."
        )


def _few(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} {', '.join(repr(name) for name in names[:_SHOWN])}{more}. "
