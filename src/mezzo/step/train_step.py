"""`TrainStep` and `@train_step`: a whole training step as one call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from mezzo import _events
from mezzo._errors import PolicyError, UnsupportedError
from mezzo.autocasting.regions import enter_regions
from mezzo.prepare.arguments import Models, Optimizer, Optimizers
from mezzo.prepare.decorate import undecorate
from mezzo.prepare.ema import refused_while_lent
from mezzo.prepare.plan import PolicyArg
from mezzo.scaling.scaler import GradScaler
from mezzo.step import components, memory_format
from mezzo.step.capture import Runner, runner_for
from mezzo.step.components import (
    Capture,
    Layout,
    PrecisionArgs,
    Reduction,
    Scaler,
    Schedulers,
    StepComponents,
    prepare_components,
    restored_on_error,
)
from mezzo.step.executor import AccumulationPhase, Body, StepExecutor, StepOptions
from mezzo.step.inputs import closure_values, move_inputs
from mezzo.step.metrics import StepMetrics


class Step:
    """A training step over models and optimizers that are ready."""

    def __init__(
        self, parts: StepComponents, body: Body, rules: StepOptions, capture: Capture
    ) -> None:
        self._parts = parts
        self._engine = StepExecutor(parts, body, rules)
        self._runner: Runner = runner_for(self._engine, capture)
        self._capture = capture
        scaler = parts.scaler
        self._watches_scale = (
            scaler is not None
            and parts.region.computes_in is torch.float16
            and scaler.get_scale() >= 1.0
        )
        """Whether a loss scale below 1 is still to be reported."""
        self._position = 0
        """Calls since the last update."""
        self._updates = 0
        parts.decoration.training_steps.add(self)
        self._phases = [
            AccumulationPhase(place == 0, place + 1 == rules.accumulate)
            for place in range(rules.accumulate)
        ]

    # -- asking ------------------------------------------------------------------------------------

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, if there is one."""
        return self._parts.scaler

    @property
    def metrics(self) -> StepMetrics:
        """What is known of the last finished step. Nothing waits: on a GPU that may be a few steps ago."""
        return self._engine.metrics.read()

    @property
    def loss(self) -> float:
        """The loss of the last finished step."""
        return self.metrics.loss

    @property
    def skipped(self) -> bool:
        """Whether the last finished update was skipped."""
        return self.metrics.skipped

    @property
    def scale(self) -> float:
        """The loss scale after the last finished update; 1 without a scaler."""
        return self.metrics.scale

    @property
    def position(self) -> int:
        """Calls since the last update: 0 right after one, less than `accumulate`."""
        return self._position

    @property
    def captured(self) -> bool:
        """Whether steps are replayed as captured programs by now."""
        return self._runner.captured

    @property
    def eager_reason(self) -> str | None:
        """Why steps run eagerly, where they were to be captured."""
        return self._runner.reason

    # -- stepping ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Update from the calls since the last update, if there are any: the last batch of an epoch may be a partial one."""
        if self._position:
            self._refuse_lent("flush()")
            calls, self._position = self._position, 0
            self._runner.flush(calls)
            self._updated()

    def _call(self, arguments: tuple[Any, ...], words: dict[str, Any]) -> Any:
        if self._parts.decoration.lent:
            self._refuse_lent("The training step")
        phase = self._phases[self._position]
        returned = self._runner(arguments, words, phase)
        if phase.last:
            self._position = 0
            self._updated()
        else:
            self._position += 1
        self._engine.metrics.warn_if_nonfinite()
        if self._watches_scale:
            self._warn_of_a_small_scale()
        return returned

    def _warn_of_a_small_scale(self) -> None:
        """Warn once when skipped updates have brought the loss scale of a float16 run below 1."""
        scale, in_a_row = self._engine.metrics.scale_and_skips()
        if scale >= 1.0 or not in_a_row:
            return
        self._watches_scale = False
        name = self._runner.first_nonfinite()
        where = f"; the gradient of {name!r} is not finite" if name else ""
        warnings.warn(
            f"The loss scale fell to {scale:g}, below 1{where}. The gradients overflow float16"
            " without any scaling: look for a loss that is summed where it should be averaged, or"
            " use dtype='bfloat16'.",
            UserWarning,
            stacklevel=4,
        )

    def _refuse_lent(self, what: str) -> None:
        if self._parts.decoration.lent:
            raise UnsupportedError(refused_while_lent(what))

    def _updated(self) -> None:
        self._updates += 1
        self._engine.after_update()

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on to the bit: models, optimizers, scaler, schedulers, gradients so far, counters, random generators."""
        self._refuse_lent("state_dict() of a step")
        return components.step_state_dict(
            self._parts, self._engine.buffers, position=self._position, updates=self._updates
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, the random generators included."""
        self._refuse_lent("load_state_dict() of a step")
        self._position, self._updates = components.load_step_state(
            self._parts, self._engine.buffers, state_dict, self._engine.rules.accumulate
        )
        self._runner.forget()


_NOTHING: Any = ()


class TrainStep(Step):
    """Forward, loss, backward, check, clip, update, recast and new scale: one call, and on CUDA one captured program.

    `step(x, y)` computes `loss_fn(model(x), y)` in the policy's precision, trains on it and gives
    the loss. A tuple or a dict as `x` is unpacked into the model, a tuple as `y` into the loss;
    without `y` the loss function gets the model's output alone. A plain pair is decorated as the
    policy says, a decorated one brings its own.

    A scheduler advances after every update that is not skipped. It must be one of torch's whose
    coming values can be computed, which is checked here: step others, such as `ReduceLROnPlateau`,
    yourself. Calls never synchronize; reading `optimizer.param_groups`, a state dict or
    `get_last_lr()` does, once after a call. A group that is kept from an earlier read (`group =
    optimizer.param_groups[0]`) shows an old rate: read `optimizer.param_groups` again.

    A captured program sees new inputs, shapes, modes, rates and other numbers of the optimizer's
    groups, and plain values that the loss function refers to. Other attributes of modules, such as
    a dropout's `p`, and Python values that a model looks at are those of the capture.

    >>> import mezzo
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, "O2", dtype="bfloat16", clip_norm=1.0)
    >>> losses = [float(step(torch.ones(8, 4), torch.zeros(8, 2))) for _ in range(20)]
    >>> losses[-1] < losses[0], step.skipped
    (True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: Optimizer,
        policy: PolicyArg | None = None,
        *,
        scaler: Scaler = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        accumulate_reduction: str | Reduction = Reduction.MEAN,
        scheduler: Schedulers = None,
        capture: str | bool | Capture = Capture.AUTO,
        compile: bool = False,  # noqa: A002 - torch's word
        channels_last: str | bool | Layout = Layout.AUTO,
        **overrides: Any,
    ) -> None:
        if not callable(loss_fn):
            raise PolicyError(
                f"loss_fn={loss_fn!r} cannot be called. Pass a function of the model's output and"
                " the target, such as nn.CrossEntropyLoss()."
            )
        rules = StepOptions(count_of(accumulate), Reduction.parse(accumulate_reduction))
        self._asked, self._words = PrecisionArgs(policy, clip_norm, overrides), (scaler, scheduler)
        wanted = Layout.parse(channels_last)  # type: ignore[arg-type]
        capture = Capture.parse(capture)  # type: ignore[arg-type]
        self._layout = memory_format.decide(model, wanted)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self._called: Any = _compiled(model) if compile else model
        with restored_on_error(model, optimizer):
            if wanted is Layout.ON:
                memory_format.channels_last(model)
            super().__init__(
                prepare_components(model, optimizer, self._asked, scaler, scheduler),
                self._body,
                rules,
                capture,
            )
        self._engine.closure_values, self._engine.casts_first_input = closure_values(loss_fn), True
        self._engine.channels_last = bool(self._layout.channels_last)
        if self._layout.channels_last is not None:
            self._tell_layout()

    @property
    def channels_last_reason(self) -> str:
        """Why the model has its channels last, or has not."""
        return self._layout.reason

    def __call__(self, x: Any, y: Any = _NOTHING) -> torch.Tensor:
        """Train on a batch, and give its loss: a copy that is the caller's own."""
        arguments = (x,) if y is _NOTHING else (x, y)
        if self._layout.channels_last is None:
            self._measure_layout(arguments)
        loss: torch.Tensor = self._call(arguments, {})
        return loss

    def _body(self, x: Any, y: Any = _NOTHING) -> torch.Tensor:
        return self._loss(self._called, x, y)

    def _loss(self, model: Any, x: Any, y: Any = _NOTHING) -> torch.Tensor:
        if isinstance(x, dict):
            outputs = model(**x)
        else:
            outputs = model(*x) if isinstance(x, tuple) else model(x)
        loss = self.loss_fn(outputs, *y) if isinstance(y, tuple) else self.loss_fn(outputs, y)
        if not isinstance(loss, torch.Tensor):
            raise PolicyError(
                f"The loss function gave {type(loss).__name__}, not a tensor. Return the loss"
                " itself, without .item()."
            )
        return loss

    # -- layout ------------------------------------------------------------------------------------

    def _measure_layout(self, arguments: tuple[Any, ...]) -> None:
        """Decide by the first batch, before anything was trained."""
        region, inputs = (
            self._parts.region,
            [
                move_inputs(arguments, self._parts.device, channels_last=last)
                for last in (False, True)
            ],
        )

        def run(model: nn.Module, last: bool) -> torch.Tensor:  # noqa: FBT001
            with enter_regions(region):
                return self._loss(model, *inputs[last])

        self._layout = memory_format.measure(
            self.model,
            run,
            captured=self._capture is not Capture.OFF and self._runner.reason is None,
        )
        if self._layout.channels_last:
            self._rebuild(self._converted())
        self._tell_layout()

    def _converted(self) -> StepComponents:
        """The parts again, with the model converted: layouts come before exact weights."""
        undecorate(self.model)
        memory_format.channels_last(self.model)
        return prepare_components(
            self.model, self.optimizer, self._asked, self._parts.scaler or False, self._words[1]
        )

    def _rebuild(self, parts: StepComponents) -> None:
        seen, rules, capture = self._engine.closure_values, self._engine.rules, self._capture
        super().__init__(parts, self._body, rules, capture)
        self._engine.closure_values, self._engine.channels_last, self._engine.casts_first_input = (
            seen,
            True,
            True,
        )

    def _tell_layout(self) -> None:
        if _events.listening():
            _events.emit(
                _events.LayoutChosen(bool(self._layout.channels_last), self._layout.reason)
            )


def _compiled(model: nn.Module) -> Any:
    # Inductor takes a while to import.
    from mezzo.step.inductor_pass import compiled  # noqa: PLC0415

    return compiled(model)


def count_of(accumulate: int) -> int:
    """A number of calls, or an error."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise PolicyError(
            f"accumulate={accumulate!r}: it must be a number of calls for each update, 1 or more."
        )
    return accumulate


HANDLE = "update"
"""A body whose first parameter has this name is handed what updates single optimizers."""


class FunctionStep(Step):
    """A training step whose body is a function; called like the function."""

    def __init__(
        self, body: Callable[..., Any], parts: StepComponents, rules: StepOptions, capture: Capture
    ) -> None:
        super().__init__(parts, body, rules, capture)
        self._engine.closure_values = closure_values(body)
        update_wrapper(self, body)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, and give copies of what the body returns."""
        return self._call(args, kwargs)


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
    **overrides: Any,
) -> Callable[[Callable[..., Any]], FunctionStep]:
    """Make a training step of a function that computes a loss.

    The function returns the loss, and gradients, update and scaling follow; or it calls
    `loss.backward()` itself, as often as it likes, and returns what it likes. Every optimizer that
    got gradients is then stepped.

    >>> import mezzo, torch
    >>> from torch import nn
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> @mezzo.train_step(models=model, optimizers=optimizer, policy="O1", dtype="bfloat16")
    ... def step(x):
    ...     return model(x).square().mean()
    >>> bool(step(torch.ones(8, 4)) > step(torch.ones(8, 4)))
    True

    Where an optimizer is to step in the middle of the body, as those of a GAN, the function takes
    `update` first: `update(loss, optimizer)` computes gradients for the parameters of this
    optimizer alone, and steps it.

        @mezzo.train_step(models=[generator, critic], optimizers=[of_generator, of_critic])
        def step(update, real, noise):
            fake = generator(noise)
            loss_critic = critic_loss(critic(real), critic(fake.detach()))
            update(loss_critic, of_critic)
            loss = generator_loss(critic(fake))
            update(loss, of_generator)
            return loss, loss_critic
    """
    rules = (count_of(accumulate), Reduction.parse(accumulate_reduction))
    chosen = Capture.parse(capture)  # type: ignore[arg-type]

    def make(body: Callable[..., Any]) -> FunctionStep:
        handed = _takes_update(body)
        if handed and accumulate > 1:
            raise PolicyError(
                f"A body that takes {HANDLE!r} steps there and then, and accumulate={accumulate}"
                " would not. Return the loss instead."
            )
        with restored_on_error(models, optimizers):
            parts = prepare_components(
                models, optimizers, PrecisionArgs(policy, clip_norm, overrides), scaler, scheduler
            )
            return FunctionStep(
                body, parts, StepOptions(*rules, custom_body=True, takes_update=handed), chosen
            )

    return make


def _takes_update(body: Any) -> bool:
    if not callable(body):
        raise PolicyError(
            f"train_step(...) makes a step of a function, got {body!r}. Write"
            " @mezzo.train_step(models=..., optimizers=...) above it."
        )
    if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
        raise PolicyError(
            f"{body.__name__} is a generator or a coroutine, which runs on after it was called."
            " Pass a plain function."
        )
    names = list(inspect.signature(body).parameters)
    return bool(names) and names[0] == HANDLE
