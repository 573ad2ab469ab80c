"""`EvalStep`: inference under a policy, captured as a CUDA graph where that is possible."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from mezzo._casting import map_tensors
from mezzo._errors import PolicyError
from mezzo._torch import dispatch_mode_count
from mezzo.policy.types import Level
from mezzo.prepare import arguments
from mezzo.prepare.decorate import decorate
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.keep_full import read_keep_full
from mezzo.prepare.plan import PolicyArg
from mezzo.prepare.sharding import is_sharded_model
from mezzo.step.capture_obstacles import warn_many_kinds, warn_not_captured
from mezzo.step.cuda_graph import CapturedGraph, CaptureFailed, GraphCapturer
from mezzo.step.input_kinds import MAX_GRAPHS, InputKind, InputKinds, check_max_graphs
from mezzo.step.inputs import (
    ModelArguments,
    UnsupportedInput,
    call_model,
    copy_outputs,
    format_shapes,
    move_inputs,
    signature,
)
from mezzo.step.model_structure import ModelStructure
from mezzo.step.options import Capture
from mezzo.step.replay_timing import ReplayTiming

_ADDRESS = methodcaller("data_ptr")
_NEEDS_GRADIENTS = re.compile(r"does not require grad|Inference tensors cannot")
"""Found in torch's messages about gradients that are computed without a graph."""
_WARM_UP = 2
"""Eager calls before the first capture, at least one of them with the inputs to capture."""
_CALL = "call"
"""Key of the only graph of each kind of inputs."""


def needs_gradients(error: RuntimeError) -> bool:
    """Return whether a model raised because it computes gradients itself, and had no graph."""
    return _NEEDS_GRADIENTS.search(str(error)) is not None


class EvalStep:
    """Inference as one call: the model in evaluation mode, without gradients.

    `evaluate(*args, **kwargs)` moves the inputs to the model's device, runs the model in the
    policy's precision and returns copies of its outputs. A mapping or dataclass that is the only
    argument is unpacked into keywords, a tuple into positional arguments, unless the model can only
    take it whole. Modules are in evaluation mode during the call only. On CUDA the call is captured
    as a CUDA graph after two calls, then replayed.

    `captured` and `eager_reason` show how calls run.

    Args:
        model: The model. A plain one is decorated as by `mezzo.decorate`; for a decorated one, such
            as that of a `TrainStep`, leave out `policy` and `overrides`.
        policy: A level such as `"O1"` (the default), a `mezzo.Policy`, or the path of a TOML file.
            O2 and O3, which make parameters 16-bit, need a model in evaluation mode.
        capture: `"auto"` captures if that is possible and not slower, and warns if not; True raises
            `UnsupportedError` if it is not possible; False always runs eagerly.
        max_graphs: Kinds of inputs, such as shapes, that CUDA graphs are kept for.
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
        max_graphs: int = MAX_GRAPHS,
        **overrides: Any,
    ) -> None:
        check_max_graphs(max_graphs)
        # Inference needs no gradients of other processes.
        model = arguments.unwrapped(model)
        self.model, self._arguments = model, ModelArguments(model)
        _prepare(model, policy, overrides)
        self.eager_reason: str | None = None
        """Why calls run eagerly although `capture` is not False; None if they are captured."""
        self._device = next(iter(model.parameters())).device
        self._capture = Capture.parse(capture)
        self._is_sharded = is_sharded_model((model,))
        # FSDP2 keeps the tensors that it gathers into, and backward cannot use inference tensors.
        self._contexts: list[Any] = [torch.no_grad, torch.enable_grad]
        """Contexts to run the model in. A model that computes gradients itself, as of an energy for
        forces, needs the second, or the third if it does not call `torch.enable_grad`."""
        if not self._is_sharded:
            self._contexts.insert(0, torch.inference_mode)
        # Of buffers it is the address that counts: see `_addresses`.
        self._structure = ModelStructure([model], with_buffers=False)
        self._buffers: list[tuple[dict[str, Any], str]] = []
        """Buffers of modules by name, except those that calls of this step assign."""
        self._inputs: InputKinds[CapturedGraph] = InputKinds(max_graphs)
        self._recapture_key: Hashable = None
        """Addresses of parameters and buffers at the captures."""
        self._warm_up_calls = 0
        self._warned_many = False
        self._capturer = self._make_capturer()
        if self._capturer is not None:
            self._buffers = self._capturer.assignments.other_buffers(model)

    def _make_capturer(self) -> GraphCapturer | None:
        if self._capture is Capture.OFF:
            return None
        if self._device.type != "cuda":
            self.eager_reason = f"the model is on {self._device.type}, which has no CUDA graphs"
            warn_not_captured(self.eager_reason, self._capture, quietly=True)
            return None
        if self._is_sharded:
            self.eager_reason = "the model is sharded over processes, which is not captured"
            warn_not_captured(self.eager_reason, self._capture)
            return None
        return GraphCapturer.on(self._device)

    @property
    def captured(self) -> bool:
        """Whether calls are replayed as CUDA graphs by now."""
        return self._inputs.has_graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model and return copies of its outputs."""
        return self._evaluate(self._arguments.arrange(args, kwargs))

    def __repr__(self) -> str:
        """Describe the step: model, precision and capture."""
        decoration = decoration_of(self.model)
        plan = None if decoration is None else decoration.plan
        level = "" if plan is None else f", {plan.policy.level.value}"
        if self._capture is Capture.OFF:
            how = "eager: capture=False"
        elif self.eager_reason is not None:
            how = f"eager: {self.eager_reason}"
        else:
            how = f"captured shapes: {self._inputs.graph_count}"
        return f"EvalStep({type(self.model).__name__}{level}, {how})"

    def _evaluate(self, inputs: Any) -> Any:
        """Run the model on inputs as `ModelArguments.arrange` returned them."""
        # A dispatch mode sees the ops that run, and a replay runs none.
        if self._capturer is None or self.eager_reason is not None or dispatch_mode_count():
            return self._run_eagerly(inputs)
        if self._structure.has_changed():
            self._drop_graphs(None)
            self._buffers = self._capturer.assignments.other_buffers(self.model)
        leaves: list[torch.Tensor] = []
        try:
            key = (signature(inputs, leaves), self._capturer.assignments.empty_places)
        except UnsupportedInput as error:
            self._give_up(
                f"an input of type {error} is neither a tensor, a list, a tuple, a mapping, a"
                " dataclass nor a hashable value"
            )
            return self._run_eagerly(inputs)
        recapture_key = self._addresses()
        if recapture_key != self._recapture_key:
            self._drop_graphs(recapture_key)
        kind = self._inputs.use(key, leaves)
        if self._inputs.exceed_limit and not self._warned_many:
            self._warned_many = True
            warn_many_kinds(self._inputs.limit, leaves)
        graph = kind.graphs.get(_CALL)
        if graph is None:
            return self._warm_up_or_capture(self._capturer, kind, inputs, leaves)
        if not graph.prepare():
            self._drop_graphs(recapture_key)
            return self._run_eagerly(inputs)
        return self._replay(kind, graph, leaves)

    def _addresses(self) -> tuple[int, ...]:
        """Return the addresses of parameters and buffers: training may assign other buffers."""
        buffers = [attributes.get(name) for attributes, name in self._buffers]
        return (
            *map(_ADDRESS, self._structure.parameters),
            *[0 if buffer is None else buffer.data_ptr() for buffer in buffers],
        )

    def _replay(
        self, kind: InputKind[CapturedGraph], graph: CapturedGraph, leaves: list[torch.Tensor]
    ) -> Any:
        timing = kind.timings[_CALL]
        returned = timing.time_replay(lambda: graph.replay(leaves))
        if timing.judges_slower() and self._capture is Capture.AUTO:
            kind.leave_eager(_CALL)
            if not (kind.graphs or self._inputs.are_others_captured(kind)):
                self._give_up(f"for inputs of shape {format_shapes(leaves)}, {timing.reason}")
        return returned

    def _warm_up_or_capture(
        self,
        capturer: GraphCapturer,
        kind: InputKind[CapturedGraph],
        inputs: Any,
        leaves: list[torch.Tensor],
    ) -> Any:
        if kind.is_eager:
            return self._run_eagerly(inputs)
        is_known = _CALL in kind.timings and self._inputs.are_settled
        if self._warm_up_calls < _WARM_UP or not is_known:
            self._warm_up_calls += 1
            if self._inputs.is_new_beyond_limit(kind):
                return self._run_eagerly(inputs)
            timing = kind.timings.setdefault(_CALL, ReplayTiming(self._device))
            with capturer.assignments.noting([self.model]):
                outputs = timing.time_eager(
                    lambda: capturer.run_on_capture_stream(lambda: self._run_eagerly(inputs))
                )
            self._buffers = capturer.assignments.other_buffers(self.model)
            return outputs
        if not self._inputs.has_room(kind):
            return self._run_eagerly(inputs)
        torch.cuda.synchronize(self._device)
        self._inputs.make_room()
        if self._inputs.is_largest(kind):
            self._inputs.drop_graphs()
        graph = self._try_capture(capturer, kind, inputs, leaves)
        if graph is None:
            return self._run_eagerly(inputs)
        kind.add_graph(_CALL, graph)
        return self._replay(kind, graph, leaves)

    def _try_capture(
        self,
        capturer: GraphCapturer,
        kind: InputKind[CapturedGraph],
        inputs: Any,
        leaves: list[torch.Tensor],
    ) -> CapturedGraph | None:
        """Capture a call; if that fails, return None: calls, or those of this kind, run eagerly."""
        reason, moved = "", move_inputs(inputs, self._device)
        # Models that read from the device only when they are not captured need the second attempt.
        for hides_capture in (True, False):
            try:
                return capturer.capture(
                    self._run, moved, models=[self.model], hides_capture=hides_capture
                )
            except CaptureFailed as failure:
                reason = str(failure)
        if self._inputs.are_others_captured(kind):
            kind.leave_eager()
            reason = f"for inputs of shape {format_shapes(leaves)}, {reason}"
            warn_not_captured(reason, self._capture)
        else:
            self._give_up(reason)
        return None

    def _run_eagerly(self, inputs: Any) -> Any:
        return copy_outputs(self._run(move_inputs(inputs, self._device)))

    def _run(self, inputs: Any) -> Any:
        context, *others = self._contexts
        try:
            with _evaluation_mode(self.model), context():
                outputs = call_model(self.model, inputs)
        except RuntimeError as error:
            if not others or not needs_gradients(error):
                raise
        else:
            is_graph_kept = context is torch.enable_grad
            return map_tensors(outputs, torch.Tensor.detach) if is_graph_kept else outputs
        self._contexts = others
        return self._run(inputs)

    def _drop_graphs(self, recapture_key: Hashable) -> None:
        """Drop captured graphs. This synchronizes if there are any, since they may be running."""
        if self._inputs.has_graphs:
            torch.cuda.synchronize(self._device)
        self._inputs.clear()
        self._recapture_key = recapture_key

    def _give_up(self, reason: str) -> None:
        """Run eagerly from now on, with a warning or, if capture=True, an error."""
        self.eager_reason = reason
        self._inputs.clear()
        warn_not_captured(reason, self._capture)


def _prepare(model: nn.Module, policy: PolicyArg | None, overrides: dict[str, Any]) -> None:
    """Decorate a plain model; check that a decorated one has the requested policy."""
    decoration = decoration_of(model)
    if decoration is not None and policy is None and not overrides:
        return
    requested = "O1" if policy is None else policy
    parsed = read_keep_full(requested, overrides, (model,))[0]
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
