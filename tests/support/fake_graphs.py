"""CUDA graphs that run the captured function again: a CPU cannot capture."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import mezzo
from mezzo.step import capture
from mezzo.step.capture import CaptureRunner
from mezzo.step.components import Capture
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
    host_syncs: list[str] = field(default_factory=list)
    """Lines that `find_host_syncs` reports."""
    fails: bool = False
    broken: bool = False

    def with_new_pool(self) -> FakeCapturer:
        return self

    def run_on_capture_stream(self, run: Callable[[], Any]) -> Any:
        self.warm_ups += 1
        return run()

    def capture(self, run: Callable[[Call], Any], call: Call, *_: object) -> FakeGraph:
        if self.fails:
            self._fail()
        self.graphs.append(FakeGraph(run, call, broken=self.broken))
        return self.graphs[-1]

    def _fail(self) -> None:
        try:
            {}["the root cause"]
        except KeyError:
            torch.ones(2).view(3)


def fake_captures(monkeypatch: pytest.MonkeyPatch) -> FakeCapturer:
    """Let every `CaptureRunner` use one fake capturer."""
    capturer = FakeCapturer()

    @contextmanager
    def find_host_syncs():
        yield capturer.host_syncs

    monkeypatch.setattr(capture.GraphCapturer, "on", lambda _: capturer)
    monkeypatch.setattr(capture, "find_host_syncs", find_host_syncs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return capturer


def use_capture(step: mezzo.TrainStep, mode: str | bool | Capture = Capture.AUTO) -> None:
    """Give a step that was created on a CPU a runner that captures."""
    step._runner = CaptureRunner(step._executor, Capture.parse(mode))
