"""One call of a step: what its body may do with losses, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mezzo._errors import ScalerError
from mezzo.autocasting.dynamo import inlined
from mezzo.autocasting.regions import Region, inside
from mezzo.prepare.given import Optimizer
from mezzo.scaling import replay
from mezzo.scaling.gradients import parameters
from mezzo.scaling.result import StepResult
from mezzo.step.parts import Parts


class Turn:
    """Backward and update, scaled and skipped as the parts say. A body that asks for it is handed this as its first argument, `update`.

    `update(loss, optimizer)` runs backward into the parameters of this optimizer alone, and steps it: what follows in the body sees the new weights.
    """

    def __init__(self, parts: Parts, *, factor: float, updates: bool) -> None:
        self._parts, self._factor, self._updates = parts, factor, updates
        self.loss: torch.Tensor | None = None
        """The last loss whose gradients were computed."""
        self.results: dict[Optimizer, StepResult | None] = {}
        """What came of the optimizers that were stepped; None where nobody looked at gradients."""

    def __call__(self, loss: torch.Tensor, optimizer: Optimizer, **words: Any) -> None:
        """Compute the gradients of a loss for an optimizer's parameters, and step it."""
        if optimizer not in self._parts.optimizers:
            raise ScalerError("update(loss, optimizer): this optimizer is not one of the step's. Pass it to train_step(optimizers=...).")
        if optimizer in self.results:
            raise ScalerError(f"update(loss, optimizer): this {type(optimizer).__name__} was stepped already in this call. Add the losses up, and update once.")
        if not self._updates:
            raise ScalerError("update(loss, optimizer) steps at once and cannot accumulate. Leave accumulate=1, or return the loss.")
        self.backward(loss, inputs=[one for one in parameters(optimizer) if one.requires_grad], **words)
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
            raise ScalerError(f"A loss is one number, got shape {tuple(loss.shape)}. Reduce it: loss.mean().")
        if not loss.requires_grad:
            raise ScalerError("The loss does not depend on any trained parameter. Compute it from the model's output, without detach() or no_grad().")
        self.loss = loss
        part = loss if self._factor == 1.0 else loss * self._factor
        scaler = self._parts.scaler
        if scaler is not None and gradient is None:
            gradient = replay.seed(scaler, part)
        elif scaler is not None:
            part = scaler.scale(part)
        with inside(_off(self._parts.region)):
            # Not `part.backward()`, which would come back here through the function mode of the body.
            torch.autograd.backward(part, gradient, retain_graph, create_graph, inputs=inputs)

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer, unless its gradients are not finite."""
        scaler = self._parts.scaler
        with _ours():
            if scaler is None:
                optimizer.step()
                self.results[optimizer] = None
            else:
                self.results[optimizer] = scaler.step(optimizer, scheduler=self._parts.schedulers.get(optimizer))

    def step_rest(self) -> None:
        """Step what has gradients and was not stepped yet, and adapt the scale."""
        for optimizer in self._parts.optimizers:
            if optimizer not in self.results and any(one.grad is not None for one in parameters(optimizer)):
                self.step(optimizer)
        if not self.results:
            raise ScalerError("No parameter of the step's optimizers got a gradient. Does the loss depend on the models?")
        if self._parts.scaler is not None:
            self._parts.scaler.update()

    def bad(self) -> torch.Tensor | bool:
        """Whether a step was skipped: on the device where only it knows."""
        known = [result for result in self.results.values() if result is not None]
        flags = [result.found for result in known if result.found is not None]
        # On a CPU the flag is here already, and what it decides need not be computed.
        if not flags or all(flag.device.type == "cpu" for flag in flags):
            return any(result.skipped for result in known)
        return flags[0] if len(flags) == 1 else torch.stack([flag.reshape(()) for flag in flags]).amax(0)


def _off(region: Region) -> Region:
    return Region(region.device, False, region.dtype, region.cache_enabled)


_stepping: set[int] = set()
"""Threads in which a step of ours steps an optimizer."""


@contextmanager
def _ours() -> Iterator[None]:
    _stepping.add(get_ident())
    try:
        yield
    finally:
        _stepping.discard(get_ident())


def refuse_other_steps(optimizer: Optimizer, arguments: Any, words: Any) -> None:  # noqa: ARG001 - the shape of a step hook
    """A hook of optimizers while a body runs: who steps by hand steps on scaled gradients."""
    if get_ident() not in _stepping:
        raise ScalerError(
            f"{type(optimizer).__name__}.step() was called in the body of a step, which steps by itself. Remove it, or call update(loss, optimizer) to step there and then."
        )


class ScaledBackward(TorchFunctionMode):
    """Let `loss.backward()` in the body of a step compute scaled gradients.

    A function mode acts in its own thread only, and `torch.Tensor` stays as it is. It costs 1.5 µs an op in bodies that
    run eagerly, and nothing in captured ones.
    """

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self._turn = turn

    @inlined
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.backward:
            return self._turn.backward(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)
