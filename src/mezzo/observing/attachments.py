"""Attach a run to a training step, or to the model, optimizers and scaler of a loop; detach it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from mezzo import _events, _launch
from mezzo._dtypes import dtype_name
from mezzo._errors import UnsupportedError
from mezzo.autocasting.arguments import policy_of
from mezzo.autocasting.regions import innermost_region
from mezzo.observing.module_hooks import ModuleHook
from mezzo.observing.numerics import named_models
from mezzo.scaling import observed_scaler
from mezzo.scaling.gradient_counts import GradientCounts
from mezzo.scaling.gradients import parameters
from mezzo.scaling.mesh import named_shards
from mezzo.scaling.observed_scaler import Scaler
from mezzo.step.base import Step
from mezzo.step.inputs import Call
from mezzo.step.metrics import first_rate
from mezzo.step.step_history import StepHistory

Optimizer = torch.optim.Optimizer


class Listener(Protocol):
    """What a run does around steps, which are numbered from 1."""

    def begin(self, number: int) -> bool:
        """Begin a step, before its forward pass; return whether it is sampled."""

    def end(self, number: int) -> int:
        """End a step after its update; return the number of the next one that the run has to see.

        The history has the rows of the steps between.
        """

    def fail(self) -> None:
        """End a step that raised: it does not count."""


class Attachment:
    """Base of `StepAttachment` and `LoopAttachment`: what a run observes, until `detach`."""

    def __init__(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self.models, self.optimizers = models, optimizers
        self.device = _device_of(models, optimizers)
        self._names = {
            id(parameter): prefix + name
            for prefix, model in named_models(models)
            for name, parameter in named_shards(model)
        }
        self.counts: GradientCounts | None = None
        """Counts of the gradients; None if nothing checks them."""
        self.history = StepHistory(self.device)
        self._number = 0
        self._detach = ExitStack()

    @property
    def number(self) -> int:
        """Number of the current step, or of the last one between steps; 0 before the first."""
        return self._number

    def name_of(self, index: int) -> str:
        """Return the name of a counted parameter, or its position."""
        if self.counts is None:
            return f"parameter {index}"
        return self._names.get(id(self.counts.parameters[index]), f"parameter {index}")

    def first_nonfinite(self, first: float) -> str | None:
        """Return the first parameter with a non-finite gradient, from `HistoryIndex.FIRST`."""
        if self.counts is None:
            return None
        index = self.counts.first_parameter(first)
        return None if index is None else self.name_of(index)

    def rate(self) -> float | None:
        """Return the learning rate of the last update; None if reading it would synchronize."""
        rate = first_rate(self.optimizers[0]) if self.optimizers else None
        return None if rate is None or isinstance(rate, torch.Tensor) else float(rate)

    def detach(self) -> None:
        """Remove everything that was attached; the device is done with it then."""
        self._detach.close()
        if _launch.needs_sync(self.device):
            # Replays of a captured step may still write to the history.
            torch.accelerator.synchronize(self.device)

    def _count_gradients(self, scaler: Scaler | None) -> None:
        trained = [
            parameter for optimizer in self.optimizers for parameter in parameters(optimizer)
        ]
        trained = [parameter for parameter in trained if parameter.device == self.device]
        if scaler is None or not observed_scaler.is_enabled(scaler) or not trained:
            return
        if observed_scaler.is_counted(scaler):
            raise UnsupportedError(
                "This step or scaler is observed by another run, and only one at a time can count"
                " its gradients. Call stop() of that run first."
            )
        self.counts = GradientCounts(trained)
        self.history = StepHistory(self.device, self.counts)
        observed_scaler.count_gradients(scaler, self.counts)
        self._detach.callback(observed_scaler.count_gradients, scaler, None)


class StepAttachment(Attachment):
    """Observes a `TrainStep` or a `@train_step` function.

    Metrics and counts are part of the step, captured or not: it is captured again when a run is
    attached, and when it is detached. A sampled call runs eagerly.
    """

    def __init__(self, step: Step, listener: Listener) -> None:
        super().__init__(list(step.models), list(step.optimizers))
        self._step, self._listener = step, listener
        if step._history is not None:
            raise UnsupportedError(
                "This step is observed by another run, and one at a time can record it. Call stop()"
                " of that run first."
            )
        self._before = step._calls
        self._count_gradients(step.scaler)
        step._record_to(self.history)
        self._detach.callback(self._stop_recording)
        step._observe_calls(self._observe, step._calls)

    def _stop_recording(self) -> None:
        self._step._observe_calls(None)
        self._step._record_to(None)

    @property
    def number(self) -> int:
        """Number of the current step, or of the last one between steps; 0 before the first."""
        return self._step._calls - self._before

    def rate(self) -> float | None:
        """Return the learning rate of the last update. Does not synchronize."""
        return self._step.rate if self.optimizers else None

    def _observe(self, call: Call) -> Any:
        step, listener = self._step, self._listener
        step._observe_calls(self._observe)
        following = self.number + 1
        try:
            is_sampled = listener.begin(following)
            returned = step._call(call, eagerly=is_sampled)
            following = listener.end(self.number)
        except BaseException:
            listener.fail()
            raise
        finally:
            if step._observer is not None:
                step._observe_calls(self._observe, self._before + following - 1)
        return returned


class LoopAttachment(Attachment):
    """Observes the model, optimizers and scaler of a loop that the user wrote.

    A step begins with a forward pass of the model, and ends with `scaler.update()` after a step of
    its optimizers, without a scaler with the step of the last optimizer, and without optimizers
    with the next forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        scaler: Scaler | None,
        listener: Listener,
        inner: nn.Module,
    ) -> None:
        super().__init__([inner], optimizers)
        self._listener, self._scaler = listener, scaler
        self._is_open = False
        self._loss: torch.Tensor | None = None
        self.region_dtype: torch.dtype | None = None
        """Dtype of the autocast region around the first forward pass; None without a region."""
        self._count_gradients(scaler)
        hook = model.register_forward_pre_hook(ModuleHook(self._before_forward))
        self._detach.callback(hook.remove)
        if scaler is not None and observed_scaler.is_enabled(scaler):
            self._detach.callback(_WrappedMethod(scaler, "scale", self._wrap_scale).remove)
            self._detach.callback(_WrappedMethod(scaler, "update", self._wrap_update).remove)
        elif optimizers:
            hook = optimizers[-1].register_step_post_hook(self._after_step)
            self._detach.callback(hook.remove)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of the step that is open."""
        self._loss = loss.detach()

    def _before_forward(self, *_: Any) -> None:
        if not self.optimizers:
            self._end(0.0)
        elif not torch.is_grad_enabled():
            # A validation between two steps.
            return
        if not self._is_open:
            self._is_open = True
            self._number += 1
            if self._number == 1:
                self._note_region()
            self._listener.begin(self._number)

    def _note_region(self) -> None:
        """Note the region around the model, and emit an event: reports name dtype and policy."""
        device = self.device.type
        if not torch.is_autocast_enabled(device):
            return
        self.region_dtype, region = torch.get_autocast_dtype(device), innermost_region(device)
        policy = None if region is None else policy_of(region)
        name, reason = "" if policy is None else repr(policy), "the autocast region of the model"
        dtype = dtype_name(self.region_dtype)
        _events.emit(_events.PolicyResolved(name, device, dtype, reason))

    def _wrap_scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                self.note_loss(outputs)
            return scale(outputs, *args, **kwargs)

        return scaled

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def updated(*args: Any, **kwargs: Any) -> Any:
            scaler = self._scaler
            if scaler is None or observed_scaler.checked_only_others(scaler, self.optimizers):
                return update(*args, **kwargs)
            if self.counts is not None:
                observed_scaler.count_unchecked(scaler, self.optimizers, self.counts)
            skipped = observed_scaler.found_inf(scaler)
            returned = update(*args, **kwargs)
            self._end(0.0 if skipped is None else skipped.clone(), observed_scaler.scale_of(scaler))
            return returned

        return updated

    def _after_step(self, *_: Any) -> None:
        self._end(0.0)

    def _end(self, skipped: torch.Tensor | float, scale: torch.Tensor | float = 1.0) -> None:
        if not self._is_open and not self.optimizers:
            return
        loss, self._loss = self._loss, None
        self.history.append(loss, skipped, scale, None)
        if not self._is_open:
            # The forward pass was not seen: a compiled model does not run the hook.
            self._number += 1
        self._is_open = False
        self._listener.end(self._number)

    def detach(self) -> None:
        """Remove hooks and wrappers; end the step that is open."""
        if not self.optimizers:
            self._end(0.0)
        super().detach()


class _WrappedMethod:
    """A method of one object that is wrapped until the wrapper is removed."""

    def __init__(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name)
        self._method = getattr(owner, name)
        self._run = wrap(self._method)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def remove(self) -> None:
        """Restore the method, or below a wrapper of other code only what this one calls."""
        self._run = self._method
        attributes = vars(self._owner)
        # Also wrappers of runs that stopped earlier, and were below this one.
        while isinstance(top := attributes.get(self._name), _WrappedMethod) and top._is_removed:
            delattr(self._owner, self._name)
            if top._before is not None:
                setattr(self._owner, self._name, top._before)

    @property
    def _is_removed(self) -> bool:
        return self._run is self._method


def _device_of(models: list[nn.Module], optimizers: list[Optimizer]) -> torch.device:
    tensors = [parameter for optimizer in optimizers for parameter in parameters(optimizer)]
    tensors += [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
