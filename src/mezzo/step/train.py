"""`mezzo.TrainStep`: the whole training step in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mezzo import _events
from mezzo._errors import PolicyError
from mezzo.autocasting.regions import inside
from mezzo.prepare.decorate import undecorate
from mezzo.prepare.given import Optimizer
from mezzo.prepare.plan import PolicyWords
from mezzo.step import layout
from mezzo.step.base import Step
from mezzo.step.engine import Rules
from mezzo.step.inputs import placed
from mezzo.step.parts import Asked, Parts, Scaler, Schedulers, gather, restored_on_error
from mezzo.step.seen import values_seen
from mezzo.step.words import Capture, Layout, Reduction

_NOTHING: Any = ()


class TrainStep(Step):
    """Forward, loss, backward, check, clip, update, recast and new scale: one call, and on CUDA one captured program.

    `step(x, y)` computes `loss_fn(model(x), y)` in the policy's precision, trains on it and gives the loss. A tuple or a dict as `x` is unpacked into the
    model, a tuple as `y` into the loss; without `y` the loss function gets the model's output alone. A plain pair is decorated as the policy says, a decorated
    one brings its own.

    A scheduler advances after every update that is not skipped. It must be one of torch's whose coming values can be computed, which is checked here: step others,
    such as `ReduceLROnPlateau`, yourself. Calls never synchronize; reading `optimizer.param_groups`, a state dict or `get_last_lr()` does, once after a call.
    A group that is kept from an earlier read (`group = optimizer.param_groups[0]`) shows an old rate: read `optimizer.param_groups` again.

    A captured program sees new inputs, shapes, modes, rates and other numbers of the optimizer's groups, and plain values that the loss function refers to.
    Other attributes of modules, such as a dropout's `p`, and Python values that a model looks at are those of the capture.

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
        policy: PolicyWords | None = None,
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
            raise PolicyError(f"loss_fn={loss_fn!r} cannot be called. Pass a function of the model's output and the target, such as nn.CrossEntropyLoss().")
        rules = Rules(count_of(accumulate), Reduction.parse(accumulate_reduction))
        self._asked, self._words = Asked(policy, clip_norm, overrides), (scaler, scheduler)
        wanted = Layout.parse(channels_last)  # type: ignore[arg-type]
        capture = Capture.parse(capture)  # type: ignore[arg-type]
        self._layout = layout.decide(model, wanted)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self._called: Any = _compiled(model) if compile else model
        with restored_on_error(model, optimizer):
            if wanted is Layout.ON:
                layout.channels_last(model)
            super().__init__(gather(model, optimizer, self._asked, scaler, scheduler), self._body, rules, capture)
        self._engine.seen, self._engine.first_enters = values_seen(loss_fn), True
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
            raise PolicyError(f"The loss function gave {type(loss).__name__}, not a tensor. Return the loss itself, without .item().")
        return loss

    # -- layout ----------------------------------------------------------------------------------------------------------------------------------

    def _measure_layout(self, arguments: tuple[Any, ...]) -> None:
        """Decide by the first batch, before anything was trained."""
        region, inputs = self._parts.region, [placed(arguments, self._parts.device, channels_last=last) for last in (False, True)]

        def run(model: nn.Module, last: bool) -> torch.Tensor:  # noqa: FBT001
            with inside(region):
                return self._loss(model, *inputs[last])

        self._layout = layout.measure(self.model, run, captured=self._capture is not Capture.OFF and self._runner.reason is None)
        if self._layout.channels_last:
            self._rebuild(self._converted())
        self._tell_layout()

    def _converted(self) -> Parts:
        """The parts again, with the model converted: layouts come before exact weights."""
        undecorate(self.model)
        layout.channels_last(self.model)
        return gather(self.model, self.optimizer, self._asked, self._parts.scaler or False, self._words[1])

    def _rebuild(self, parts: Parts) -> None:
        seen, rules, capture = self._engine.seen, self._engine.rules, self._capture
        super().__init__(parts, self._body, rules, capture)
        self._engine.seen, self._engine.channels_last, self._engine.first_enters = seen, True, True

    def _tell_layout(self) -> None:
        if _events.listening():
            _events.emit(_events.LayoutChosen(bool(self._layout.channels_last), self._layout.reason))


def _compiled(model: nn.Module) -> Any:
    from mezzo.step.compiled import compiled  # noqa: PLC0415 - Inductor takes a while to import

    return compiled(model)


def count_of(accumulate: int) -> int:
    """A number of calls, or an error."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise PolicyError(f"accumulate={accumulate!r}: it must be a number of calls for each update, 1 or more.")
    return accumulate
