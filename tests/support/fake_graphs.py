"""CUDA graphs that run the captured function again: a CPU cannot capture."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.step import captured_step, replay_timing
from mezzo.step.assigned_tensors import Assignments
from mezzo.step.capture_runner import CaptureRunner
from mezzo.step.cuda_graph import CaptureFailed, GraphPool, HostDrawsFound
from mezzo.step.executor import StepExecutor
from mezzo.step.inputs import Call, copy_outputs, make_static_buffers
from mezzo.step.options import Capture


class FakeGraph:
    """Runs the captured function on every replay.

    The first time it runs at the capture, which its first replay follows: what a capture raises is
    raised, and gradients of later replays are written to the memory of the first ones.

    A broken one sets the last input to infinity, as a graph that reads the wrong memory might.
    """

    def __init__(
        self,
        run: Callable[[Call], Any],
        call: Call,
        executor: StepExecutor | None = None,
        *,
        broken: bool = False,
    ) -> None:
        self._run_captured, self._executor, self._broken = run, executor, broken
        self._values, self.inputs = make_static_buffers(call)
        self.replays = 0
        before = [(parameter, grad, grad.clone()) for parameter, grad in self._new_gradients()]
        try:
            self._first = self._run()
        except Exception as error:
            for parameter, _ in self._new_gradients():
                parameter.grad = None
            for parameter, gradient, values in before:
                parameter.grad = gradient
                if not torch.equal(gradient, values):
                    gradient.copy_(values)
            raise CaptureFailed(str(error)) from error
        self._gradients = [] if self._has_static() else self._new_gradients()

    def replay(self, leaves: list[torch.Tensor]) -> Any:
        self.replays += 1
        if self.replays == 1:
            return self._first
        torch._foreach_copy_(self.inputs, leaves)
        returned = self._run()
        fresh = [] if self._has_static() else self._new_gradients()
        for (parameter, memory), (_, gradient) in zip(self._gradients, fresh, strict=True):
            parameter.grad = memory.copy_(gradient)
        return returned

    def _run(self) -> Any:
        if self._broken:
            self.inputs[-1].fill_(float("inf"))
        return copy_outputs(self._run_captured(self._values))

    def _new_gradients(self) -> list[Any]:
        return [] if self._executor is None else self._executor.gradients()

    def _has_static(self) -> bool:
        return self._executor is not None and self._executor.static_gradients.exist


class DeferredGraph(FakeGraph):
    """Runs the captured function at replays only, as a graph with collectives does."""

    def __init__(self, run: Callable[[Call], Any], call: Call) -> None:
        self._run_captured, self._executor, self._broken = run, None, False
        self._values, self.inputs = make_static_buffers(call)
        self.replays = 0

    def replay(self, leaves: list[torch.Tensor]) -> Any:
        self.replays += 1
        torch._foreach_copy_(self.inputs, leaves)
        return self._run()


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a step holds of a fake graph: a graph is gone when no step holds it any more."""

    graph: FakeGraph

    @property
    def inputs(self) -> list[torch.Tensor]:
        return self.graph.inputs

    def prepare(self) -> bool:
        return True

    def replay(self, leaves: list[torch.Tensor]) -> Any:
        return self.graph.replay(leaves)


@dataclass
class FakeCapturer:
    """Replaces `GraphCapturer`."""

    graphs: list[FakeGraph] = field(default_factory=list)
    warm_ups: int = 0
    reports: list[bool] = field(default_factory=list)
    """`hides_capture` of each attempt."""
    draws: bool = False
    """Whether attempts fail that do not record draws on the host."""
    fails: bool = False
    failure: str = "the root cause"
    fails_for_calls: bool = False
    """Whether only captures of updates succeed."""
    fails_as_eager: bool = False
    """Whether attempts fail in which the capture is hidden from the model."""
    broken: bool = False
    reads: tuple[str, ...] = ()
    """Lines that read from the device in warm-up calls."""
    defers: bool = False
    """Whether captures do not run the function."""
    executor: StepExecutor | None = None
    pool: GraphPool = field(default_factory=GraphPool)
    pools: list[Any] = field(default_factory=list)
    """The pool of each graph."""
    assignments: Assignments = field(default_factory=Assignments)

    def run_on_capture_stream(self, run: Callable[[], Any]) -> Any:
        self.warm_ups += 1
        return run()

    def find_host_reads(self, run: Callable[[], Any]) -> tuple[Any, list[str]]:
        return self.run_on_capture_stream(run), list(self.reads)

    def capture(
        self,
        run: Callable[[Any], Any],
        values: Any,
        *_: object,
        models: Iterable[nn.Module] = (),
        hides_capture: bool = True,
        records_draws: bool = False,
    ) -> Replayed:
        self.reports.append(hides_capture)
        if self.draws and not records_draws:
            raise HostDrawsFound
        fails_for_calls = self.fails_for_calls and isinstance(values, Call)
        if self.fails or fails_for_calls or (self.fails_as_eager and hides_capture):
            raise CaptureFailed(self.failure)
        self.pools.append(self.pool.handle())
        self.graphs.append(
            DeferredGraph(run, values)
            if self.defers
            else FakeGraph(run, values, self.executor, broken=self.broken)
        )
        replayed = Replayed(self.graphs[-1])
        self.pool.add(replayed)
        return replayed


def fake_captures(monkeypatch: pytest.MonkeyPatch) -> FakeCapturer:
    """Let every `CaptureRunner` use one fake capturer."""
    capturer = FakeCapturer()

    numbers = itertools.count(1)
    monkeypatch.setattr(captured_step.GraphCapturer, "on", lambda _: capturer)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    # Fake replays run the function again, and are about as fast as eager calls.
    monkeypatch.setattr(replay_timing, "MARGIN", 1e9)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return capturer


def use_capture(
    step: mezzo.TrainStep,
    mode: str | bool | Capture = Capture.AUTO,
    *,
    captures_update: bool = True,
) -> None:
    """Give a step that was created on a CPU a runner that captures, with or without updates."""
    runner = CaptureRunner(step._executor, Capture.parse(mode))
    runner._graphs.capturer.executor = step._executor
    runner._graphs.captures_update = captures_update
    step._runner = runner
