"""`EvalStep`: inference under a policy, captured as a CUDA graph where that is possible."""

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
from mezzo.step.capture import MAX_GRAPHS, root_cause, warn_full, warn_not_captured
from mezzo.step.components import Capture
from mezzo.step.cuda_graph import CapturedGraph, GraphCapturer, find_host_syncs
from mezzo.step.inputs import Call, UnsupportedInput, copy_outputs, move_inputs, signature

_ADDRESS = methodcaller("data_ptr")
_WARM_UP = 2
"""Eager calls before a capture."""


class EvalStep:
    """Inference as one call: the model in evaluation mode, without gradients.

    `evaluate(*args, **kwargs)` moves the inputs to the model's device, runs the model in the
    policy's precision and returns copies of its outputs. Modules are in evaluation mode during the
    call only. On CUDA the call is captured as a CUDA graph after two calls, then replayed.

    `captured` and `eager_reason` show how calls run.

    Args:
        model: The model. A plain one is decorated as by `mezzo.decorate`; for a decorated one, such
            as that of a `TrainStep`, leave out `policy` and `overrides`.
        policy: A level such as `"O1"` (the default), a `mezzo.Policy`, or the path of a TOML file.
            O2 and O3, which make parameters 16-bit, need a model in evaluation mode.
        capture: `"auto"` captures if possible and warns if not, True raises `UnsupportedError`
            instead, False always runs eagerly.
        **overrides: Fields of the policy to change, such as `dtype=`.

    >>> import mezzo
    >>> model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    >>> evaluate = mezzo.EvalStep(model, "O1", dtype="bfloat16")
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
        """Why calls run eagerly although `capture` is not False; None if they are captured."""
        self._device = next(iter(model.parameters())).device
        self._capture = Capture.parse(capture)  # type: ignore[arg-type]
        self._tensors = [*model.parameters(), *model.buffers()]
        self._graphs: dict[Hashable, CapturedGraph] = {}
        self._warm_up_calls: dict[Hashable, int] = {}
        self._recapture_key: Hashable = None
        """Addresses of parameters and buffers at the captures."""
        self._warned_full = False
        self._capturer = self._make_capturer()

    def _make_capturer(self) -> GraphCapturer | None:
        if self._capture is Capture.OFF:
            return None
        if self._device.type != "cuda":
            self.eager_reason = f"the model is on {self._device.type}, which has no CUDA graphs"
            warn_not_captured(self.eager_reason, self._capture, quietly=True)
            return None
        return GraphCapturer.on(self._device)

    @property
    def captured(self) -> bool:
        """Whether calls are replayed as CUDA graphs by now."""
        return bool(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model and return copies of its outputs."""
        call = Call(args, kwargs)
        if self._capturer is None or self.eager_reason is not None:
            return self._run_eagerly(call)
        leaves: list[torch.Tensor] = []
        try:
            key = signature(call, leaves)
        except UnsupportedInput as error:
            self._give_up(
                f"an input of type {error} is neither a tensor, a list, a tuple, a dict nor a"
                " hashable value"
            )
            return self._run_eagerly(call)
        recapture_key = tuple(map(_ADDRESS, self._tensors))
        if recapture_key != self._recapture_key:
            self._drop_graphs(recapture_key)
        graph = self._graphs.get(key)
        if graph is None:
            return self._warm_up_or_capture(self._capturer, key, call, leaves)
        return graph.replay(leaves)

    def _warm_up_or_capture(
        self, capturer: GraphCapturer, key: Hashable, call: Call, leaves: list[torch.Tensor]
    ) -> Any:
        done = self._warm_up_calls.get(key, 0)
        if len(self._graphs) >= MAX_GRAPHS:
            self._warned_full = self._warned_full or warn_full(leaves)
            return self._run_eagerly(call)
        if done < _WARM_UP:
            self._warm_up_calls[key] = done + 1
            with find_host_syncs() as lines:
                returned = capturer.run_on_capture_stream(lambda: self._run_eagerly(call))
            # Not in the first call, when a kernel is chosen or code is compiled.
            if lines and done:
                self._give_up(f"the host reads from the device in {lines[0]}")
            return returned
        try:
            self._graphs[key] = graph = capturer.capture(self._run, move_inputs(call, self._device))
        # Any error: a model may do anything that cannot be captured. The call then runs eagerly.
        except Exception as error:  # noqa: BLE001
            self._give_up(root_cause(error))
            return self._run_eagerly(call)
        return graph.replay(leaves)

    def _run_eagerly(self, call: Call) -> Any:
        return copy_outputs(self._run(move_inputs(call, self._device)))

    def _run(self, call: Call) -> Any:
        with _evaluation_mode(self.model), torch.inference_mode():
            return self.model(*call.args, **call.kwargs)

    def _drop_graphs(self, recapture_key: Hashable) -> None:
        """Drop captured graphs. This synchronizes if there are any, since they may be running."""
        if self._graphs and self._capturer is not None:
            torch.cuda.synchronize(self._device)
            self._capturer = self._capturer.with_new_pool()
        self._graphs.clear()
        self._recapture_key = recapture_key

    def _give_up(self, reason: str) -> None:
        """Run eagerly from now on, with a warning or, if capture=True, an error."""
        self.eager_reason = reason
        self._graphs.clear()
        warn_not_captured(reason, self._capture)


def _prepare(model: nn.Module, policy: PolicyArg | None, overrides: dict[str, Any]) -> None:
    """Decorate a plain model; check that a decorated one has the requested policy."""
    decoration = decoration_of(model)
    if decoration is not None and policy is None and not overrides:
        return
    requested = "O1" if policy is None else policy
    parsed = arguments.read_keep_full(requested, overrides, (model,))[0]
    if decoration is None:
        if parsed.level in (Level.O2, Level.O3) and model.training:
            raise PolicyError(
                f"EvalStep at {parsed.level.value} would make the parameters of a model in training"
                " mode 16-bit permanently. Call model.eval() first, or decorate it with its"
                " optimizer."
            )
        decorate(model, None, requested, **overrides)
    elif parsed != decoration.plan.policy:
        raise PolicyError(
            f"The model was decorated with {decoration.plan.policy!r}, but the step was given"
            f" {parsed!r}. Leave the policy out to use the model's."
        )


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and restore the mode of each at the end."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
