"""Lint rules on the order of calls in a training step: clipping, backward, schedule, autocast."""

from __future__ import annotations

from collections.abc import Iterator

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo.advising.findings import LintFinding
from mezzo.advising.lint_subject import Subject
from mezzo.policy.types import Level


def clip_before_unscale(subject: Subject) -> Iterator[LintFinding]:
    """Find gradients that are clipped while they are still multiplied by the loss scale."""
    if subject.loop is None or not subject.loop.clips_of_scaled:
        return
    yield LintFinding(
        "clip-before-unscale",
        "gradients are clipped before they are unscaled",
        _first(subject.loop.clips_of_scaled, subject),
        "Gradients are multiplied by the loss scale (65536 at first): their norm is compared with a"
        " limit for unscaled ones, so that almost all of them are clipped, by more the larger the"
        " scale is.",
        "scaler.unscale_(optimizer)\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "scaler.step(optimizer)",
    )


def backward_in_autocast(subject: Subject) -> Iterator[LintFinding]:
    """Find a backward pass that runs inside of autocast and in other dtypes for that."""
    if subject.loop is None or not subject.loop.backward_changes:
        return
    changes = subject.loop.backward_changes
    yield LintFinding(
        "backward-in-autocast",
        f"backward runs inside of autocast, which changes {'; '.join(changes[:3])}",
        _first(subject.loop.backward_in_region, subject),
        "Backward ops take the dtypes of their forward ops. Inside of autocast, gradients of ops"
        " that ran in float32 are cast to 16 bits.",
        "Leave the `with` block first:\n"
        "with torch.autocast(...):\n"
        "    loss = loss_fn(model(x), y)\n"
        "loss.backward()",
    )


def scheduler_on_skip(subject: Subject) -> Iterator[LintFinding]:
    """Find a scheduler that advances when the scaler skips an update."""
    if subject.loop is None or not subject.loop.steps_on_skip:
        return
    yield LintFinding(
        "scheduler-on-skip",
        "the scheduler advances when the scaler skips the update",
        type(subject.schedulers[0]).__name__,
        "Each skip takes a step off the schedule: warm-up ends early, and the first steps, when the"
        " scale is still being found, are the ones that are skipped.",
        "scale = scaler.get_scale(); scaler.step(optimizer); scaler.update()\n"
        "if scaler.get_scale() >= scale: scheduler.step()\n"
        "or `if not scaler.step(optimizer).skipped` with mezzo.GradScaler, or\n"
        "mezzo.TrainStep(..., scheduler=scheduler).",
    )


def autocast_never_entered(subject: Subject) -> Iterator[LintFinding]:
    """Find a step meant for 16 bits whose products all run in float32."""
    if subject.loop is None or not subject.loop.ops.products:
        return
    meant = subject.scales or (subject.policy is not None and subject.policy.level is not Level.O0)
    dtypes = subject.loop.ops.product_dtypes()
    if not meant or any(dtype in HALF_DTYPES for dtype in dtypes):
        return
    shown = "/".join(sorted(dtype_name(dtype) for dtype in dtypes))
    yield LintFinding(
        "autocast-never-entered",
        f"no product of the step runs in 16 bits: all {len(subject.loop.ops.products)} are {shown}",
        str(subject.loop.ops.products[0].place) or subject.name,
        "A scaler or a policy alone changes no dtype: the step has the speed and the memory of"
        " float32, and pays for the scaling.",
        'with mezzo.autocast("cuda", dtype="float16"):\n'
        "    loss = loss_fn(model(x), y)\n"
        "or model, optimizer = mezzo.decorate(model, optimizer, policy).",
    )


def _first(lines: list[str], subject: Subject) -> str:
    found = list(dict.fromkeys(filter(None, lines)))
    return ", ".join(found) or subject.name
