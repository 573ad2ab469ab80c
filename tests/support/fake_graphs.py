"""CUDA graphs that run the captured function again: a CPU cannot capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import mezzo
from mezzo.step import captured_step, replay_timing
from mezzo.step.capture import CaptureRunner
from mezzo.step.components import Capture
from mezzo.step.cuda_graph import CaptureFailed, HostDrawsFound
from mezzo.step.inputs import Call, copy_outputs, make_static_buffers


class FakeGraph:
    """Runs the captured function on every replay.

    A broken one sets the last input to infinity, as a graph that reads the wrong memory might.
    """

    def __init__(self, run: Callable[[Call], Any], call: Call, *, broken: bool = False) -> None:
        self._run, self._broken = run, broken
        self._values, self.inputs = make_static_buffers(call)
        self.replays = 0

    def replay(self, leaves: list[torch.Tensor]) -> Any:
        torch._foreach_copy_(self.inputs, leaves)
        if self._broken:
            self.inputs[-1].fill_(float("inf"))
        self.replays += 1
        return copy_outputs(self._run(self._values))


@dataclass
class FakeCapturer:
    """Replaces `GraphCapturer`."""

    graphs: list[FakeGraph] = field(default_factory=list)
    warm_ups: int = 0
    reports: list[bool] = field(default_factory=list)
    """`reports_eager` of each attempt."""
    draws: bool = False
    """Whether attempts fail that do not record draws on the host."""
    fails: bool = False
    fails_as_eager: bool = False
    """Whether attempts fail in which the capture is hidden from the model."""
    broken: bool = False

    pools: int = 1

    def with_new_pool(self) -> FakeCapturer:
        self.pools += 1
        return self

    def run_on_capture_stream(self, run: Callable[[], Any]) -> Any:
        self.warm_ups += 1
        return run()

    def capture(
        self,
        run: Callable[[Any], Any],
        values: Any,
        *_: object,
        reports_eager: bool = True,
        records_draws: bool = False,
    ) -> FakeGraph:
        self.reports.append(reports_eager)
        if self.draws and not records_draws:
            raise HostDrawsFound
        if self.fails or (self.fails_as_eager and reports_eager):
            raise CaptureFailed("the root cause")
        self.graphs.append(FakeGraph(run, values, broken=self.broken))
        return self.graphs[-1]


def fake_captures(monkeypatch: pytest.MonkeyPatch) -> FakeCapturer:
    """Let every `CaptureRunner` use one fake capturer."""
    capturer = FakeCapturer()

    monkeypatch.setattr(captured_step.GraphCapturer, "on", lambda _: capturer)
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
    runner._graphs.captures_update = captures_update
    step._runner = runner
