"""Base class of training steps: one call in order, metrics, outputs and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo._errors import PolicyError, UnsupportedError
from mezzo.prepare.ema import averages_refusal
from mezzo.scaling.scaler import GradScaler
from mezzo.step.components import StepComponents
from mezzo.step.executor import StepExecutor
from mezzo.step.inputs import Call
from mezzo.step.metrics import StepMetrics
from mezzo.step.options import AccumulationPhase, Body, Capture, StepOptions
from mezzo.step.outputs import HostOutputs, KeptOutputs, RunningMeans
from mezzo.step.rank_agreement import check_shared_settings
from mezzo.step.runners import Runner, agreed_runner, runner_for
from mezzo.step.step_history import StepHistory
from mezzo.step.step_state import (
    load_run_state,
    load_step_state,
    run_state_dict,
    step_state_dict,
)


class Step:
    """Base of training steps. Methods are in the order of one call.

    A call moves the inputs to the device, runs the body (forward pass and loss) in the policy's
    autocast region, computes scaled gradients and, after `accumulate` calls, updates: check for
    non-finite gradients, step the optimizers, update the loss scale. Metrics and warnings follow.
    On a CPU, `StepExecutor` does this eagerly; on CUDA, `CaptureRunner` captures it as a CUDA
    graph and replays that.
    """

    def __init__(
        self,
        components: StepComponents,
        body: Body,
        options: StepOptions,
        capture: Capture,
        mean_over: int | None = None,
    ) -> None:
        self._body, self._capture = body, capture
        self._outputs: Any = None
        """Outputs of the last call; `KeptOutputs` until they are read."""
        self._means = None if mean_over is None else RunningMeans(mean_over, components.device)
        self._position = 0
        """Calls since the last update."""
        self._updates = 0
        self._calls = 0
        """Calls of this object, and flushes that updated. A call that raised does not count."""
        self._observer: Callable[[Call], Any] | None = None
        """Runs the calls from `_next_observed` on in place of this object; see `_observe_calls`."""
        self._next_observed = inf
        self._is_checked = False
        """Whether all ranks were found to train the same step."""
        self._phases = [
            AccumulationPhase(first=index == 0, last=index + 1 == options.accumulate)
            for index in range(options.accumulate)
        ]
        self._history: StepHistory | None = None
        """Where an observer records the metrics of every call."""
        self._build(components, options)

    def _build(self, components: StepComponents, options: StepOptions) -> None:
        """Create the executor and the runner for these components."""
        self._components = components
        self._executor = StepExecutor(components, self._body, options)
        if self._history is not None:
            self._executor.metrics.record_to(self._history)
        self._runner: Runner = runner_for(self._executor, self._capture)
        scaler = components.scaler
        self._checks_small_scale = (
            scaler is not None
            and components.region.computes_in is torch.float16
            and scaler.get_scale() >= 1.0
        )
        """Whether to warn when the loss scale falls below 1; at most once."""
        components.decoration.training_steps.add(self)

    # -- one call ----------------------------------------------------------------------------------

    def _call(self, call: Call, *, eagerly: bool = False) -> Any:
        """Run one call, with an update if it is the last of an accumulation.

        With `eagerly` it is not replayed, unless all ranks have to run it alike.
        """
        if self._calls >= self._next_observed and self._observer is not None:
            return self._observer(call)
        if self._components.decoration.holds_averages:
            self._refuse_averages("The training step")
        if not self._is_checked:
            self._check_processes()
        # Free the old outputs before the forward pass, which needs the memory.
        self._outputs = None
        # torch's weight cache must not cross the borders of a captured graph: the graph would read
        # casts that were made before, and later ops casts that were made in it.
        in_region = torch.is_autocast_enabled(self._components.region.device)
        if in_region:
            torch.clear_autocast_cache()
        phase, run = self._phases[self._position], self._runner
        self._calls += 1
        try:
            returned = (
                run.run_eagerly(call, phase)
                if eagerly and not run.shares_calls
                else run(call, phase)
            )
        except BaseException:
            self._calls -= 1
            self._executor.discard(phase)
            raise
        if in_region:
            torch.clear_autocast_cache()
        if phase.last:
            self._position = 0
            self._finish_update()
        else:
            self._position += 1
        self._executor.metrics.warn_if_nonfinite()
        if self._checks_small_scale:
            self._warn_if_scale_small()
        return returned

    def _record_to(self, history: StepHistory | None) -> None:
        """Also write the metrics of every call to a history; None stops that."""
        self._history = history
        self._executor.metrics.record_to(history)

    def _observe_calls(self, observer: Callable[[Call], Any] | None, first: float = inf) -> None:
        """Let an observer run the calls after the first `first` ones; None removes it.

        Earlier calls cost nothing. The observer passes the call on to `_call`, and sets when it is
        called next.
        """
        self._observer, self._next_observed = observer, first

    def _check_processes(self) -> None:
        """Check before the first call that the wrappers and the other processes fit the step."""
        own = {
            "updates": self._updates,
            "position": self._position,
            "capture": self._capture.value,
        }
        check_shared_settings(self._components, self._executor.options, own)
        self._runner = agreed_runner(self._runner, self._executor, self._capture)
        self._is_checked = True

    def flush(self) -> None:
        """Update from the calls since the last update, if there are any.

        Call this at the end of an epoch whose number of batches is not a multiple of `accumulate`.
        With DistributedDataParallel all ranks must call it, after the same number of calls; the
        gradients are averaged over the ranks first.
        """
        if self._components.ddp:
            self._components.ddp.check_positions(self._position)
        if self._position:
            self._refuse_averages("flush()")
            calls, self._position = self._position, 0
            self._runner.flush(calls)
            self._calls += 1
            self._finish_update()

    def _refuse_averages(self, operation: str) -> None:
        """Raise inside `EMA.applied()`, where the model holds averaged weights."""
        if self._components.decoration.holds_averages:
            raise UnsupportedError(averages_refusal(operation))

    def _finish_update(self) -> None:
        self._updates += 1
        self._executor.advance_schedulers()

    def _warn_if_scale_small(self) -> None:
        """Warn once that skipped updates have lowered the loss scale of a float16 run below 1."""
        scale, consecutive_skips = self._executor.metrics.scale_and_skips()
        if scale >= 1.0 or not consecutive_skips:
            return
        self._checks_small_scale = False
        name = self._runner.first_nonfinite()
        source = f"; the gradient of {name!r} is not finite" if name else ""
        cause = self._cast_by_model() or (
            "The gradients overflow float16 even without scaling: look for a loss that is summed"
            " where it should be averaged, or use dtype='bfloat16'. mezzo.trace_overflow(step,"
            " batch) names the op that overflows and its line."
        )
        warnings.warn(
            f"The loss scale fell to {scale:g}, below 1{source}. {cause}",
            UserWarning,
            stacklevel=4,
        )

    def _cast_by_model(self) -> str:
        """Return what to do if the model has cast a trained parameter to 16 bits; empty if not."""
        plan = self._components.decoration.plan
        parameters = (named for model in self.models for named in model.named_parameters())
        cast = [
            name
            for name, parameter in parameters
            if parameter.requires_grad and parameter.dtype in HALF_DTYPES
        ]
        if plan.converts or not cast:
            return ""
        return (
            f"The parameter {cast[0]!r} is 16-bit, and {plan.policy.level.value} keeps no master"
            " weights: small updates are lost, and Adam may divide by an eps that is 0 in float16."
            " If the model casts it itself, use policy 'O2', which adds master weights."
        )

    # -- metrics: reading them does not synchronize ------------------------------------------------

    @property
    def metrics(self) -> StepMetrics:
        """Loss, loss scale, skips, learning rate and gradient norm of the last finished step.

        Does not synchronize: on CUDA this can lag a few steps.
        """
        return self._executor.metrics.read()

    @property
    def loss(self) -> float:
        """Loss of the last finished step."""
        return self.metrics.loss

    @property
    def skipped(self) -> bool:
        """Whether the last finished update was skipped."""
        return self.metrics.skipped

    @property
    def scale(self) -> float:
        """Loss scale after the last finished update; 1 without a scaler."""
        return self.metrics.scale

    @property
    def rate(self) -> float:
        """Learning rate of the last finished update, in the optimizer's first group."""
        return self.metrics.rate

    @property
    def grad_norm(self) -> float | None:
        """Norm of the unscaled gradients of the last finished update, before clipping.

        None unless the step has `clip_norm=` or `grad_norm=True`.
        """
        return self.metrics.grad_norm

    @property
    def outputs(self) -> Any:
        """What the last call returned besides its loss, as detached copies.

        That is the `aux` of a loss function or body that returned `(loss, aux)`; None if it
        returned the loss alone. No later call overwrites the copies. If the step is captured, plain
        values among them keep the values they had at the capture. Does not synchronize.
        """
        if isinstance(self._outputs, KeptOutputs):
            self._outputs = self._outputs.copy()
        return self._outputs

    def outputs_on_host(self) -> HostOutputs:
        """Start to copy the outputs of the last call to the host. Does not synchronize.

        The result has `ready()`, which does not wait either, and `get()`, which waits for the
        copies and returns them. On a CPU they are ready at once.
        """
        kept = isinstance(self._outputs, KeptOutputs)
        return HostOutputs(self._outputs.value if kept else self.outputs)

    @property
    def means(self) -> dict[str, float]:
        """Means over the last finished window of `mean_over` calls; empty before the first.

        That is the mean of the loss and, if the outputs are a dict, of its numbers and one-element
        tensors by key. A single scalar output is `"outputs"`. Does not synchronize: on CUDA the
        means appear a few calls after the end of the window.
        """
        if self._means is None:
            raise PolicyError(
                "Means need the number of calls that they are taken over. Pass mean_over=50 when"
                " the step is created."
            )
        return self._means.read()

    @property
    def scaler(self) -> GradScaler | None:
        """The gradient scaler; None if gradients are not scaled."""
        return self._components.scaler

    @property
    def position(self) -> int:
        """Calls since the last update: 0 right after one, always less than `accumulate`."""
        return self._position

    @property
    def updates(self) -> int:
        """Number of updates so far, skipped ones included. Does not synchronize."""
        return self._updates

    @property
    def captured(self) -> bool:
        """Whether calls are replayed as CUDA graphs by now."""
        return self._runner.captured

    @property
    def replays(self) -> int:
        """Number of calls that were replayed so far."""
        return self._runner.replays

    @property
    def eager_reason(self) -> str | None:
        """Why calls run eagerly although `capture` is not False; None if they are captured."""
        return self._runner.eager_reason

    def __repr__(self) -> str:
        """Describe the step: precision, capture, updates and metrics. Does not synchronize."""
        components, metrics = self._components, self.metrics
        plan = components.decoration.plan
        dtype = "float32" if plan.dtype is None else dtype_name(plan.dtype)
        return "\n  ".join(
            [
                f"{self._title()}:",
                f"precision: {plan.policy.level.value}, {dtype}",
                self._describe_capture(),
                f"updates: {self._updates}, skipped: {metrics.skipped_steps}",
                f"loss: {metrics.loss:.4g}, loss scale: {metrics.scale:g}, rate: {metrics.rate:g}",
            ]
        )

    def _title(self) -> str:
        components = self._components
        names = [type(part).__name__ for part in (*components.models, *components.optimizers)]
        return f"{type(self).__name__}({', '.join(names)})"

    def _describe_capture(self) -> str:
        if self._capture is Capture.OFF:
            return "eager: capture=False"
        if self._runner.eager_reason is not None:
            return f"eager: {self._runner.eager_reason}"
        count = self._runner.graph_count
        return f"captured: {count} {'shape' if count == 1 else 'shapes'}" if count else "warming up"

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models that the step trains, without wrappers."""
        return self._components.models

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that the step updates with."""
        return self._components.optimizers

    @property
    def schedulers(self) -> tuple[LRScheduler, ...]:
        """The schedulers that advance with the updates."""
        return tuple(self._components.schedulers.values())

    def run_state(self) -> dict[str, Any]:
        """Return scaler, schedulers and counters: the state without models and optimizers."""
        self._refuse_averages("run_state()")
        return run_state_dict(self._components, position=self._position, updates=self._updates)

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Resume scaler, schedulers and counters; models and optimizers are loaded elsewhere.

        A state that does not fit raises `CheckpointError` and changes nothing.
        """
        self._refuse_averages("load_run_state()")
        self._position, self._updates = load_run_state(
            self._components, state, self._executor.options.accumulate
        )
        self._executor.resume()
        self._runner.drop_graphs()

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume bit for bit.

        That is the state of models, optimizers, scaler and schedulers, gradients accumulated so
        far, counters and random generators.
        """
        self._refuse_averages("state_dict() of a step")
        return step_state_dict(
            self._components,
            self._executor.buffers,
            position=self._position,
            updates=self._updates,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state, random generators included.

        A state that does not fit raises `CheckpointError` and changes nothing.
        """
        self._refuse_averages("load_state_dict() of a step")
        self._position, self._updates = load_step_state(
            self._components,
            self._executor.buffers,
            state_dict,
            self._executor.options.accumulate,
        )
        self._executor.resume()
        self._runner.drop_graphs()
