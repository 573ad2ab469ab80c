"""`mezzo.EvalStep`: inference under a policy, captured where a device can replay it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from mezzo._errors import PolicyError
from mezzo.policy.types import Level
from mezzo.prepare import arguments
from mezzo.prepare.decorate import decorate
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.plan import PolicyArg
from mezzo.step.capture import MAX_GRAPHS, first_line, warn_full, warn_not_captured
from mezzo.step.components import Capture
from mezzo.step.cuda_graph import CapturedGraph, GraphCapturer, find_host_syncs
from mezzo.step.inputs import UnsupportedInput, copies, move_inputs, signature

_ADDRESS = methodcaller("data_ptr")
_WARM = 2


class EvalStep:
    """A model in evaluation mode and without gradients; what comes back are copies.

    The model's own mode is left as it is. A plain model is decorated as the policy says; a
    decorated one, such as that of a `TrainStep`, brings its own.

    >>> import mezzo
    >>> evaluate = mezzo.EvalStep(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), "O1", dtype="bfloat16")
    >>> evaluate(torch.ones(3, 4)).dtype
    torch.bfloat16
    """

    def __init__(
        self,
        model: nn.Module,
        policy: PolicyArg | None = None,
        *,
        capture: str | bool | Capture = Capture.AUTO,
        **overrides: Any,
    ) -> None:
        self.model = model
        _prepare(model, policy, overrides)
        self.eager_reason: str | None = None
        self._device = next(model.parameters()).device
        self._capture = Capture.parse(capture)  # type: ignore[arg-type]
        self._parameters = [*model.parameters(), *model.buffers()]
        self._programs: dict[Hashable, CapturedGraph] = {}
        self._warm: dict[Hashable, int] = {}
        self._ground: Hashable = None
        self._full = False
        self._studio = self._open()

    @property
    def captured(self) -> bool:
        """Whether programs are replayed by now."""
        return bool(self._programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        values: tuple[Any, Any] = (args, kwargs)
        if self._studio is None or self.eager_reason is not None:
            return self._eagerly(values)
        leaves: list[torch.Tensor] = []
        try:
            key = signature(values, leaves)
        except UnsupportedInput as error:
            self._give_up(
                f"an input of type {error} is neither a tensor, a list, a tuple, a dict nor a plain"
                " value"
            )
            return self._eagerly(values)
        ground = tuple(map(_ADDRESS, self._parameters))
        if ground != self._ground:
            self._forget(ground)
        program = self._programs.get(key)
        return (
            self._learn(self._studio, key, values, leaves)
            if program is None
            else program.replay(leaves)
        )

    def _learn(
        self,
        studio: GraphCapturer,
        key: Hashable,
        values: tuple[Any, Any],
        leaves: list[torch.Tensor],
    ) -> Any:
        done = self._warm.get(key, 0)
        if len(self._programs) >= MAX_GRAPHS:
            self._full = self._full or warn_full(leaves, MAX_GRAPHS)
            return self._eagerly(values)
        if done < _WARM:
            self._warm[key] = done + 1
            with find_host_syncs() as found:
                returned = studio.run_on_capture_stream(lambda: self._eagerly(values))
            if found and done:
                self._give_up(f"the host reads from the device in {found[0]}")
            return returned
        try:
            self._programs[key] = program = studio.capture(
                self._run, move_inputs(values, self._device), leaves
            )
        # Whatever a model does that cannot be captured: it is told, and the call runs eagerly.
        except Exception as error:  # noqa: BLE001
            self._give_up(first_line(error))
            return self._eagerly(values)
        return program.replay(leaves)

    def _run(self, values: tuple[Any, Any]) -> Any:
        args, kwargs = values
        with _evaluating(self.model), torch.inference_mode():
            return self.model(*args, **kwargs)

    def _eagerly(self, values: tuple[Any, Any]) -> Any:
        return copies(self._run(move_inputs(values, self._device)))

    def _open(self) -> GraphCapturer | None:
        if self._capture is Capture.OFF:
            return None
        if self._device.type != "cuda":
            self.eager_reason = f"the model is on {self._device.type}, which captures nothing"
            warn_not_captured(self.eager_reason, self._capture, quietly=True)
            return None
        return GraphCapturer.on(self._device)

    def _forget(self, ground: Hashable) -> None:
        if self._programs and self._studio is not None:
            torch.cuda.synchronize(self._device)
            self._studio = self._studio.emptied()
        self._programs.clear()
        self._ground = ground

    def _give_up(self, reason: str) -> None:
        self.eager_reason = reason
        self._programs.clear()
        warn_not_captured(reason, self._capture)


def _prepare(model: nn.Module, policy: PolicyArg | None, overrides: dict[str, Any]) -> None:
    found = decoration_of(model)
    if found is None:
        words = "O1" if policy is None else policy
        converts = arguments.read_keep_full(words, overrides, (model,))[0].level in (
            Level.O2,
            Level.O3,
        )
        if converts and model.training:
            raise PolicyError(
                "EvalStep would turn the parameters of a model in training mode into 16 bits for"
                " good. Call model.eval() first, or decorate it."
            )
        decorate(model, None, words, **overrides)
    elif policy is not None or overrides:
        read = arguments.read_keep_full("O1" if policy is None else policy, overrides, (model,))[0]
        if read != found.plan.policy:
            raise PolicyError(
                f"The model was decorated with {found.plan.policy!r}, and the step was given"
                f" {read!r}. Leave the policy out: the model brings its own."
            )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
