"""A program as its caller sees it. That graphs are captured is shown on a CUDA device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mezzo import _launch
from mezzo.step import cuda_graph
from mezzo.step.cuda_graph import CapturedGraph


class Doubles:
    """Stands in for a graph: doubles what is in the input buffer."""

    def __init__(self, source, target):
        self.source, self.target = source, target

    def replay(self):
        self.target.copy_(self.source * 2)


def test_inputs_are_copied_in_and_outputs_are_ones_own():
    source, target = torch.zeros(2), torch.zeros(2)
    doubles = CapturedGraph(Doubles(source, target), [source], {"out": target})
    first = doubles.replay([torch.ones(2)])["out"]
    second = doubles.replay([torch.full((2,), 3.0)])["out"]
    assert first.tolist() == [2.0, 2.0]
    assert second.tolist() == [6.0, 6.0]


def test_a_program_may_have_no_inputs():
    source, target = torch.ones(1), torch.zeros(1)
    assert CapturedGraph(Doubles(source, target), [], target).replay([]).tolist() == [2.0]


class TestAskingWhetherACaptureIsUnderWay:
    @pytest.fixture(autouse=True)
    def _capturing(self, monkeypatch):
        monkeypatch.setattr(cuda_graph, "_is_capturing", lambda: True)

    def test_model_code_gets_the_eager_answer_in_the_capturing_thread_alone(self):
        with cuda_graph.report_eager():
            here = torch.cuda.is_current_stream_capturing()
            with ThreadPoolExecutor(1) as pool:
                there = pool.submit(lambda: torch.cuda.is_current_stream_capturing()).result()
        assert (here, there) == (False, True)

    def test_torch_and_mezzo_get_the_truth(self):
        with cuda_graph.report_eager():
            assert _launch.is_capturing(torch.device("cuda"))
            assert eval(
                "torch.cuda.is_current_stream_capturing()",
                {"torch": torch, "__name__": "torch.nn.modules._functions"},
            )

    def test_torchs_function_is_put_back_when_the_last_capture_ends(self):
        with pytest.raises(RuntimeError), cuda_graph.report_eager(), cuda_graph.report_eager():
            raise RuntimeError
        assert torch.cuda.is_current_stream_capturing() is True
        assert torch.cuda.is_current_stream_capturing is cuda_graph._is_capturing
