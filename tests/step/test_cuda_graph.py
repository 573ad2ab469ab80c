"""Replay of a captured graph, and host reads. `tests/gpu` shows that graphs are captured."""

from __future__ import annotations

import itertools
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from traceback import FrameSummary, StackSummary

import pytest
import torch

from mezzo import _launch
from mezzo.step import cuda_graph
from mezzo.step.cuda_graph import CapturedGraph, GraphPool


class DoublingGraph:
    """Replaces a CUDA graph: doubles what is in the input buffer."""

    def __init__(self, source, target):
        self.source, self.target = source, target

    def replay(self):
        self.target.copy_(self.source * 2)


def test_inputs_are_copied_in_and_outputs_are_copies():
    source, target = torch.zeros(2), torch.zeros(2)
    graph = CapturedGraph(DoublingGraph(source, target), [source], {"out": target})
    first = graph.replay([torch.ones(2)])["out"]
    second = graph.replay([torch.full((2,), 3.0)])["out"]
    assert first.tolist() == [2.0, 2.0]
    assert second.tolist() == [6.0, 6.0]


def test_a_graph_may_have_no_inputs():
    source, target = torch.ones(1), torch.zeros(1)
    assert CapturedGraph(DoublingGraph(source, target), [], target).replay([]).tolist() == [2.0]


def test_many_inputs_on_the_host_are_copied_asynchronously():
    buffers = [torch.zeros(1) for _ in range(20)]
    copied = []

    class Copies:
        def copy(self, inputs):
            copied.extend(inputs)

    graph = CapturedGraph(DoublingGraph(buffers[0], torch.zeros(1)), buffers, (), (), Copies())
    graph.replay([torch.ones(1) for _ in buffers])
    assert [one.buffer for one in copied] == buffers


class TestGraphPool:
    @pytest.fixture(autouse=True)
    def _handles(self, monkeypatch):
        numbers = itertools.count(1)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))

    def test_graphs_share_it_as_long_as_there_is_one(self):
        pool, graphs = GraphPool(), [DoublingGraph(None, None) for _ in range(2)]
        for graph in graphs:
            assert pool.handle() == 1
            pool.add(graph)
        del graph, graphs[1]
        assert pool.handle() == 1
        graphs.clear()
        assert pool.handle() == 2

    def test_that_of_a_failed_capture_is_not_used_again(self):
        pool, graph = GraphPool(), DoublingGraph(None, None)
        assert pool.handle() == 1
        pool.add(graph)
        pool.leave()
        assert pool.handle() == 2


class TestIsCurrentStreamCapturing:
    @pytest.fixture(autouse=True)
    def _capturing(self, monkeypatch):
        monkeypatch.setattr(cuda_graph, "_is_capturing", lambda: True)

    def test_it_is_false_for_model_code_in_the_capturing_thread_only(self):
        with cuda_graph.hide_capture():
            here = torch.cuda.is_current_stream_capturing()
            with ThreadPoolExecutor(1) as pool:
                there = pool.submit(lambda: torch.cuda.is_current_stream_capturing()).result()
        assert (here, there) == (False, True)

    def test_it_is_true_for_torch_and_mezzo(self):
        with cuda_graph.hide_capture():
            assert _launch.is_capturing(torch.device("cuda"))
            assert eval(
                "torch.cuda.is_current_stream_capturing()",
                {"torch": torch, "__name__": "torch.nn.modules._functions"},
            )

    def test_it_is_restored_when_the_last_capture_ends(self):
        with pytest.raises(RuntimeError), cuda_graph.hide_capture(), cuda_graph.hide_capture():
            raise RuntimeError
        assert torch.cuda.is_current_stream_capturing() is True
        assert torch.cuda.is_current_stream_capturing is cuda_graph._is_capturing


class TestHostReads:
    def test_the_line_of_user_code_is_named(self):
        lines = []

        class Recording(torch.Tensor):
            @classmethod
            def __torch_function__(cls, *_, **__):
                lines.append(cuda_graph.user_line(traceback.extract_stack()))
                return 0

        torch.nn.functional.relu(torch.ones(1).as_subclass(Recording))
        assert "test_cuda_graph.py" in lines[0]

    @pytest.mark.parametrize(
        ("file", "is_user_code"),
        [
            (Path(torch.__file__).with_name("functional.py"), False),
            (Path(warnings.__file__).with_name("contextlib.py"), False),
            (Path(torch.__file__).parent.with_name("torchvision") / "ops.py", True),
            (Path(warnings.__file__).parent / "site-packages" / "timm" / "models.py", True),
        ],
    )
    def test_installed_packages_are_user_code(self, file, is_user_code, monkeypatch):
        packages = str(Path(warnings.__file__).parent / "site-packages")
        monkeypatch.setattr(cuda_graph, "_INSTALLED", (packages,))
        frames = [FrameSummary(str(one), 1, "call", line="") for one in (__file__, file)]
        named = cuda_graph.user_line(StackSummary.from_list(frames))
        assert named.startswith(str(file)) is is_user_code

    def test_reads_are_collected_and_other_warnings_pass(self, monkeypatch):
        modes = ["default"]
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with cuda_graph.find_host_syncs() as lines:
                warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
                warnings.warn("something else", UserWarning, stacklevel=1)
        assert len(lines) == 1
        assert "test_cuda_graph.py" in lines[0]
        assert "called a synchronizing" in lines[0]
        assert [str(one.message) for one in warned] == ["something else"]
        assert modes == ["default", "warn", "default"]
