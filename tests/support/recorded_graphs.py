"""CUDA graphs on a CPU: a capture records the ops that run, and a replay runs them again.

As on a device, a replay reads and writes the memory of the capture and runs no Python, and a
capture changes no memory that existed before.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import mezzo
from mezzo.step import cuda_graph, replay_timing
from mezzo.step.capture_runner import CaptureRunner
from mezzo.step.cuda_graph import GraphCapturer
from mezzo.step.options import Capture


class RecordedGraph:
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.ops: list[Any] = []

    def replay(self) -> None:
        with torch.inference_mode(), torch._C._AutoDispatchBelowAutograd():
            for op, args, kwargs, results in self.ops:
                fresh = tree_leaves(op(*args, **kwargs))
                for result, value in zip(tree_leaves(results), fresh, strict=True):
                    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
                        continue
                    if result.data_ptr() != value.data_ptr():
                        result.copy_(value)


class Recording(TorchDispatchMode):
    """Replaces `torch.cuda.graph`: records into a graph, and undoes all writes at the end."""

    def __init__(self, graph: RecordedGraph, **_: Any) -> None:
        super().__init__()
        self._ops = graph.ops
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        passed = dict(zip(names, args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.is_write:
                self._written += [
                    (tensor, tensor.clone())
                    for tensor in tree_leaves(passed.get(argument.name))
                    if isinstance(tensor, torch.Tensor)
                ]
        results = func(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            # Without their history, of which a CUDA graph knows nothing.
            recorded = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, results))
        self._ops.append((func, *recorded))
        return results

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with torch._C._AutoDispatchBelowAutograd():
            for tensor, before in reversed(self._written):
                tensor.copy_(before)


class Stream:
    """Replaces streams and events: everything runs at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Stream) -> None:
        """Do nothing."""


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every `GraphCapturer` record."""
    numbers = itertools.count(1)
    for name, value in {
        "Stream": Stream,
        "Event": Stream,
        "CUDAGraph": RecordedGraph,
        "graph": Recording,
        "graph_pool_handle": lambda: next(numbers),
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "set_stream": lambda _: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "default_generators": (torch.Generator(),),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("clear_cublas_workspaces", "end_allocate_to_pool", "release_pool"):
        monkeypatch.setattr(cuda_graph, name, lambda *_: None)
    monkeypatch.setattr(cuda_graph, "find_host_syncs", lambda: contextlib.nullcontext([]))
    monkeypatch.setattr(replay_timing, "MARGIN", 1e9)


def capture_passes(step: mezzo.TrainStep | mezzo.EvalStep) -> None:
    """Let a step on a CPU capture forward and backward passes; updates stay eager."""
    if isinstance(step, mezzo.EvalStep):
        step._capturer = GraphCapturer.on(torch.device("cpu"))
        step._buffers = step._capturer.assignments.other_buffers(step.model)
        return
    runner = CaptureRunner(step._executor, Capture.AUTO)
    runner._graphs.captures_update = False
    step._runner = runner
