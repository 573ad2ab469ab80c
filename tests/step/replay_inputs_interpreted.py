"""The kernels of replay inputs in Triton's interpreter; `test_replay_inputs.py` runs this."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mezzo.step import replay_inputs
from mezzo.step.cuda_graph import CapturedGraph
from mezzo.step.replay_inputs import ReplayInputs

CPU = torch.device("cpu")
torch.manual_seed(0)


class QueuedGraph:
    """Replaces a CUDA graph: replays are queued until `run`."""

    def __init__(self, inputs: ReplayInputs, body: Callable[[], torch.Tensor]) -> None:
        self.inputs, self.body, self.queued = inputs, body, 0

    def replay(self) -> None:
        self.queued += 1

    def run(self, *_: object) -> None:
        while self.queued:
            self.inputs.wrap(lambda _: self.body())(None)
            self.queued -= 1


def _captured(
    leaves: list[torch.Tensor], buffers: list[torch.Tensor], body: Callable[[], torch.Tensor]
) -> tuple[CapturedGraph, QueuedGraph]:
    inputs = ReplayInputs(CPU, leaves, buffers)
    inputs.warm_up(leaves)
    queue = QueuedGraph(inputs, body)
    return CapturedGraph(queue, buffers, None, inputs), queue  # type: ignore[arg-type]


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("size", [1, 1023, 1024, 2500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_copied_bit_for_bit(dtype: torch.dtype, size: int) -> None:
    leaf = (torch.randn(size) * 100).to(dtype)
    # With memory behind the buffer, which must not be written.
    memory = torch.zeros(size + 8, dtype=dtype)
    graph, queue = _captured([leaf], [memory[:size]], lambda: torch.zeros(()))
    other = (torch.randn(size) * 100).to(dtype)
    graph.replay([other])
    queue.run()
    assert torch.equal(memory[:size], other)
    assert not memory[size:].any()


# NumPy warns where a number becomes infinite.
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_casts_round_as_torch_does() -> None:
    # To float16 only: the interpreter truncates to bfloat16 where devices round.
    leaf = torch.cat(
        [
            torch.randn(1000) * 10.0 ** torch.randint(-8, 6, (1000,)),
            torch.tensor([float("inf"), -float("inf"), 65519.0, 65520.0, 1e39, -0.0]),
        ]
    )
    buffer = torch.zeros_like(leaf, dtype=torch.float16)
    graph, queue = _captured([torch.zeros_like(leaf)], [buffer], lambda: torch.zeros(()))
    graph.replay([leaf])
    queue.run()
    assert torch.equal(buffer, leaf.half())
    assert torch.equal(buffer.signbit(), leaf.signbit())


def test_the_host_may_run_ahead_and_every_replay_reads_its_own_record() -> None:
    x, y = torch.zeros(5), torch.zeros(3, dtype=torch.int64)
    graph, queue = _captured(
        [x, y], [x.clone(), y.clone()], lambda: graph.inputs[0].sum() + graph.inputs[1].sum()
    )
    batches = [(torch.full((5,), float(number)), torch.full((3,), number)) for number in range(200)]
    losses = [graph.replay(list(batch)) for batch in batches]
    queue.run()
    assert [float(loss) for loss in losses] == [8.0 * number for number in range(200)]
    assert len({loss.data_ptr() for loss in losses}) == 200
    losses[3].zero_()
    assert losses[4]._version == 0
    assert not losses[3]._is_view()


def test_a_host_that_is_too_far_ahead_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_inputs, "SLOTS", 4)
    leaf = torch.zeros(2)
    graph, queue = _captured([leaf], [leaf.clone()], lambda: graph.inputs[0].sum())
    monkeypatch.setattr(torch.cuda, "synchronize", queue.run)
    inputs = [torch.full((2,), float(number)) for number in range(11)]
    losses = [graph.replay([one]) for one in inputs]
    assert queue.queued == 3
    queue.run()
    assert [float(loss) for loss in losses] == [2.0 * number for number in range(11)]


LAYOUTS = {
    "strided": lambda: torch.arange(24.0)[::2],
    "transposed": lambda: torch.arange(12.0).view(3, 4).T.reshape(-1, 1).T[0],
    "misaligned": lambda: torch.arange(13.0)[1:],
    "expanded": lambda: torch.ones(1).expand(12),
    "requires a gradient": lambda: torch.arange(13.0, requires_grad=True)[1:],
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_inputs_in_any_layout_are_copied(case: str) -> None:
    buffer = torch.zeros(12)
    graph, queue = _captured([torch.zeros(12)], [buffer], lambda: torch.zeros(()))
    # Kept alive until it is read: memory of a CPU is not reused in stream order.
    leaf = LAYOUTS[case]()
    graph.replay([leaf])
    queue.run()
    assert torch.equal(buffer, leaf.detach())
    assert not buffer.requires_grad


@pytest.mark.parametrize(
    ("leaf", "buffer"),
    [
        (torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64)),
        (torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float16)),
        (torch.ones(0), torch.zeros(0)),
        (torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    ],
    ids=["complex", "float64 to float16", "empty", "another memory format"],
)
def test_other_copies_are_made_by_torch(leaf: torch.Tensor, buffer: torch.Tensor) -> None:
    graph, queue = _captured(
        [leaf, torch.ones(1)],
        [buffer, torch.zeros(1)],
        lambda: buffer.float().sum() if not buffer.is_complex() else torch.zeros(()),
    )
    leaves = [leaf * 2, torch.full((1,), 7.0)]
    graph.replay(leaves)
    queue.run()
    assert torch.equal(buffer, leaves[0].to(buffer.dtype))
    assert graph.inputs[1].item() == 7.0


@pytest.mark.parametrize(
    "returned",
    [torch.ones(()).half(), torch.ones(1), torch.ones(3), (torch.ones(()),), None],
    ids=str,
)
def test_outputs_that_are_not_a_loss_are_copied(returned: object) -> None:
    leaf = torch.zeros(2)
    inputs = ReplayInputs(CPU, [leaf], [leaf.clone()])
    inputs.warm_up([leaf])
    inputs.store_loss(returned)
    assert inputs.write([leaf]) is None


def test_a_ring_buffer_stays_alive_until_its_records_are_read() -> None:
    leaf = torch.zeros(2)
    inputs = ReplayInputs(CPU, [leaf], [leaf.clone()])
    inputs.write([leaf])
    ring = inputs._ring
    del inputs
    values, memory = ring.values, ring.memory
    del ring
    assert any(ring.memory is memory for ring in replay_inputs._unread_buffers)
    values[0] = 1
    ReplayInputs(CPU, [leaf], [leaf.clone()])
    assert not any(ring.memory is memory for ring in replay_inputs._unread_buffers)
