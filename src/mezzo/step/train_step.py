"""`TrainStep` and `@train_step`: a whole training step as one call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from mezzo import _events
from mezzo._errors import PolicyError, UnsupportedError
from mezzo.autocasting.regions import enter_regions
from mezzo.prepare.arguments import Models, Optimizers
from mezzo.prepare.decorate import undecorate
from mezzo.prepare.ema import refused_while_lent
from mezzo.prepare.plan import PolicyArg
from mezzo.scaling.scaler import GradScaler
from mezzo.step import memory_format
from mezzo.step.capture import Runner, runner_for
from mezzo.step.components import (
    Capture,
    Layout,
    PrecisionArgs,
    Reduction,
    Scaler,
    Schedulers,
    StepComponents,
    load_step_state,
    prepare_components,
    restored_on_error,
    step_state_dict,
)
from mezzo.step.executor import AccumulationPhase, Body, StepExecutor, StepOptions
from mezzo.step.input_kinds import MAX_GRAPHS, check_max_graphs
from mezzo.step.inputs import Call, closure_values, move_inputs
from mezzo.step.metrics import StepMetrics


class Step:
    """Base of training steps. Methods are in the order of one call.

    A call moves the inputs to the device, runs the body (forward pass and loss) in the policy's
    autocast region, computes scaled gradients and, after `accumulate` calls, updates: check for
    non-finite gradients, step the optimizers, update the loss scale. Metrics and warnings follow.
    On a CPU, `StepExecutor` does this eagerly; on CUDA, `CaptureRunner` captures it as a CUDA
    graph and replays that.
    """

    def __init__(
        self, components: StepComponents, body: Body, options: StepOptions, capture: Capture
    ) -> None:
        self._body, self._capture = body, capture
        self._position = 0
        """Calls since the last update."""
        self._updates = 0
        self._phases = [
            AccumulationPhase(first=index == 0, last=index + 1 == options.accumulate)
            for index in range(options.accumulate)
        ]
        self._build(components, options)

    def _build(self, components: StepComponents, options: StepOptions) -> None:
        """Create the executor and the runner for these components."""
        self._components = components
        self._executor = StepExecutor(components, self._body, options)
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

    def _call(self, call: Call) -> Any:
        """Run one call, with an update if it is the last of an accumulation."""
        if self._components.decoration.lent:
            self._check_not_lent("The training step")
        phase = self._phases[self._position]
        returned = self._runner(call, phase)
        if phase.last:
            self._position = 0
            self._finish_update()
        else:
            self._position += 1
        self._executor.metrics.warn_if_nonfinite()
        if self._checks_small_scale:
            self._warn_if_scale_small()
        return returned

    def flush(self) -> None:
        """Update from the calls since the last update, if there are any.

        Call this at the end of an epoch whose number of batches is not a multiple of `accumulate`.
        """
        if self._position:
            self._check_not_lent("flush()")
            calls, self._position = self._position, 0
            self._runner.flush(calls)
            self._finish_update()

    def _check_not_lent(self, operation: str) -> None:
        """Raise while the model holds averaged weights."""
        if self._components.decoration.lent:
            raise UnsupportedError(refused_while_lent(operation))

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
        warnings.warn(
            f"The loss scale fell to {scale:g}, below 1{source}. The gradients overflow float16"
            " even without scaling: look for a loss that is summed where it should be averaged, or"
            " use dtype='bfloat16'. mezzo.find_precision_loss(model, loss_fn, x, y) names the op"
            " that overflows.",
            UserWarning,
            stacklevel=4,
        )

    # -- metrics: reading them does not synchronize ------------------------------------------------

    @property
    def metrics(self) -> StepMetrics:
        """Loss, loss scale, skipped steps, learning rate and gradient norm of the last step.

        That is the last one that has finished: reading does not synchronize, and on CUDA this can
        lag a few steps.
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
    def scaler(self) -> GradScaler | None:
        """The gradient scaler; None if gradients are not scaled."""
        return self._components.scaler

    @property
    def position(self) -> int:
        """Calls since the last update: 0 right after one, always less than `accumulate`."""
        return self._position

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

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume bit for bit.

        That is the state of models, optimizers, scaler and schedulers, gradients accumulated so
        far, counters and random generators.
        """
        self._check_not_lent("state_dict() of a step")
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
        self._check_not_lent("load_state_dict() of a step")
        self._position, self._updates = load_step_state(
            self._components,
            self._executor.buffers,
            state_dict,
            self._executor.options.accumulate,
        )
        self._executor.finds_scale = False
        self._runner.drop_graphs()


_NO_TARGET: Any = ()


class TrainStep(Step):
    """A training step as one call: forward, loss, backward, check, clip, update, new loss scale.

    `step(x, y)` computes `loss_fn(model(x), y)` in the policy's precision, trains on it and returns
    the loss. A tuple or dict `x` is unpacked into the model, a tuple `y` into the loss function;
    without `y`, the loss function gets the model's output only. On CUDA the call is captured as a
    CUDA graph after a few warm-up calls, then replayed.

    Calls do not synchronize. Reading `optimizer.param_groups`, a state dict or `get_last_lr()`
    does, once after a call. A group kept from an earlier read (`group = optimizer.param_groups[0]`)
    shows an old learning rate: read `optimizer.param_groups` again.

    A captured step follows changes of inputs, shapes, train and eval modes, learning rates and
    other numbers of the optimizer's groups, and plain values that the loss function closes over.
    Other attributes of modules, such as a dropout's `p`, and Python values that a model reads keep
    the values they had at the capture.

    Args:
        model: The model. A plain model and its optimizer are decorated as by `mezzo.decorate`; if
            both are decorated, leave out `policy` and `overrides`.
        loss_fn: A function of the model's output and the target that returns the loss, a tensor
            with one element.
        optimizer: The optimizer of the model, or a list of several: `[muon, adamw]`.
        policy: A level such as `"O1"` (the default) or `"O2"`, a `mezzo.Policy`, or the path of a
            TOML file.
        scaler: A `mezzo.GradScaler`. None creates one if the dtype is float16; False uses none.
        clip_norm: Clip the unscaled gradients to this norm.
        grad_norm: Whether to compute the norm of the gradients for `metrics` without `clip_norm`
            too. On CUDA that is one more pass over the gradients, unless a scaler checks them.
        accumulate: Number of calls for each update; `flush()` updates from fewer.
        accumulate_reduction: `"mean"` averages the gradients of these calls, `"sum"` adds them.
        scheduler: A learning rate scheduler of the optimizer. It advances after each update that
            is not skipped. It must be one of torch's whose future values can be computed; step
            others, such as `ReduceLROnPlateau`, yourself.
        capture: `"auto"` captures if that is possible and not slower, and warns if not; True raises
            `UnsupportedError` if it is not possible; False always runs eagerly.
        compile: Whether to run the model through `torch.compile`.
        channels_last: `"auto"` converts a convolutional model on CUDA if the first batch shows that
            this is faster, True converts it, False does not. `channels_last_reason` is the reason.
        max_graphs: Kinds of inputs, such as sequence lengths, that CUDA graphs are kept for. Their
            graphs share one memory pool. Others run eagerly.
        **overrides: Fields of the policy to change, such as `dtype=`, `master=` or `keep_full=`.

    >>> import mezzo
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, "O2", dtype="bfloat16")
    >>> losses = [float(step(torch.ones(8, 4), torch.zeros(8, 2))) for _ in range(20)]
    >>> losses[-1] < losses[0], step.skipped
    (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: Optimizers,
        policy: PolicyArg | None = None,
        *,
        scaler: Scaler = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        accumulate_reduction: str | Reduction = Reduction.MEAN,
        scheduler: Schedulers = None,
        capture: str | bool | Capture = Capture.AUTO,
        grad_norm: bool = False,
        compile: bool = False,  # noqa: A002 - torch's name
        channels_last: str | bool | Layout = Layout.AUTO,
        max_graphs: int = MAX_GRAPHS,
        **overrides: Any,
    ) -> None:
        if not callable(loss_fn):
            raise PolicyError(
                f"loss_fn={loss_fn!r} cannot be called. Pass a function of the model's output and"
                " the target, such as nn.CrossEntropyLoss()."
            )
        calls, reduction = check_accumulate(accumulate), Reduction.parse(accumulate_reduction)
        layout = Layout.parse(channels_last)  # type: ignore[arg-type]
        capture = Capture.parse(capture)  # type: ignore[arg-type]
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self._precision = PrecisionArgs(policy, clip_norm, overrides, grad_norm)
        self._scheduler = scheduler
        self._layout = memory_format.decide(model, layout)
        self._forward: Any = _compile(model) if compile else model
        options = StepOptions(
            calls,
            reduction,
            closure_values=closure_values(loss_fn),
            casts_first_input=True,
            channels_last=bool(self._layout.channels_last),
            max_graphs=check_max_graphs(max_graphs),
        )
        with restored_on_error(model, optimizer):
            if layout is Layout.ON:
                memory_format.channels_last(model)
            components = prepare_components(model, optimizer, self._precision, scaler, scheduler)
            super().__init__(components, self._compute_loss, options, capture)
        if self._layout.channels_last is not None:
            self._emit_layout()

    def __call__(self, x: Any, y: Any = _NO_TARGET) -> torch.Tensor:
        """Train on one batch and return a copy of its loss. Does not synchronize."""
        args = (x,) if y is _NO_TARGET else (x, y)
        if self._layout.channels_last is None:
            self._measure_layout(args)
        loss: torch.Tensor = self._call(Call(args, {}))
        return loss

    def _compute_loss(
        self, x: Any, y: Any = _NO_TARGET, *, model: nn.Module | None = None
    ) -> torch.Tensor:
        """Run the forward pass and the loss function: the body of the step."""
        # The first update may run backward several times, which compiled code does not support.
        compiled = self.model if self._executor.finds_scale else self._forward
        forward = compiled if model is None else model
        if isinstance(x, dict):
            outputs = forward(**x)
        else:
            outputs = forward(*x) if isinstance(x, tuple) else forward(x)
        loss = self.loss_fn(outputs, *y) if isinstance(y, tuple) else self.loss_fn(outputs, y)
        if not isinstance(loss, torch.Tensor):
            raise PolicyError(
                f"The loss function returned {type(loss).__name__}, not a tensor. Return the loss"
                " itself, without .item()."
            )
        return loss

    # -- memory format -----------------------------------------------------------------------------

    @property
    def channels_last_reason(self) -> str:
        """Why the model is or is not converted to channels_last."""
        return self._layout.reason

    def _measure_layout(self, args: tuple[Any, ...]) -> None:
        """Choose the memory format by timing the first batch, before the first update."""
        region, device = self._components.region, self._components.device
        inputs = [move_inputs(args, device, channels_last=last) for last in (False, True)]

        def run(model: nn.Module, last: bool) -> torch.Tensor:  # noqa: FBT001
            with enter_regions(region):
                return self._compute_loss(*inputs[last], model=model)

        captured = self._capture is not Capture.OFF and self._runner.eager_reason is None
        self._layout = memory_format.measure(self.model, run, captured=captured)
        if self._layout.channels_last:
            self._build(self._convert_model(), replace(self._executor.options, channels_last=True))
        self._emit_layout()

    def _convert_model(self) -> StepComponents:
        """Convert the model to channels_last and decorate it again.

        Master weights and optimizer states take the memory format of the parameters.
        """
        scaler = self._components.scaler
        undecorate(self.model)
        memory_format.channels_last(self.model)
        return prepare_components(
            self.model, self.optimizer, self._precision, scaler or False, self._scheduler
        )

    def _emit_layout(self) -> None:
        if _events.listening():
            _events.emit(
                _events.LayoutChosen(bool(self._layout.channels_last), self._layout.reason)
            )


class FunctionStep(Step):
    """A training step whose body is a user's function; it is called like the function."""

    def __init__(
        self,
        body: Callable[..., Any],
        components: StepComponents,
        options: StepOptions,
        capture: Capture,
    ) -> None:
        super().__init__(components, body, options, capture)
        update_wrapper(self, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch and return detached copies of what the function returned."""
        return self._call(Call(args, kwargs))


def train_step(
    *,
    models: Models,
    optimizers: Optimizers,
    policy: PolicyArg | None = None,
    scaler: Scaler = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    accumulate_reduction: str | Reduction = Reduction.MEAN,
    scheduler: Schedulers = None,
    capture: str | bool | Capture = Capture.AUTO,
    max_graphs: int = MAX_GRAPHS,
    grad_norm: bool = False,
    **overrides: Any,
) -> Callable[[Callable[..., Any]], FunctionStep]:
    """Make a training step from a function that computes a loss; use as a decorator.

    The function returns the loss, and backward, update and scaling follow. Or it calls
    `loss.backward()` itself, any number of times, and returns anything. Then every optimizer whose
    parameters have gradients is stepped.

    To step an optimizer in the middle of the function, as GANs do, take `update` as the first
    parameter: `update(loss, optimizer)` computes gradients for the parameters of this optimizer
    only, and steps it.

        @mezzo.train_step(models=[generator, critic], optimizers=[of_generator, of_critic])
        def step(update, real, noise):
            fake = generator(noise)
            loss_critic = critic_loss(critic(real), critic(fake.detach()))
            update(loss_critic, of_critic)
            loss = generator_loss(critic(fake))
            update(loss, of_generator)
            return loss, loss_critic

    Args:
        models: The model, or a list of models. Plain models and optimizers are decorated; decorated
            ones must have been decorated together.
        optimizers: The optimizer, or a list of optimizers.
        policy: As for `TrainStep`, like all arguments below.
        scaler: A `mezzo.GradScaler`. None creates one if the dtype is float16; False uses none.
        clip_norm: Clip the unscaled gradients of each optimizer to this norm.
        grad_norm: Whether to compute the norm of all gradients without `clip_norm` too.
        accumulate: Number of calls for each update.
        accumulate_reduction: `"mean"` or `"sum"` of the gradients of these calls.
        scheduler: A learning rate scheduler, or a list with at most one for each optimizer.
        capture: Whether to capture the function as a CUDA graph: `"auto"`, True or False.
        max_graphs: Kinds of inputs that CUDA graphs are kept for.
        **overrides: Fields of the policy to change, such as `dtype=`.

    Returns:
        A decorator. The step it returns is called like the function.

    >>> import mezzo, torch
    >>> from torch import nn
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> @mezzo.train_step(models=model, optimizers=optimizer, policy="O1", dtype="bfloat16")
    ... def step(x):
    ...     return model(x).square().mean()
    >>> bool(step(torch.ones(8, 4)) > step(torch.ones(8, 4)))
    True
    """
    calls, reduction = check_accumulate(accumulate), Reduction.parse(accumulate_reduction)
    parsed_capture = Capture.parse(capture)  # type: ignore[arg-type]
    check_max_graphs(max_graphs)
    precision = PrecisionArgs(policy, clip_norm, overrides, grad_norm)

    def make(body: Callable[..., Any]) -> FunctionStep:
        takes_update = _takes_update(body)
        if takes_update and calls > 1:
            raise PolicyError(
                f"The function takes {_UPDATE!r}, which steps at once and cannot accumulate, got"
                f" accumulate={accumulate}. Use accumulate=1, or return the loss instead."
            )
        options = StepOptions(
            calls,
            reduction,
            custom_body=True,
            takes_update=takes_update,
            closure_values=closure_values(body),
            max_graphs=max_graphs,
        )
        with restored_on_error(models, optimizers):
            components = prepare_components(models, optimizers, precision, scaler, scheduler)
            return FunctionStep(body, components, options, parsed_capture)

    return make


_UPDATE = "update"
"""Name of a first parameter that receives the function which steps single optimizers."""


def _takes_update(body: Any) -> bool:
    """Check the body of a step; return whether its first parameter is `update`."""
    if not callable(body):
        raise PolicyError(
            f"train_step(...) decorates a function, got {body!r}. Write"
            " @mezzo.train_step(models=..., optimizers=...) above one."
        )
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
        raise PolicyError(
            f"{body.__name__} is a generator or a coroutine function, which does not run when it is"
            " called. Pass a plain function."
        )
    names = list(inspect.signature(body).parameters)
    return bool(names) and names[0] == _UPDATE


def check_accumulate(accumulate: int) -> int:
    """Return the number of calls for each update; raise `PolicyError` unless it is one."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise PolicyError(
            f"accumulate={accumulate!r} is not a number of calls for each update. Pass an integer"
            " of 1 or more."
        )
    return accumulate


def _compile(model: nn.Module) -> Any:
    # Imported here: Inductor is slow to import.
    from mezzo.step.inductor_pass import compiled  # noqa: PLC0415

    return compiled(model)
