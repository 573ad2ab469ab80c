"""Inputs of captured graphs: every replay reads its own, even if the host runs far ahead."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from mezzo.step.cuda_graph import CapturedGraph, GraphCapturer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
]
BUSY_CYCLES = 20_000_000


def _capturer() -> GraphCapturer:
    return GraphCapturer.on(torch.device("cuda", torch.cuda.current_device()))


def _sum_of(*leaves: torch.Tensor) -> CapturedGraph:
    """Capture a graph that returns the sum of all inputs."""
    return _capturer().capture(
        lambda inputs: sum(tensor.float().sum() for tensor in inputs), leaves
    )


@pytest.mark.parametrize("size", [1, 1000, 4096, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_copied_bit_by_bit(dtype: torch.dtype, size: int) -> None:
    graph = _sum_of((torch.randn(size, device="cuda") * 100).to(dtype))
    other = (torch.randn(size, device="cuda") * 100).to(dtype)
    graph.replay([other])
    assert torch.equal(graph.inputs[0], other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_that_are_cast_are_rounded_as_in_torch(dtype: torch.dtype) -> None:
    leaf = torch.randn(100_003, device="cuda") * 10.0 ** torch.randint(
        -30, 30, (100_003,), device="cuda"
    )
    leaf[:6] = torch.tensor([float("inf"), -float("inf"), float("nan"), 65519.0, 65520.0, -0.0])
    graph = _capturer().capture(
        lambda inputs: inputs[0].float().sum(), (torch.zeros_like(leaf, dtype=dtype),)
    )
    graph.replay([leaf])
    assert torch.equal(graph.inputs[0].nan_to_num(nan=7.0), leaf.to(dtype).nan_to_num(nan=7.0))
    assert torch.equal(graph.inputs[0].signbit()[3:], leaf.signbit()[3:])


def test_every_replay_reads_its_own_inputs_even_if_they_are_freed_before_it_runs() -> None:
    count = 2_000
    graph = _sum_of(
        torch.zeros(1000, device="cuda"), torch.zeros(10, dtype=torch.int64, device="cuda")
    )
    torch.cuda._sleep(BUSY_CYCLES)
    losses = [
        graph.replay(
            [
                torch.full((1000,), number / 1000, device="cuda"),
                torch.full((10,), number, device="cuda"),
            ]
        )
        for number in range(count)
    ]
    found = torch.stack(losses)
    assert torch.allclose(found, torch.arange(count, device="cuda") * 11.0)
    assert len({loss.data_ptr() for loss in losses}) == count


LAYOUTS: dict[str, Any] = {
    "strided": lambda: torch.arange(24.0, device="cuda")[::2],
    "misaligned": lambda: torch.arange(13.0, device="cuda")[1:],
    "expanded": lambda: torch.full((1,), 5.0, device="cuda").expand(12),
    "on the host": lambda: torch.arange(12.0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_other_layouts_are_copied(layout: str) -> None:
    graph = _sum_of(torch.zeros(12, device="cuda"))
    torch.cuda._sleep(BUSY_CYCLES)
    losses = [graph.replay([LAYOUTS[layout]()]) for _ in range(2)]
    assert [float(loss) for loss in losses] == [float(LAYOUTS[layout]().sum())] * 2


def test_streams_may_change() -> None:
    graph, streams = (
        _sum_of(torch.zeros(100_000, device="cuda")),
        [torch.cuda.Stream() for _ in range(3)],
    )
    losses = []
    for number in range(60):
        stream = streams[number % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000)
            losses.append(
                float(number)
                - graph.replay([torch.full((100_000,), number / 100_000, device="cuda")])
            )
            # The freed memory of the inputs is reused and overwritten.
            torch.empty(100_000, device="cuda").fill_(-1.0)
        torch.cuda.current_stream().wait_stream(stream)
    assert torch.stack(losses).abs().max() < 1e-2


def test_a_graph_that_is_dropped_while_it_runs_finishes() -> None:
    def run() -> list[torch.Tensor]:
        graph = _sum_of(torch.zeros(1000, device="cuda"))
        torch.cuda._sleep(BUSY_CYCLES)
        return [
            graph.replay([torch.full((1000,), float(number), device="cuda")])
            for number in range(100)
        ]

    losses = run()
    gc.collect()
    # Freed memory would be reused and overwritten.
    garbage = [torch.full((1000,), 3.0, device="cuda") for _ in range(8)]
    assert torch.equal(torch.stack(losses), torch.arange(100, device="cuda") * 1000.0)
    assert len(garbage) == 8


def test_each_replay_returns_its_own_loss_tensor() -> None:
    graph = _sum_of(torch.zeros(4, device="cuda"))
    first = graph.replay([torch.ones(4, device="cuda")])
    first.mul_(10.0)
    second = graph.replay([torch.full((4,), 2.0, device="cuda")])
    assert (float(first), float(second)) == (40.0, 8.0)
    assert first.grad_fn is None
    assert not first._is_view()
