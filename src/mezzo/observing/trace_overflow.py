"""`mezzo.trace_overflow`: the op that made a batch fail, its line, and the policy that cures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import MezzoError
from mezzo.observing.cures import Cure, find_cure, reason_of
from mezzo.observing.finding import Finding, InputRange, Kind
from mezzo.observing.function_places import Place
from mezzo.observing.numerics import named_models
from mezzo.observing.replay import Replay, Trace, named_tensors
from mezzo.observing.replay_setup import replay_of
from mezzo.policy.policy import Policy
from mezzo.prepare.plan import PolicyArg

_HUGE = torch.finfo(torch.float16).max
"""Parameters beyond this, with which float32 overflows too, have diverged."""


class Direction(StrEnum):
    """Where a batch failed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    DATA = "data"
    """A tensor of the batch was not finite."""
    PARAMETERS = "parameters"
    """A parameter or buffer was not finite before the step, or is huge."""
    NONE = "none"
    """It did not fail."""


@dataclass(frozen=True)
class Overflow:
    """The op that made a batch fail, and the policy that cures it. False if nothing is wrong."""

    direction: Direction
    """Whether the op failed in the forward pass or its gradient in the backward pass; or that the
    batch or the parameters had failed before."""
    op: str = ""
    """The op, as policies name it; the name of a `torch.autograd.Function`; of the tensor, if the
    batch or a parameter was not finite."""
    module: str = ""
    """The path of the module that called it; empty for the model itself and for the loss."""
    line: str = ""
    """The file and line of the code that called it, also for a gradient; empty if it is torch's."""
    reason: str = ""
    """What happened."""
    inputs: tuple[InputRange, ...] = ()
    """Dtype, shape and range of its floating-point inputs."""
    step: int | None = None
    """Calls of the step so far; None if it is not known."""
    precision: bool = False
    """Whether 16 bits are the cause: in float32 the batch does not fail."""
    cure: str = ""
    """Arguments of `Policy`, `autocast`, `decorate` or `TrainStep` to paste; empty without one."""
    policy: Policy | None = None
    """The whole policy with the cure."""
    verified: bool = False
    """Whether the batch was run with the cure, on a copy, and did not fail."""

    def __bool__(self) -> bool:
        return self.direction is not Direction.NONE

    def __str__(self) -> str:
        where = ", ".join(
            part for part in (self.line, f"in {self.module}" if self.module else "") if part
        )
        gradient = "The gradient of " if self.direction is Direction.BACKWARD else ""
        parts = [f"{gradient}{self.op}{f' ({where})' if where else ''} {self.reason}.".lstrip()]
        if self.inputs and self.direction in {Direction.FORWARD, Direction.BACKWARD}:
            parts.append(f"Its inputs: {'; '.join(map(str, self.inputs))}.")
        if self.step and self:
            parts.append(f"That is after call {self.step} of the step.")
        return " ".join([*parts, *self._advice()])

    def _advice(self) -> list[str]:
        if not self:
            return []
        if not self.precision:
            return ["float32 fails too: precision is not the cause."]
        uncured = "16 bits are the cause, and no policy was found that cures it: change the code."
        if not self.cure:
            return [uncured]
        if self.verified:
            return [f"Pass {self.cure} (verified: run with it, the batch does not fail)."]
        if self.policy is None:
            return [f"Pass {self.cure} (not verified: make or load the model again)."]
        return [uncured, f"With {self.cure} the batch still fails."]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a log."""
        policy = None if self.policy is None else self.policy.to_dict()
        return {**asdict(self), "direction": self.direction.value, "policy": policy}


def trace_overflow(
    step_or_model: Any,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    policy: PolicyArg | None = None,
    *,
    scaler: Any = None,
    step: int | None = None,
    **overrides: Any,
) -> Overflow:
    """Replay a batch, and name the op that made a non-finite value or lost its digits.

    Call it with the batch of a skipped step or of a loss that is not finite. Forward and backward
    run on a copy, each op along with a float64 computation that never rounds to 16 bits; compiled
    and captured code runs eagerly, without collectives. The first op whose result left the range,
    lost its digits or underflowed is named, in the backward pass with the line of its forward op.
    Then the batch runs in float32: if that fails too, precision is not the cause, and the op, the
    tensor of the batch or the parameter at fault is named. Otherwise a policy is searched with
    which the batch does not fail.

    Model, optimizer, scaler and random generators are as before afterwards. Needs several times
    the time and memory of a step, and synchronizes.

    Args:
        step_or_model: A `TrainStep`, a `@train_step` function, or a model: plain, decorated,
            compiled or in DistributedDataParallel.
        batch: The arguments of the step as a tuple, `(x, y)`, its only argument, or a mapping of
            keywords. For a model with `loss_fn` the inputs and the target, `(x, y)`; without it the
            arguments of the model.
        loss_fn: For a model: a function of its output and the target. Without it the loss is that
            of the model's output; if there is none, only the forward pass is run.
        policy: For a model: what it was trained with, such as `"O1"` (the default) or a
            `mezzo.Policy`; a decorated model and a step have theirs.
        scaler: The scaler or the loss scale to run backward with; False for none. A step uses its
            own. By default that is the largest scale with finite gradients.
        step: The number of the call, for the report; a step counts its calls itself.
        **overrides: Fields of the policy to change, such as `dtype=`.

    Returns:
        An `Overflow`; print it. It is false if nothing is wrong.

    >>> from torch import nn
    >>> class Energy(nn.Module):
    ...     def forward(self, x):
    ...         return (x * x).sum(-1)
    >>> model = nn.Sequential(nn.Linear(4, 4), Energy())
    >>> _ = nn.init.constant_(model[0].bias, 1000.0)
    >>> found = trace_overflow(model, torch.ones(8, 4), torch.mean, dtype="float16")
    >>> found.op, found.module, found.reason, found.cure, found.verified
    ('mul', '1', 'left the range of float16: 1.0e+06', "full={'mul'}", True)
    """
    replay = replay_of(step_or_model, batch, loss_fn, policy, scaler, **overrides)
    replay = replay if step is None else replace(replay, number=step)
    trace = replay.run(replay.policy)
    if trace.finding is None:
        return _clean(replay, trace)
    return _explained(replay, trace, trace.finding)


def _clean(replay: Replay, trace: Trace) -> Overflow:
    loss = "" if trace.loss is None else f"; the loss is {trace.loss:.4g}"
    scale = f", loss scale {trace.scale:g}" if trace.scale != 1.0 else ""
    return Overflow(
        Direction.NONE,
        reason=(
            "No op of this batch made a non-finite value or lost its digits under"
            f" {replay.policy!r}{scale}{loss}"
        ),
        step=replay.number,
    )


def _explained(replay: Replay, trace: Trace, finding: Finding) -> Overflow:
    in_float32 = _float32_failure(replay, finding)
    if in_float32 is not None:
        return in_float32
    if finding.backward and finding.kind is not Kind.DIGITS and replay.scale is not None:
        searched = replace(replay, scale=None).run(replay.policy)
        if searched.finding is None:
            return _other_scale(replay, finding, trace.scale, searched.scale)
    cure = find_cure(replay, finding)
    if finding.kind is Kind.PARAMETERS:
        reason = (
            f"is beyond the range of {dtype_name(finding.dtype)}: the run may have diverged, as"
            " with a learning rate that is too high"
        )
        return _of_parameter(replay, finding.place.op, reason, cure)
    return _overflow(replay, finding, reason_of(finding), cure, precision=True)


def _other_scale(replay: Replay, finding: Finding, scale: float, better: float) -> Overflow:
    reason = f"{reason_of(finding)} at the loss scale {scale:g}, and not at {better:g}"
    if better < scale:
        reason += "; a dynamic scaler skips such a step and lowers the scale"
    cure = Cure(replay.policy, f"scaler=mezzo.GradScaler(init_scale={better:g})", verified=True)
    return _overflow(replay, finding, reason, cure, precision=True)


def _float32_failure(replay: Replay, in_16_bits: Finding) -> Overflow | None:
    """Run the batch in float32; return what is wrong if that fails too."""
    try:
        finding = replay.run(None, scale=1.0).finding
    except (MezzoError, RuntimeError):
        # Code with casts of its own may need the policy. The exact values tell too, if less.
        finding = in_16_bits if in_16_bits.kind is Kind.NONFINITE else None
    # Code that casts to 16 bits itself does so in a float32 run too.
    if finding is None or not finding.nonfinite or finding.dtype in HALF_DTYPES:
        return None
    match finding.kind:
        case Kind.DATA:
            return _of_data(replay, finding)
        case Kind.PARAMETERS:
            written = _written_in_16_bits(replay, finding.place.op)
            reason = "is not finite before the step"
            return written or _of_parameter(replay, finding.place.op, reason)
    if finding.kind is Kind.OVERFLOW and (largest := _largest_parameter(replay)) is not None:
        name, value = largest
        reason = (
            f"has values up to {value:.1e}, with which {finding.place.op} leaves the range of"
            " float32 too: the run has diverged, as with a learning rate that is too high"
        )
        return _of_parameter(replay, name, reason)
    return _overflow(replay, finding, reason_of(finding), None, precision=False)


def _of_data(replay: Replay, finding: Finding) -> Overflow:
    name, reason = finding.place.op, "is not finite"
    for input_name, tensor in named_tensors(replay.call):
        if input_name == name and (bad := _first_nonfinite(tensor)) is not None:
            index, value, count = bad
            reason = f"has {value} at index {index}, {count} such values in all"
    return Overflow(Direction.DATA, name, reason=reason, inputs=finding.inputs, step=replay.number)


def _first_nonfinite(tensor: Tensor) -> tuple[list[int], str, int] | None:
    found = (~tensor.isfinite()).nonzero()
    if not found.numel():
        return None
    index = found[0].tolist()
    return index, f"{float(tensor[tuple(index)]):g}".replace("nan", "NaN"), found.shape[0]


def _of_parameter(replay: Replay, name: str, reason: str, cure: Cure | None = None) -> Overflow:
    tensors = {
        prefix + own: tensor
        for prefix, model in named_models(replay.models)
        for own, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    return Overflow(
        Direction.PARAMETERS,
        name,
        name.rpartition(".")[0],
        reason=reason,
        inputs=(InputRange.of(tensors[name]),) if name in tensors else (),
        step=replay.number,
        precision=cure is not None,
        cure="" if cure is None else cure.entry,
        policy=None if cure is None else cure.policy,
        verified=cure is not None and cure.verified,
    )


def _written_in_16_bits(replay: Replay, name: str) -> Overflow | None:
    """Return what is wrong with a parameter that is 16-bit and written by the model itself.

    No optimizer trains it, so that it has no master weight; None for other parameters.
    """
    parameters = {
        prefix + own: (own, parameter)
        for prefix, model in named_models(replay.models)
        for own, parameter in model.named_parameters()
    }
    own, parameter = parameters.get(name, (name, None))
    if parameter is None or parameter.requires_grad or parameter.dtype not in HALF_DTYPES:
        return None
    dtype = dtype_name(parameter.dtype)
    reason = f"is not finite before the step: it is {dtype}, and only the model itself writes it"
    module = own.rpartition(".")[0] or own
    return replace(
        _of_parameter(replay, name, reason),
        precision=True,
        cure=f"keep_full={{*mezzo.NORMS, {module!r}}}",
    )


def _largest_parameter(replay: Replay) -> tuple[str, float] | None:
    """Return the largest parameter, if it is beyond the range of float16."""
    sizes = [
        (float(tensor.detach().double().abs().max()), prefix + name)
        for prefix, model in named_models(replay.models)
        for name, tensor in model.named_parameters()
        if tensor.numel()
    ]
    largest, name = max(sizes, default=(0.0, ""))
    return (name, largest) if largest > _HUGE else None


def _overflow(
    replay: Replay, finding: Finding, reason: str, cure: Cure | None, *, precision: bool
) -> Overflow:
    place: Place = finding.place
    return Overflow(
        Direction.BACKWARD if finding.backward else Direction.FORWARD,
        place.op,
        place.module,
        place.source,
        reason,
        finding.inputs,
        replay.number,
        precision,
        "" if cure is None else cure.entry,
        None if cure is None else cure.policy,
        cure is not None and cure.verified,
    )
