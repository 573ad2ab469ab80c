"""State dict of a step: save it, check that it fits, and load it. An error changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mezzo._errors import CheckpointError
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name
from mezzo.prepare import checkpoint_checks, rng_state
from mezzo.prepare.checkpoint import optimizer_state
from mezzo.prepare.model_state_dict import exact_state_dict
from mezzo.prepare.rollback import rolled_back_on_error
from mezzo.scaling.gradients import parameters
from mezzo.step.components import StepComponents
from mezzo.step.module_buffers import ModuleBuffers


def step_state_dict(
    components: StepComponents, buffers: ModuleBuffers, *, position: int, updates: int
) -> dict[str, Any]:
    """Return the state of a step as nested plain values and tensors."""
    models, optimizers = components.models, components.optimizers
    return {
        "models": [exact_state_dict(model) for model in models],
        "optimizers": [optimizer_state(optimizer, models) for optimizer in optimizers],
        "scaler": None if components.scaler is None else components.scaler.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in components.schedulers.values()],
        "gradients": _gradients(components) if position else None,
        "buffers": buffers.state() if position else None,
        "position": position,
        "updates": updates,
        "rng": rng_state.capture_rng_state(),
    }


class Progress(NamedTuple):
    """Counters of a step."""

    position: int
    """Calls since the last update."""
    updates: int
    """Updates so far."""


def load_step_state(
    components: StepComponents, buffers: ModuleBuffers, state: dict[str, Any], accumulate: int
) -> Progress:
    """Load the state of a step and return its counters. An error changes nothing."""
    _check_state(components, buffers, state, accumulate)
    schedulers = tuple(components.schedulers.values())
    scaler = () if components.scaler is None else (components.scaler,)
    in_order: list[tuple[tuple[Any, ...], list[Any]]] = [
        (scaler, [state["scaler"]] if scaler else []),
        (components.models, state["models"]),
        (schedulers, state["schedulers"]),
        (components.optimizers, state["optimizers"]),
    ]
    loading = "state"
    try:
        with rolled_back_on_error(components.models, components.optimizers, (*scaler, *schedulers)):
            for targets, states in in_order:
                for target, saved in zip(targets, states, strict=True):
                    loading = type(target).__name__
                    target.load_state_dict(saved)
            loading = "gradients and buffers"
            _load_gradients(components, state["gradients"])
            rng_state.restore_rng_state(state["rng"])
            if state["buffers"] is not None:
                buffers.load_state(state["buffers"])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The saved {loading} cannot be loaded: {error!s:.500} Nothing was changed. {_EXPECTED}"
        ) from error
    return Progress(state["position"], state["updates"])


def run_state_dict(components: StepComponents, *, position: int, updates: int) -> dict[str, Any]:
    """Return the state of a step without its models and optimizers."""
    if position:
        raise CheckpointError(
            f"The step has accumulated the gradients of {position} calls since its last update,"
            " which are on this rank only. Save after an update, or call step.flush() first."
        )
    return {
        "scaler": None if components.scaler is None else components.scaler.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in components.schedulers.values()],
        "position": position,
        "updates": updates,
    }


def load_run_state(components: StepComponents, state: dict[str, Any], accumulate: int) -> Progress:
    """Load the state of a step without models and optimizers. An error changes nothing."""
    schedulers = tuple(components.schedulers.values())
    _check_run_state(components, state, {"schedulers": len(schedulers)}, accumulate)
    for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
        checkpoint_checks.refuse_other_scheduler(scheduler, saved)
    scaler = () if components.scaler is None else (components.scaler,)
    with rolled_back_on_error((), (), (*scaler, *schedulers)):
        for own_scaler in scaler:
            own_scaler.load_state_dict(state["scaler"])
        for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
    _load_gradients(components, None)
    return Progress(state["position"], state["updates"])


_EXPECTED = "Pass what step.state_dict() returned."


def _check_state(
    components: StepComponents, buffers: ModuleBuffers, state: dict[str, Any], accumulate: int
) -> None:
    """Raise `CheckpointError` for a state that does not fit the step."""
    lengths = {
        "models": len(components.models),
        "optimizers": len(components.optimizers),
        "schedulers": len(components.schedulers),
    }
    _check_run_state(components, state, lengths, accumulate, ("gradients", "buffers", "rng"))
    pairs = {
        "model": components.models,
        "optimizer": components.optimizers,
        "scheduler": tuple(components.schedulers.values()),
    }
    checkpoint_checks.check_fit(
        {
            name: list(zip(targets, state[f"{name}s"], strict=True))
            for name, targets in pairs.items()
        },
        strict=True,
    )
    _refuse_lost_optimizer_state(components, state)
    rng_state.check_rng_state(state["rng"])
    _check_unfinished_update(components, buffers, state)


def _refuse_lost_optimizer_state(components: StepComponents, state: dict[str, Any]) -> None:
    """Raise if updates were counted, and an optimizer has no state that it has after an update.

    `torch.distributed.checkpoint` loads only entries that the state of the fresh step has too.
    """
    scales = (state["scaler"] or {}).get("mezzo_states", [{"good_steps": state["updates"]}])
    if not any(scale.get("good_steps") for scale in scales):
        return
    for optimizer, saved in zip(components.optimizers, state["optimizers"], strict=True):
        algorithm = ALGORITHMS.get(algorithm_name(optimizer))
        if algorithm is not None and algorithm.has_step_count and not saved["state"]:
            raise CheckpointError(
                f"The state is that of a step after {state['updates']} updates, without the state"
                f" of its {type(optimizer).__name__}. If torch.distributed.checkpoint has loaded"
                " it: that loads only what a fresh optimizer has already. Save the step with"
                " mezzo.save_checkpoint(path, step=step), or get_state_dict(model, optimizer) with"
                " mezzo.RunState(step)."
            )


def _check_run_state(
    components: StepComponents,
    state: dict[str, Any],
    lengths: Mapping[str, int],
    accumulate: int,
    others: tuple[str, ...] = (),
) -> None:
    """Check that all names are there, the lengths of lists, the scaler and the counters."""
    names = (*lengths, "scaler", "position", "updates", *others)
    missing = [name for name in names if not isinstance(state, dict) or name not in state]
    if missing:
        raise CheckpointError(
            f"This is not the state of a step: it lacks {', '.join(missing)}. {_EXPECTED}"
        )
    for name, length in lengths.items():
        if not isinstance(state[name], list):
            raise CheckpointError(
                f"The state's {name} are {state[name]!r:.80}, not a list. {_EXPECTED}"
            )
        if len(state[name]) != length:
            raise CheckpointError(
                f"The state has {len(state[name])} {name}, but this step has {length}. Create the"
                " step with the same models, optimizers and schedulers."
            )
    if (state["scaler"] is None) != (components.scaler is None):
        has, lacks = ("state", "step") if components.scaler is None else ("step", "state")
        raise CheckpointError(
            f"The {has} has a scaler, and the {lacks} has none. Create the step with the same dtype"
            " and scaler."
        )
    _check_counters(state, accumulate)


def _check_counters(state: dict[str, Any], accumulate: int) -> None:
    for name in ("position", "updates"):
        if not isinstance(state[name], int) or isinstance(state[name], bool) or state[name] < 0:
            raise CheckpointError(
                f"The state's {name} is {state[name]!r:.80}, not a number of calls. {_EXPECTED}"
            )
    if state["position"] >= accumulate:
        raise CheckpointError(
            f"The state was saved after {state['position']} calls without an update, and this step"
            f" has accumulate={accumulate}. Create the step with the same accumulate."
        )


def _check_unfinished_update(
    components: StepComponents, buffers: ModuleBuffers, state: dict[str, Any]
) -> None:
    """Check the gradients and buffers of an unfinished update."""
    tensors: dict[str, list[Any]] = {
        "gradients": [parameters(optimizer) for optimizer in components.optimizers],
        "buffers": buffers.tensors,
    }
    for name, expected in tensors.items():
        saved = state[name]
        if (saved is not None) != bool(state["position"]):
            raise CheckpointError(
                f"The state has {'' if saved else 'no '}{name}, but position {state['position']}."
                f" {_EXPECTED}"
            )
        for path, tensor, value in () if saved is None else _pair_nested(name, expected, saved):
            if value is not None:
                checkpoint_checks.refuse_other_tensor(path, value, tensor, "step")


def _pair_nested(
    name: str, tensors: Sequence[Any], saved: Any
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Yield path, tensor and saved value for nested lists; check their lengths."""
    if not isinstance(saved, list) or len(saved) != len(tensors):
        raise CheckpointError(
            f"The state's {name} are not a list of {len(tensors)}. Create the step with the same"
            " models, optimizers and schedulers."
        )
    for index, (tensor, value) in enumerate(zip(tensors, saved, strict=True)):
        if isinstance(tensor, torch.Tensor):
            yield f"{name}[{index}]", tensor, value
        else:
            yield from _pair_nested(f"{name}[{index}]", tensor, value)


def _gradients(components: StepComponents) -> list[list[torch.Tensor | None]]:
    return [
        [
            None if parameter.grad is None else parameter.grad.clone()
            for parameter in parameters(optimizer)
        ]
        for optimizer in components.optimizers
    ]


def _load_gradients(
    components: StepComponents, gradients: list[list[torch.Tensor | None]] | None
) -> None:
    for optimizer in components.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if gradients is None:
        return
    for optimizer, saved in zip(components.optimizers, gradients, strict=True):
        for parameter, gradient in zip(parameters(optimizer), saved, strict=True):
            parameter.grad = (
                None
                if gradient is None
                else torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            )
