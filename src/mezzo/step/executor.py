"""One call of a step: forward, scaled backward, update."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from mezzo._casting import cast_all
from mezzo._errors import ScalerError
from mezzo._torch import foreach_mul_, foreach_zero_
from mezzo.autocasting.dynamo import skip_frame
from mezzo.autocasting.regions import Region, enter_regions
from mezzo.prepare.arguments import Optimizer
from mezzo.scaling import capture
from mezzo.scaling.gradients import parameters
from mezzo.scaling.optimizer_step import advance
from mezzo.scaling.step_result import StepResult
from mezzo.step.components import Reduction, StepComponents
from mezzo.step.inputs import move_inputs
from mezzo.step.metrics import MetricsBuffer
from mezzo.step.module_buffers import BatchCounters, ModuleBuffers


class StepContext:
    """Backward and update, scaled and skipped as the parts say. A body that asks for it is handed this as its first argument, `update`.

    `update(loss, optimizer)` runs backward into the parameters of this optimizer alone, and steps
    it: what follows in the body sees the new weights.
    """

    def __init__(self, parts: StepComponents, *, factor: float, updates: bool) -> None:
        self._parts, self._factor, self._updates = parts, factor, updates
        self.loss: torch.Tensor | None = None
        """The last loss whose gradients were computed."""
        self.results: dict[Optimizer, StepResult | None] = {}
        """What came of the optimizers that were stepped; None where nobody looked at gradients."""

    def __call__(self, loss: torch.Tensor, optimizer: Optimizer, **words: Any) -> None:
        """Compute the gradients of a loss for an optimizer's parameters, and step it."""
        if optimizer not in self._parts.optimizers:
            raise ScalerError(
                "update(loss, optimizer): this optimizer is not one of the step's. Pass it to"
                " train_step(optimizers=...)."
            )
        if optimizer in self.results:
            raise ScalerError(
                f"update(loss, optimizer): this {type(optimizer).__name__} was stepped already in"
                " this call. Add the losses up, and update once."
            )
        if not self._updates:
            raise ScalerError(
                "update(loss, optimizer) steps at once and cannot accumulate. Leave accumulate=1,"
                " or return the loss."
            )
        self.backward(
            loss, inputs=[one for one in parameters(optimizer) if one.requires_grad], **words
        )
        self.step(optimizer)
        optimizer.zero_grad(set_to_none=True)

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,  # noqa: FBT001 - the shape of Tensor.backward
        create_graph: bool = False,  # noqa: FBT001, FBT002
        inputs: Any = None,
    ) -> None:
        """Compute scaled gradients, with the arguments of `Tensor.backward`.

        Outside the autocast region: backward runs in the precision of the forward pass by itself.
        """
        if loss.numel() != 1:
            raise ScalerError(
                f"A loss is one number, got shape {tuple(loss.shape)}. Reduce it: loss.mean()."
            )
        if not loss.requires_grad:
            raise ScalerError(
                "The loss does not depend on any trained parameter. Compute it from the model's"
                " output, without detach() or no_grad()."
            )
        self.loss = loss
        part = loss if self._factor == 1.0 else loss * self._factor
        scaler = self._parts.scaler
        if scaler is not None and gradient is None:
            gradient = capture.backward_seed(scaler, part)
        elif scaler is not None:
            part = scaler.scale(part)
        with enter_regions(_off(self._parts.region)):
            # Not `part.backward()`, which would come back here through the function mode of the
            # body.
            torch.autograd.backward(part, gradient, retain_graph, create_graph, inputs=inputs)

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer, unless its gradients are not finite."""
        scaler = self._parts.scaler
        with _stepping_here():
            if scaler is None:
                optimizer.step()
                self.results[optimizer] = None
            else:
                self.results[optimizer] = scaler.step(
                    optimizer, scheduler=self._parts.schedulers.get(optimizer)
                )

    def step_rest(self) -> None:
        """Step what has gradients and was not stepped yet, and adapt the scale."""
        for optimizer in self._parts.optimizers:
            if optimizer not in self.results and any(
                one.grad is not None for one in parameters(optimizer)
            ):
                self.step(optimizer)
        if not self.results:
            raise ScalerError(
                "No parameter of the step's optimizers got a gradient. Does the loss depend on the"
                " models?"
            )
        if self._parts.scaler is not None:
            self._parts.scaler.update()

    def found_nonfinite(self) -> torch.Tensor | bool:
        """Whether a step was skipped: on the device where only it knows."""
        known = [result for result in self.results.values() if result is not None]
        flags = [result.found_inf for result in known if result.found_inf is not None]
        # On a CPU the flag is here already, and what it decides need not be computed.
        if not flags or all(flag.device.type == "cpu" for flag in flags):
            return any(result.skipped for result in known)
        return (
            flags[0]
            if len(flags) == 1
            else torch.stack([flag.reshape(()) for flag in flags]).amax(0)
        )


def _off(region: Region) -> Region:
    return Region(region.device, False, region.dtype, region.cache_enabled)


_stepping: set[int] = set()
"""Threads in which a step of ours steps an optimizer."""


@contextmanager
def _stepping_here() -> Iterator[None]:
    _stepping.add(get_ident())
    try:
        yield
    finally:
        _stepping.discard(get_ident())


# The shape of a step hook.
def refuse_other_steps(optimizer: Optimizer, arguments: Any, words: Any) -> None:  # noqa: ARG001
    """A hook of optimizers while a body runs: who steps by hand steps on scaled gradients."""
    if get_ident() not in _stepping:
        raise ScalerError(
            f"{type(optimizer).__name__}.step() was called in the body of a step, which steps by"
            " itself. Remove it, or call update(loss, optimizer) to step there and then."
        )


class ScaledBackward(TorchFunctionMode):
    """Let `loss.backward()` in the body of a step compute scaled gradients.

    A function mode acts in its own thread only, and `torch.Tensor` stays as it is. It costs 1.5 µs
    an op in bodies that run eagerly, and nothing in captured ones.
    """

    def __init__(self, turn: StepContext) -> None:
        super().__init__()
        self._turn = turn

    @skip_frame
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.backward:
            return self._turn.backward(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


Body = Callable[..., Any]


@dataclass(frozen=True)
class StepOptions:
    """How calls become updates."""

    accumulate: int
    """Calls for each update."""
    reduction: Reduction
    custom_body: bool = False
    """Whether the body is a user's own: it may call backward by itself."""
    takes_update: bool = False
    """Whether the body asks for `update`."""

    @property
    def factor(self) -> float:
        """What a loss is multiplied by."""
        return 1.0 / self.accumulate if self.reduction is Reduction.MEAN else 1.0


class AccumulationPhase(NamedTuple):
    """Where a call stands among those that make up one update."""

    first: bool
    last: bool


class StepExecutor:
    """Runs the body of a step and what follows it."""

    def __init__(self, parts: StepComponents, body: Body, rules: StepOptions) -> None:
        self.parts, self.rules = parts, rules
        self._body = body
        self.casts_first_input = False
        """Whether the first argument goes to a model and nowhere else."""
        self.channels_last = False
        """Whether the model has its channels last, and images are to have them too."""
        self.buffers = ModuleBuffers(parts.models if parts.scaler is not None else ())
        self._tallies = BatchCounters(parts.models)
        self.metrics = MetricsBuffer(parts.device, parts.scaler)
        self.closure_values: Callable[[], Hashable] = tuple
        """Values beside the inputs that a body sees, and that a captured one would not see
        change."""
        self.results: Iterable[StepResult | None] = ()
        """Of the last eager update."""
        self.had: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters with the gradients of the last update, where these are wanted."""
        self.wants_gradients = False
        self.static: list[torch.Tensor] = []
        """Gradients that stay where they are from update to update; empty where each backward
        makes its own."""

    def place(self, values: tuple[Any, ...]) -> tuple[Any, Any]:
        """Arguments and words on the device of the models, in their layout."""
        moved: tuple[Any, Any] = move_inputs(
            values, self.parts.device, channels_last=self.channels_last
        )
        return moved

    def entering(self, values: tuple[Any, Any]) -> tuple[Any, Any]:
        """Inputs of the device as a captured step holds them: what the model would cast first is cast by the copy that brings it, in one pass."""
        if not self.casts_first_input or self.parts.input_dtype is None:
            return values
        (first, *rest), words = values
        return (cast_all(first, self.parts.input_dtype, self.parts.device.type), *rest), words

    def run(
        self,
        arguments: tuple[Any, ...],
        words: dict[str, Any],
        phase: AccumulationPhase,
        mode: Hashable,
    ) -> Any:
        """One call, whole."""
        if phase.first:
            self.buffers.save(mode)
        turn = StepContext(self.parts, factor=self.rules.factor, updates=self.rules.accumulate == 1)
        returned = self._compute(turn, arguments, words)
        self.buffers.look()
        bad = self._update(turn) if phase.last else None
        self.metrics.write(turn.loss, bad)
        return returned

    def compute_gradients(self, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        """Run the body and its scaled backward pass alone: gradients are added to what is there, nothing is updated."""
        self._compute(
            StepContext(self.parts, factor=self.rules.factor, updates=False), arguments, words
        )

    def flush(self, calls: int) -> None:
        """Update from fewer calls than usual."""
        turn = StepContext(self.parts, factor=1.0, updates=True)
        if self.rules.reduction is Reduction.MEAN:
            gradients = [
                one.grad
                for optimizer in self.parts.optimizers
                for one in parameters(optimizer)
                if one.grad is not None
            ]
            foreach_mul_(gradients, self.rules.accumulate / calls)
        self.metrics.write(None, self._update(turn))

    def after_update(self) -> None:
        """What the host does after an update: schedulers that no scaler steps."""
        if self.parts.scaler is None:
            for optimizer, scheduler in self.parts.schedulers.items():
                advance(optimizer, scheduler)

    def clear(self) -> None:
        """Forget the gradients."""
        if self.static:
            foreach_zero_(self.static)
        else:
            for optimizer in self.parts.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def _compute(self, turn: StepContext, arguments: tuple[Any, ...], words: dict[str, Any]) -> Any:
        handed = (turn, *arguments) if self.rules.takes_update else arguments
        with ExitStack() as around:
            if self.rules.custom_body:
                around.enter_context(ScaledBackward(turn))
                for optimizer in self.parts.optimizers:
                    around.callback(optimizer.register_step_pre_hook(refuse_other_steps).remove)
            around.enter_context(self._tallies.counting())
            around.enter_context(enter_regions(self.parts.region))
            around.enter_context(
                torch.enable_grad() if not torch.is_grad_enabled() else nullcontext()
            )
            returned = self._body(*handed, **words)
        if turn.loss is None:
            if not isinstance(returned, torch.Tensor):
                raise ScalerError(
                    f"A step's loss is a tensor, got {type(returned).__name__}. Return the loss, or"
                    " call loss.backward() in the body and return what you like."
                )
            turn.backward(returned)
        return returned

    def _update(self, turn: StepContext) -> torch.Tensor | bool:
        if self.wants_gradients:
            every = (one for optimizer in self.parts.optimizers for one in parameters(optimizer))
            self.had = [(one, one.grad) for one in every if one.grad is not None]
        turn.step_rest()
        self.results = turn.results.values()
        self.clear()
        bad = turn.found_nonfinite()
        self.buffers.restore(bad)
        return bad
