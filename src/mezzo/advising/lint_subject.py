"""What `mezzo.lint` checks: a model, its training setup, and what was traced and measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import PolicyError
from mezzo._hardware import Hardware, hardware
from mezzo.advising.loop_trace import LoopTrace
from mezzo.advising.op_trace import OpTrace, Product, buffers_restored, traced
from mezzo.autocasting.arguments import region_for
from mezzo.autocasting.regions import enter_regions
from mezzo.policy.decide import resolve_dtype
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level
from mezzo.prepare.arguments import Optimizer, unwrapped
from mezzo.prepare.decorate import decorate
from mezzo.prepare.decoration import Decoration, decoration_of
from mezzo.prepare.kept_results import copy_with_results
from mezzo.step.eval_step import needs_gradients
from mezzo.step.inputs import ModelArguments, call_model
from mezzo.step.outputs import split_loss


@dataclass(frozen=True)
class Cost:
    """What a forward pass of the sample spends its time and memory on, measured."""

    share: float
    """The part of the time that matrix products and convolutions take, from 0 to 1."""
    utilisation: float | None = None
    """The part of the time in which a GPU computes; None on other devices."""
    memory: float | None = None
    """The part of the device's memory in use at the peak; None where that is not reported."""
    gain: float | None = None
    """Time in float32, divided by the time in the policy's precision; None if not measured."""


@dataclass(frozen=True)
class Subject:
    """Everything that a rule reads. A rule needs no device: a test can make any of these."""

    model: nn.Module
    hardware: Hardware
    optimizers: tuple[Optimizer, ...] = ()
    scaler: Any = None
    policy: Policy | None = None
    """The policy that was passed, or that the model was decorated with."""
    dtype: torch.dtype | None = None
    """The 16-bit dtype in use; None if there is none."""
    schedulers: tuple[Any, ...] = ()
    ema: Any = None
    forward: OpTrace | None = None
    """The ops of the sample; None without a sample."""
    loop: LoopTrace | None = None
    """What the user's training step did; None without one."""
    cost: Cost | None = None
    layout_gain: float | None = None
    """Measured time of the forward pass channels first, divided by that channels last."""
    padding_gain: Callable[[Product, tuple[int, int, int]], float] | None = None
    """Measures how much faster a product is with padded sizes; None if that cannot be measured."""

    @property
    def decoration(self) -> Decoration | None:
        """The decoration of the model; None if it is not decorated."""
        return decoration_of(unwrapped(self.model))

    @property
    def trains(self) -> bool:
        """Whether the model is trained, as an optimizer or a step shows."""
        return bool(self.optimizers) or self.loop is not None

    @property
    def scales(self) -> bool:
        """Whether there is a scaler that is enabled."""
        return self.scaler is not None and bool(self.scaler.is_enabled())

    @property
    def capability(self) -> tuple[int, ...] | None:
        """Compute capability of an NVIDIA GPU; None for other devices."""
        text = self.hardware.capability or ""
        is_number = self.hardware.device == "cuda" and text.replace(".", "").isdigit()
        return tuple(int(part) for part in text.split(".")) if is_number else None

    @property
    def products(self) -> list[Product]:
        """The products of a forward pass: those of the sample, or of the training step."""
        if self.forward is not None:
            return self.forward.products
        return [] if self.loop is None else self.loop.ops.products

    @property
    def traced(self) -> bool:
        """Whether ops were traced, of a sample or a step."""
        return any(True for _ in self.traces())

    def traces(self) -> Iterator[OpTrace]:
        """Yield all traces."""
        if self.forward is not None:
            yield self.forward
        if self.loop is not None:
            yield self.loop.ops

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(unwrapped(self.model)).__name__


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model."""
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def dtype_in_use(
    model: nn.Module, policy: Policy | None, traces: Iterator[OpTrace]
) -> torch.dtype | None:
    """Return the 16-bit dtype that products run in, or that the policy or the parameters have."""
    observed = [
        (flops, dtype)
        for trace in traces
        for dtype, flops in trace.product_dtypes().items()
        if dtype in HALF_DTYPES
    ]
    if observed:
        return max(observed, key=lambda pair: pair[0])[1]
    device = device_of(model).type
    if policy is not None and policy.level is not Level.O0:
        if policy.dtype in HALF_DTYPES:
            return policy.dtype
        return resolve_dtype(policy, hardware(device)).dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    stored = {parameter.dtype for parameter in model.parameters() if parameter.dtype in HALF_DTYPES}
    return min(stored, key=str) if stored else None


class SampleRun:
    """A forward pass of the sample, with the loss if there is one, in the precision of a policy."""

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        loss_fn: Callable[..., Any] | None,
        policy: Policy | None,
        *,
        is_step: bool = False,
    ) -> None:
        arguments = tuple(sample) if isinstance(sample, tuple | list) else ()
        has_target = len(arguments) > 1
        if loss_fn is not None and not has_target and not is_step:
            raise PolicyError(
                f"With loss_fn the sample is (inputs, target), got {type(sample).__name__}. Pass"
                " sample=(x, y), or leave out loss_fn."
            )
        # A step without a target takes the inputs only, which may be a tuple: step((a, b)).
        inputs = arguments[0] if loss_fn is not None and arguments else sample
        self._target: Any = arguments[1] if loss_fn is not None and has_target else ()
        self.plain, self._loss_fn = model, loss_fn
        self.inputs = ModelArguments(unwrapped(model)).arrange((inputs,), {})
        is_decorated = decoration_of(unwrapped(model)) is not None
        self.model = model if policy is None or is_decorated else _prepared(model, policy)
        # A decorated model enters its region itself, and a training step around the loss too.
        self.policy = None if is_decorated and not is_step else policy
        """The policy whose region is entered; None if the model runs as it is."""
        self.grad_mode: Any = torch.no_grad
        """The context to run in: `torch.enable_grad` if the model computes gradients itself."""

    def trace(self) -> OpTrace:
        """Run once, and return what ran."""
        try:
            return self._trace()
        except RuntimeError as error:
            if not needs_gradients(error):
                raise
        self.grad_mode = torch.enable_grad
        return self._trace()

    def _trace(self) -> OpTrace:
        trace = OpTrace()
        with buffers_restored(self.model), self.grad_mode():
            traced(self.model, self.forward, trace)
        return trace

    def forward(self) -> Any:
        """Run the forward pass and the loss in the precision of the policy."""
        return self.run_on(self.model, self.inputs)

    @property
    def is_comparable(self) -> bool:
        """Whether the model that was passed runs in float32 without its policy."""
        is_decorated = decoration_of(unwrapped(self.plain)) is not None
        has_half = any(parameter.dtype in HALF_DTYPES for parameter in self.plain.parameters())
        return not (is_decorated or has_half)

    def forward_float32(self) -> Any:
        """Run the same in float32, with the model that was passed."""
        with torch.autocast(device_of(self.plain).type, enabled=False):
            return self._compute(self.plain, self.inputs)

    def run_on(self, model: nn.Module, inputs: Any) -> Any:
        """Run another copy of the model on other inputs in the precision of the policy."""
        if self.policy is None:
            return self._compute(model, inputs)
        with enter_regions(region_for(self.policy, device_of(model).type)):
            return self._compute(model, inputs)

    def _compute(self, model: nn.Module, inputs: Any) -> Any:
        outputs = call_model(model, inputs)
        if self._loss_fn is None:
            return outputs
        target = self._target if isinstance(self._target, tuple) else (self._target,)
        return split_loss(self._loss_fn(outputs, *target))[0]


def _prepared(model: nn.Module, policy: Policy) -> nn.Module:
    """Return a copy of a model under a policy, without masters: nothing is updated."""
    copied = copy_with_results(model)
    if policy.level in (Level.O2, Level.O3):
        decorate(copied, None, replace(policy, master="none"))
    return copied
