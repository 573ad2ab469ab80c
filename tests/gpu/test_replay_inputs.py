"""Letters to programs that a CUDA device replays: the host runs ahead, memory changes hands, and every replay reads what was meant for it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from mezzo.step import replay_inputs
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
A_WHILE = 20_000_000


def _studio() -> GraphCapturer:
    return GraphCapturer.on(torch.device("cuda", torch.cuda.current_device()))


def _summing(*leaves: torch.Tensor) -> CapturedGraph:
    """Gives the sum of all inputs."""
    program = _studio().capture(lambda held: sum(one.float().sum() for one in held), leaves, leaves)
    assert program.replay_inputs is not None
    return program


@pytest.mark.parametrize("size", [1, 1000, 4096, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_arrive_bit_by_bit(dtype: torch.dtype, size: int) -> None:
    program = _summing((torch.randn(size, device="cuda") * 100).to(dtype))
    other = (torch.randn(size, device="cuda") * 100).to(dtype)
    program.replay([other])
    assert torch.equal(program.inputs[0], other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_cast_is_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    leaf = torch.randn(100_003, device="cuda") * 10.0 ** torch.randint(
        -30, 30, (100_003,), device="cuda"
    )
    leaf[:6] = torch.tensor([float("inf"), -float("inf"), float("nan"), 65519.0, 65520.0, -0.0])
    program = _studio().capture(
        lambda held: held[0].float().sum(), (torch.zeros_like(leaf, dtype=dtype),), [leaf]
    )
    program.replay([leaf])
    assert torch.equal(program.inputs[0].nan_to_num(nan=7.0), leaf.to(dtype).nan_to_num(nan=7.0))
    assert torch.equal(program.inputs[0].signbit()[3:], leaf.signbit()[3:])


def test_a_host_far_ahead_hands_every_replay_its_own_inputs_even_if_they_are_gone_by_then() -> None:
    count = 2 * replay_inputs.SLOTS + 100
    program = _summing(
        torch.zeros(1000, device="cuda"), torch.zeros(10, dtype=torch.int64, device="cuda")
    )
    torch.cuda._sleep(A_WHILE)
    losses = [
        program.replay(
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


STRANGE: dict[str, Any] = {
    "strided": lambda: torch.arange(24.0, device="cuda")[::2],
    "misaligned": lambda: torch.arange(13.0, device="cuda")[1:],
    "expanded": lambda: torch.full((1,), 5.0, device="cuda").expand(12),
    "of the host": lambda: torch.arange(12.0),
}


@pytest.mark.parametrize("case", STRANGE)
def test_inputs_that_lie_differently_arrive_too(case: str) -> None:
    program = _summing(torch.zeros(12, device="cuda"))
    torch.cuda._sleep(A_WHILE)
    losses = [program.replay([STRANGE[case]()]) for _ in range(2)]
    assert [float(loss) for loss in losses] == [float(STRANGE[case]().sum())] * 2


def test_streams_may_change() -> None:
    program, streams = (
        _summing(torch.zeros(100_000, device="cuda")),
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
                - program.replay([torch.full((100_000,), number / 100_000, device="cuda")])
            )
            # Whoever gets this memory next writes to it.
            torch.empty(100_000, device="cuda").fill_(-1.0)
        torch.cuda.current_stream().wait_stream(stream)
    assert torch.stack(losses).abs().max() < 1e-2


def test_a_program_that_is_dropped_while_it_runs_finishes() -> None:
    def run() -> list[torch.Tensor]:
        program = _summing(torch.zeros(1000, device="cuda"))
        torch.cuda._sleep(A_WHILE)
        return [
            program.replay([torch.full((1000,), float(number), device="cuda")])
            for number in range(100)
        ]

    losses = run()
    gc.collect()
    # Pinned memory that is free would be handed out again, and its numbers be taken for addresses.
    garbage = [
        torch.full((1 + replay_inputs.SLOTS * 2,), 3, dtype=torch.int64).pin_memory()
        for _ in range(8)
    ]
    assert torch.equal(torch.stack(losses), torch.arange(100, device="cuda") * 1000.0)
    assert len(garbage) == 8


def test_losses_are_ones_own() -> None:
    program = _summing(torch.zeros(4, device="cuda"))
    first = program.replay([torch.ones(4, device="cuda")])
    first.mul_(10.0)
    second = program.replay([torch.full((4,), 2.0, device="cuda")])
    assert (float(first), float(second)) == (40.0, 8.0)
    assert first.grad_fn is None
    assert not first._is_view()
