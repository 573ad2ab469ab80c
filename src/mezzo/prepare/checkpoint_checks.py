"""Check that the parts of a checkpoint fit their targets, before anything is changed."""

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
"""Name of a part → pairs of a target to load into and its saved state."""


def match_parts(path: str, parts: dict[str, Any], targets: dict[str, tuple[Any, ...]]) -> Pairs:
    """Pair each target with its saved state; raise if a part is missing or has another number."""
    _check_parts(path, parts, targets)
    parts = _with_parts_of_step(path, parts, targets)
    for name, of_part in targets.items():
        saved = parts[name]
        if of_part and saved is None:
            present = (
                ", ".join(target for target in targets if parts[target] is not None)
                or "none of them"
            )
            raise CheckpointError(
                f"{path!r} has no {name}. It has: {present}. Leave {name}= out, or save it with the"
                " next checkpoint."
            )
        if of_part and len(saved) != len(of_part):
            raise CheckpointError(
                f"{path!r} has {len(saved)} of {name}, got {len(of_part)} to load into. Pass as"
                " many as were saved, in the same order."
            )
    return {
        name: list(zip(of_part, parts[name] or (), strict=False))
        for name, of_part in targets.items()
    }


def _check_parts(path: str, parts: dict[str, Any], targets: dict[str, tuple[Any, ...]]) -> None:
    """Raise unless every part is a list of states or None, as `save_checkpoint` writes it."""
    wrong = [
        name
        for name in targets
        if name != "step" and (name not in parts or not isinstance(parts[name], list | None))
    ]
    wrong += ["step"] if not _is_step(parts.get("step")) else []
    if wrong:
        raise CheckpointError(
            f"{path!r} is damaged: {', '.join(wrong)} in it is missing, or not what save_checkpoint"
            " writes. Pass another checkpoint."
        )


def _is_step(step: Any) -> bool:
    """Return whether a value is None, or has the parts of a step's state."""
    if not isinstance(step, dict):
        return step is None
    return (
        isinstance(step.get("position"), int)
        and "scaler" in step
        and all(isinstance(step.get(name), list) for name in ("models", "optimizers", "schedulers"))
    )


def _with_parts_of_step(
    path: str, parts: dict[str, Any], targets: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return the parts of a file; of a file that was saved with `step=` those of the step."""
    step = parts.get("step")
    if step is None:
        return {**parts, "step": None}
    if step["position"] and targets["optimizer"]:
        raise CheckpointError(
            f"{path!r} was saved with the gradients of {step['position']} calls since the last"
            " update, which an optimizer does not hold. Load it with step=."
        )
    scaler = None if step["scaler"] is None else [step["scaler"]]
    return {
        **parts,
        "step": [step],
        "model": step["models"],
        "optimizer": step["optimizers"],
        "scaler": scaler,
        "scheduler": parts["scheduler"] or step["schedulers"] or None,
    }


def check_fit(pairs: Pairs, *, strict: bool) -> None:
    """Raise `CheckpointError` if the state of a model, optimizer or scheduler does not fit."""
    for model, state in pairs["model"]:
        refuse_other_model(model, state, strict=strict)
    for optimizer, state in pairs["optimizer"]:
        refuse_other_optimizer(optimizer, state)
    for scheduler, state in pairs["scheduler"]:
        refuse_other_scheduler(scheduler, state)


def refuse_other_model(model: nn.Module, state: dict[str, Any], *, strict: bool) -> None:
    """Raise for the state of a model with other names, shapes or kinds of dtypes."""
    _check_is_dictionary("model", state)
    current = model.state_dict()
    difference = _difference(current, state)
    if strict and difference:
        raise CheckpointError(
            f"The checkpoint is of another model than this {type(model).__name__}: {difference}"
            "Build the model that was saved, or pass strict=False to load what both have."
        )
    for name in current:
        if name in state and isinstance(current[name], torch.Tensor):
            refuse_other_tensor(name, state[name], current[name], type(model).__name__)


def refuse_other_tensor(name: str, saved: Any, own: torch.Tensor, where: str) -> None:
    """Raise for a saved value that cannot be copied into a tensor."""
    if not isinstance(saved, torch.Tensor) or saved.layout is not torch.strided or saved.is_meta:
        raise CheckpointError(
            f"{name!r} is {saved!r:.80} in the checkpoint, not a tensor with values. Pass another"
            " checkpoint."
        )
    if own.is_meta:
        raise CheckpointError(
            f"{name!r} of this {where} is on the meta device, and has no memory. Allocate it first:"
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
    """Raise for the state of an optimizer over other parameters."""
    check_is_optimizer_state(state)
    own, saved = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if own != saved:
        raise CheckpointError(
            f"The checkpoint's optimizer has groups of {saved} parameters, this"
            f" {type(optimizer).__name__} has {own}. Create it with the same groups as the saved"
            " one."
        )
    check_state_fits(optimizer, state)


def refuse_other_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Raise for the state of another class of scheduler."""
    _check_is_dictionary("scheduler", state)
    current = scheduler.state_dict()
    if difference := _difference(current, state):
        raise CheckpointError(
            f"The checkpoint's scheduler is not a {type(scheduler).__name__}: {difference}Create"
            " the scheduler that was saved."
        )
    for name, value in current.items():
        if not is_compatible(value, state[name]):
            raise CheckpointError(
                f"{name!r} of the checkpoint's scheduler is {state[name]!r:.80}, and this"
                f" {type(scheduler).__name__} has {value!r:.80}. Pass another checkpoint."
            )


def _check_is_dictionary(what: str, state: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(
            f"The checkpoint's {what} is {state!r:.80}, not a dictionary. Pass another checkpoint."
        )


def _difference(current: dict[str, Any], saved: dict[str, Any]) -> str:
    """Return which keys a saved state lacks and which it has in addition, in two sentences."""
    missing = [name for name in current if name not in saved]
    unexpected = [name for name in saved if name not in current]
    return _list_names("it lacks", missing) + _list_names("it also has", unexpected)


def _list_names(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} {', '.join(repr(name) for name in names[:_SHOWN])}{more}. "
