"""One call of a step: forward, scaled backward, update. Classes and methods are in call order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import get_ident
from typing import Any

import torch

from mezzo._casting import cast_all
from mezzo._errors import ScalerError
from mezzo._torch import foreach_mul_
from mezzo.autocasting.regions import enter_regions
from mezzo.optim.binding import optimizer_binding
from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.mixed_dtypes import explain_backward
from mezzo.scaling import captured_scaler
from mezzo.scaling.gradients import parameters, refuse_unreached
from mezzo.scaling.mesh import local_tensors
from mezzo.scaling.scaler_schedules import advance_scheduler
from mezzo.scaling.step_result import StepResult
from mezzo.step.components import StepComponents
from mezzo.step.inputs import Call, move_inputs
from mezzo.step.metrics import MetricsBuffer, Rate, first_rate
from mezzo.step.module_buffers import BatchCounters, ModuleBuffers
from mezzo.step.options import AccumulationPhase, Body, Reduction, StepOptions
from mezzo.step.outputs import split_loss
from mezzo.step.profiler_ranges import Range, profiled
from mezzo.step.static_gradients import Gradients, StaticGradients
from mezzo.step.user_body import ScaledBackward, refuse_manual_step, stepping_threads


class StepExecutor:
    """Runs the calls of a step eagerly; also during warm-up and capture."""

    def __init__(self, components: StepComponents, body: Body, options: StepOptions) -> None:
        self.components, self.options = components, options
        self._body, self._loss_factor = body, options.loss_factor
        self._input_dtype = components.input_dtype if options.casts_first_input else None
        self.buffers = ModuleBuffers(components.models if components.scaler is not None else ())
        self._batch_counters = BatchCounters(components.models)
        self.metrics = MetricsBuffer(
            components.device,
            components.scaler,
            rate=first_rate(components.optimizers[0]),
            computes_norm=all(map(computes_norm, components.optimizers)),
        )
        self.results: Iterable[StepResult | None] = ()
        """Results of the optimizers in the last eager update."""
        self.finds_scale = components.scaler is not None
        """Whether the next update is the first one, which searches for a loss scale."""
        self.static_gradients = StaticGradients()

    def resume(self) -> None:
        """Continue from a loaded state: the metrics are those of the loaded scaler and rate."""
        self.finds_scale = False
        self.metrics.reset(first_rate(self.components.optimizers[0]))

    # -- one call, in order ------------------------------------------------------------------------

    def move_inputs(self, call: Call) -> Call:
        """Move inputs to the device of the models and to their memory format."""
        moved: Call = move_inputs(
            call, self.components.device, channels_last=self.options.channels_last
        )
        return moved

    def static_inputs(self, call: Call, leaves: Sequence[torch.Tensor]) -> Call:
        """Move inputs, and cast those that the model would cast first.

        For captured steps, whose graph then copies and casts an input once. Their warm-up runs on
        the same dtypes: otherwise code that it compiles would be compiled again in the capture.
        """
        moved, device, dtype = self.move_inputs(call), self.components.device, self._input_dtype
        # A copy from another device would cast on the host first, and synchronize.
        if dtype is None or any(leaf.device != device for leaf in leaves):
            return moved
        first, *rest = moved.args
        return Call((cast_all(first, dtype, device.type), *rest), moved.kwargs)

    def run(
        self,
        call: Call,
        phase: AccumulationPhase,
        modes: Hashable,
        update: Callable[[StepContext], None] | None = None,
    ) -> Any:
        """Run one call and return what the body returned.

        `modes` distinguishes forward passes that may write different buffers. `update` replaces the
        method of this name.
        """
        context, returned = self.run_body(call, phase, modes)
        if phase.last:
            (update or self.update)(context)
        return returned

    def run_body(
        self, call: Call, phase: AccumulationPhase, modes: Hashable
    ) -> tuple[StepContext, Any]:
        """Run everything but the update; return what the update needs and the body's outputs."""
        if phase.first:
            self.buffers.save(modes)
        context = StepContext(
            self.components,
            loss_factor=self._loss_factor,
            can_update=self.options.accumulate == 1,
            finds_scale=self.finds_scale and phase.first,
        )
        with self._reducing(phase):
            returned = self._forward_and_backward(context, call)
        self.buffers.find_written()
        if not phase.last:
            self.metrics.write(context.loss, None)
        return context, returned

    def update(self, context: StepContext) -> None:
        """Step the optimizers, update the loss scale, and write the metrics."""
        if self.static_gradients.exist:
            self.static_gradients.detach_unused()
        elif self.static_gradients.are_recorded:
            self.static_gradients.record(self.gradients())
        with profiled(Range.UPDATE):
            context.step_remaining()
            self.results = context.results.values()
            self.clear_gradients()
            found_nonfinite = context.found_nonfinite()
            self.buffers.restore(found_nonfinite)
        self.finds_scale = False
        self.metrics.write(
            context.loss, found_nonfinite, rate=context.rate(), square_sum=context.square_sum()
        )

    def discard(self, phase: AccumulationPhase) -> None:
        """Discard gradients and records of a call that raised: the next one starts anew.

        Gradients of earlier calls of an accumulation stay.
        """
        if self.components.scaler is not None:
            captured_scaler.discard_records(self.components.scaler)
        if phase.first:
            self.clear_gradients()

    def update_after_replay(self, loss: torch.Tensor | None, modes: Hashable) -> None:
        """Update eagerly from gradients that a captured graph has computed."""
        self.buffers.select(modes)
        self.update(StepContext(self.components, loss_factor=1.0, can_update=True, loss=loss))

    def _reducing(self, phase: AccumulationPhase) -> AbstractContextManager[None]:
        """Return a context in which gradients are averaged over processes in the last call only."""
        ddp = self.components.ddp
        if not ddp.wrappers:
            return nullcontext()
        if not phase.last:
            return ddp.unreduced()
        # A user's body may call the model without its wrapper.
        return ddp.refusing_bypass() if self.options.custom_body else nullcontext()

    def _forward_and_backward(self, context: StepContext, call: Call) -> Any:
        args = (context, *call.args) if self.options.takes_update else call.args
        with ExitStack() as stack:
            if self.options.custom_body:
                stack.enter_context(ScaledBackward(context.backward))
                for optimizer in self.components.optimizers:
                    stack.callback(optimizer.register_step_pre_hook(refuse_manual_step).remove)
            stack.enter_context(self._batch_counters.counting())
            stack.enter_context(enter_regions(self.components.region))
            if not torch.is_grad_enabled():
                stack.enter_context(torch.enable_grad())
            stack.enter_context(profiled(Range.FORWARD))
            returned = self._body(*args, **call.kwargs)
        if context.loss is None:
            loss = split_loss(returned).loss
            if loss is None:
                raise ScalerError(
                    f"The body of a step returned {type(returned).__name__}, not a loss tensor."
                    " Return the loss or (loss, aux), or call loss.backward() in the body and"
                    " return anything."
                )
            context.backward(loss)
        return returned

    def clear_gradients(self) -> None:
        """Set gradients to None; static ones to zero."""
        for optimizer in self.components.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.static_gradients.exist:
            self.static_gradients.zero()

    def advance_schedulers(self) -> None:
        """Advance the schedulers after an update; with a scaler, its step has advanced them."""
        if self.components.scaler is None:
            for optimizer, scheduler in self.components.schedulers.items():
                advance_scheduler(optimizer, scheduler)

    # -- parts of a call ---------------------------------------------------------------------------

    def flush(self, calls: int) -> None:
        """Update from the gradients of fewer calls than usual."""
        self.components.ddp.reduce_gradients()
        if self.options.reduction is Reduction.MEAN:
            gradients = [gradient for _, gradient in self.gradients()]
            foreach_mul_(local_tensors(gradients), self.options.accumulate / calls)
        self.update(StepContext(self.components, loss_factor=1.0, can_update=True))

    def compute_gradients(self, call: Call) -> None:
        """Run forward and scaled backward only: gradients are added to the existing ones."""
        context = StepContext(self.components, loss_factor=self._loss_factor, can_update=False)
        self._forward_and_backward(context, call)

    def gradients(self) -> Gradients:
        """Return the optimizers' parameters that have a gradient, each with its gradient."""
        return [
            (parameter, parameter.grad)
            for optimizer in self.components.optimizers
            for parameter in parameters(optimizer)
            if parameter.grad is not None
        ]


class StepContext:
    """Scaled backward and optimizer updates of one call.

    A body whose first parameter is named `update` receives this object: `update(loss, optimizer)`
    computes gradients for the parameters of that optimizer only and steps it at once.
    """

    def __init__(
        self,
        components: StepComponents,
        *,
        loss_factor: float,
        can_update: bool,
        finds_scale: bool = False,
        loss: torch.Tensor | None = None,
    ) -> None:
        self._components, self._loss_factor = components, loss_factor
        self._can_update, self._finds_scale = can_update, finds_scale
        self.loss = loss
        """The last loss whose gradients were computed."""
        self.results: dict[Optimizer, StepResult | None] = {}
        """Results of the optimizers stepped so far; None without a scaler."""
        self._host_rate: Rate = None
        """Learning rate of the first optimizer on the host, before a scheduler advanced it."""

    def __call__(self, loss: torch.Tensor, optimizer: Optimizer, **kwargs: Any) -> None:
        """Compute the gradients of a loss for an optimizer's parameters, and step it.

        Keyword arguments are those of `Tensor.backward`.
        """
        if optimizer not in self._components.optimizers:
            raise ScalerError(
                f"update(loss, optimizer): this {type(optimizer).__name__} is not an optimizer of"
                " the step. Pass it to train_step(optimizers=...)."
            )
        if optimizer in self.results:
            raise ScalerError(
                f"update(loss, optimizer): this {type(optimizer).__name__} was already stepped in"
                " this call. Add the losses and call update once."
            )
        if not self._can_update:
            raise ScalerError(
                "update(loss, optimizer) steps at once and cannot accumulate. Use accumulate=1, or"
                " return the loss."
            )
        trained = [parameter for parameter in parameters(optimizer) if parameter.requires_grad]
        self.backward(loss, inputs=trained, **kwargs)
        refuse_unreached(trained)
        with profiled(Range.UPDATE):
            self.step(optimizer)
            optimizer.zero_grad(set_to_none=True)

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,  # noqa: FBT001 - the signature of Tensor.backward
        create_graph: bool = False,  # noqa: FBT001, FBT002
        inputs: Any = None,
    ) -> None:
        """Compute scaled gradients, with the arguments of `Tensor.backward`.

        Runs with autocast off: backward ops use the dtypes of their forward ops.
        """
        if loss.numel() != 1:
            raise ScalerError(
                f"The loss must have one element, got shape {tuple(loss.shape)}. Reduce it:"
                " loss.mean()."
            )
        if not loss.requires_grad:
            raise ScalerError(
                "The loss does not depend on any trained parameter. Compute it from the model's"
                " output, without detach() or no_grad()."
            )
        self.loss = loss
        # The caller may have switched gradients off: the forward pass runs with them in any case.
        with torch.enable_grad():
            scaled = loss if self._loss_factor == 1.0 else loss * self._loss_factor
        scaler, region = self._components.scaler, self._components.backward_region
        in_region = torch.is_autocast_enabled(region.device)
        try:
            with profiled(Range.BACKWARD), enter_regions(region) if in_region else nullcontext():
                if (
                    self._finds_scale
                    and gradient is None
                    and not create_graph
                    and self._find_scale(scaled, retain_graph, inputs)
                ):
                    return
                if scaler is not None and gradient is None:
                    gradient = captured_scaler.backward_seed(scaler, scaled)
                elif scaler is not None:
                    scaled = scaler.scale(scaled)
                # Not `scaled.backward()`, which `ScaledBackward` would send here again.
                torch.autograd.backward(scaled, gradient, retain_graph, create_graph, inputs=inputs)
        except RuntimeError as error:
            explained = explain_backward(error)
            if explained is None:
                raise
            raise explained from error

    def _find_scale(self, loss: torch.Tensor, retain_graph: bool | None, inputs: Any) -> bool:  # noqa: FBT001
        """Compute the first gradients, and lower the loss scale if they are non-finite.

        Returns False if the scale is not searched; gradients are not computed then.
        """
        scaler = self._components.scaler
        if scaler is None:
            return False

        def backward(repeats: bool) -> None:  # noqa: FBT001
            seed = captured_scaler.backward_seed(scaler, loss)
            torch.autograd.backward(loss, seed, repeats or retain_graph, inputs=inputs)

        trained = [
            parameter
            for optimizer in self._components.optimizers
            for parameter in parameters(optimizer)
        ]
        return captured_scaler.find_first_scale(scaler, loss, trained, backward)

    def step_remaining(self) -> None:
        """Step the optimizers that have gradients and were not stepped; update the loss scale."""
        for optimizer in self._components.optimizers:
            if optimizer not in self.results and any(
                parameter.grad is not None for parameter in parameters(optimizer)
            ):
                self.step(optimizer)
        if not self.results:
            raise ScalerError(
                "No parameter of the step's optimizers has a gradient. Check that the loss depends"
                " on the models' parameters. A model is sharded before its optimizer and the step"
                " are created: fully_shard replaces its parameters."
            )
        if self._components.scaler is not None:
            self._components.scaler.update()

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer; a scaler skips the step if a gradient is non-finite."""
        scaler = self._components.scaler
        if optimizer is self._components.optimizers[0]:
            self._host_rate = first_rate(optimizer)
        stepping_threads.add(get_ident())
        try:
            if scaler is None:
                optimizer.step()
                self.results[optimizer] = None
            else:
                self.results[optimizer] = scaler.step(
                    optimizer, scheduler=self._components.schedulers.get(optimizer)
                )
        finally:
            stepping_threads.discard(get_ident())

    def found_nonfinite(self) -> torch.Tensor | bool:
        """Return whether a step was skipped, as a tensor if reading it would synchronize."""
        results = [result for result in self.results.values() if result is not None]
        flags = [flag for result in results if (flag := result.found_inf) is not None]
        if not flags or all(flag.device.type == "cpu" for flag in flags):
            return any(result.skipped for result in results)
        if len(flags) == 1:
            return flags[0]
        return torch.stack([flag.reshape(()) for flag in flags]).amax(0)

    def rate(self) -> Rate:
        """Return the learning rate of the first optimizer, as a tensor if it is on a device."""
        binding = optimizer_binding(self._components.optimizers[0])
        on_device = None if binding is None else binding.device_rate
        return self._host_rate if on_device is None else on_device

    def square_sum(self) -> torch.Tensor | None:
        """Return the sum of squares of the gradients of all stepped optimizers, if it is known."""
        bindings = [optimizer_binding(optimizer) for optimizer in self.results]
        squares = [None if binding is None else binding.square_sum for binding in bindings]
        known = [square for square in squares if square is not None]
        if not known or len(known) < len(squares):
            return None
        return known[0] if len(known) == 1 else torch.stack(known).sum()


def computes_norm(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step computes the norm of its gradients."""
    binding = optimizer_binding(optimizer)
    return binding is not None and binding.computes_norm
