"""What prevents the capture of a step, and the warnings that it runs eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from mezzo import _events, _launch
from mezzo._errors import UnsupportedError, user_stack_level
from mezzo.optim.device_binding import device_binding
from mezzo.prepare.arguments import keeps_autograd_graph
from mezzo.prepare.sharding import is_sharded_model, sharding_obstacle
from mezzo.scaling.captured_scaler import capture_refusal
from mezzo.step.components import StepComponents
from mezzo.step.executor import StepExecutor
from mezzo.step.inputs import format_shapes
from mezzo.step.options import Capture


def capture_obstacle(components: StepComponents) -> str | None:
    """Return why a step cannot be captured, as far as that is known before the first call."""
    device = components.device
    if device.type != "cuda":
        return f"the model is on {device.type}, which has no CUDA graphs"
    parameters = (parameter for model in components.models for parameter in model.parameters())
    if len({parameter.device for parameter in parameters}) > 1:
        return "the parameters are on several devices"
    if not _launch.has_triton(device):
        return "Triton is not installed, which the fused steps need"
    return None if components.scaler is None else capture_refusal(components.scaler)


def process_obstacle(executor: StepExecutor) -> str | None:
    """Return why a step that ranks run together cannot be captured on this one."""
    models, ddp = executor.components.models, executor.components.ddp
    if is_sharded_model(models):
        return sharding_obstacle(models)
    return ddp.capture_refusal(accumulates=executor.options.accumulate > 1)


def optimizer_obstacle(executor: StepExecutor) -> str | None:
    """Return why optimizers without a captured step prevent the capture of calls.

    Such optimizers step eagerly after a captured forward and backward pass, from copies of its
    gradients. That is not possible in the middle of a body, nor with gradients that several calls
    accumulate at fixed addresses.
    """
    options = executor.options
    names = [
        type(optimizer).__name__
        for optimizer in executor.components.optimizers
        if device_binding(optimizer) is None
    ]
    if not names or (options.accumulate == 1 and not options.takes_update):
        return None
    how = "the body steps it by update()" if options.takes_update else "calls accumulate gradients"
    return f"{' and '.join(names)} has no step that can be captured, and {how}"


def warn_not_captured(reason: str, capture: Capture, *, quietly: bool = False) -> None:
    """Warn that a step runs eagerly; raise `UnsupportedError` if it must be captured."""
    if capture is Capture.ON:
        raise UnsupportedError(
            f"capture=True, but the step cannot be captured as a CUDA graph: {reason}. Change that,"
            " or pass capture='auto'."
        )
    if _events.listening():
        _events.emit(_events.StepNotCaptured(reason))
    if not quietly:
        warnings.warn(
            f"The step cannot be captured as a CUDA graph and runs eagerly: {reason}. Pass"
            " capture=False to silence this warning.",
            UserWarning,
            stacklevel=user_stack_level(),
        )


def warn_replay_disagreed(error: str) -> None:
    """Warn that a replay and the eager step disagree about an update, so that steps run eagerly."""
    warnings.warn(
        f"The step runs eagerly from now on: {error}. One batch was skipped.",
        UserWarning,
        stacklevel=user_stack_level(),
    )


def kept_graph_hint(parameters: Iterable[torch.Tensor]) -> str:
    """Return what to do about an autograd graph that is in memory before a capture; "" if none."""
    if not keeps_autograd_graph(parameters):
        return ""
    return (
        ". An output or a loss of the model that was computed before is still in memory, and its"
        " autograd graph belongs to another stream. Delete it before the first steps, or compute it"
        " under torch.no_grad()"
    )


def warn_many_kinds(limit: int, leaves: list[torch.Tensor]) -> None:
    """Warn that there are more kinds of inputs than graphs."""
    warnings.warn(
        f"The step was called with more than {limit} kinds of inputs, now with"
        f" {format_shapes(leaves)}. Those that have no CUDA graph run eagerly. Pad inputs to fewer"
        " distinct shapes (pad_to=64), pass numbers that change as tensors, or raise max_graphs.",
        UserWarning,
        stacklevel=user_stack_level(),
    )
