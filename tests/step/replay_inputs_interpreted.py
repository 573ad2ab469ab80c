"""Letters and the kernels that read them, on a CPU: Triton interprets them. `test_mail.py` runs these in a process of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mezzo.step import replay_inputs as mails
from mezzo.step.cuda_graph import CapturedGraph
from mezzo.step.replay_inputs import ReplayInputs

CPU = torch.device("cpu")
torch.manual_seed(0)


class Later:
    """Stands in for a graph: replays run when the device comes to them."""

    def __init__(self, mail: ReplayInputs, body: Callable[[], torch.Tensor]) -> None:
        self.mail, self.body, self.queue = mail, body, 0

    def replay(self) -> None:
        self.queue += 1

    def run(self, *_: object) -> None:
        while self.queue:
            self.mail.wrap(lambda _: self.body())(None)
            self.queue -= 1


def _program(
    leaves: list[torch.Tensor], buffers: list[torch.Tensor], body: Callable[[], torch.Tensor]
) -> tuple[CapturedGraph, Later]:
    mail = ReplayInputs(CPU, leaves, buffers)
    mail.warm_up(leaves)
    later = Later(mail, body)
    return CapturedGraph(later, buffers, None, mail), later  # type: ignore[arg-type]


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
def test_inputs_arrive_bit_by_bit(dtype: torch.dtype, size: int) -> None:
    leaf = (torch.randn(size) * 100).to(dtype)
    # Room behind it that nobody may write to.
    room = torch.zeros(size + 8, dtype=dtype)
    program, later = _program([leaf], [room[:size]], lambda: torch.zeros(()))
    other = (torch.randn(size) * 100).to(dtype)
    program.replay([other])
    later.run()
    assert torch.equal(room[:size], other)
    assert not room[size:].any()


# NumPy's, where a number becomes infinite.
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_what_is_cast_is_rounded_as_torch_rounds() -> None:
    """To float16: the interpreter cuts bfloat16 off where devices round."""
    leaf = torch.cat(
        [
            torch.randn(1000) * 10.0 ** torch.randint(-8, 6, (1000,)),
            torch.tensor([float("inf"), -float("inf"), 65519.0, 65520.0, 1e39, -0.0]),
        ]
    )
    buffer = torch.zeros_like(leaf, dtype=torch.float16)
    program, later = _program([torch.zeros_like(leaf)], [buffer], lambda: torch.zeros(()))
    program.replay([leaf])
    later.run()
    assert torch.equal(buffer, leaf.half())
    assert torch.equal(buffer.signbit(), leaf.signbit())


def test_the_host_may_be_ahead_and_every_replay_reads_its_own_letter() -> None:
    x, y = torch.zeros(5), torch.zeros(3, dtype=torch.int64)
    program, later = _program(
        [x, y], [x.clone(), y.clone()], lambda: program.inputs[0].sum() + program.inputs[1].sum()
    )
    batches = [(torch.full((5,), float(number)), torch.full((3,), number)) for number in range(200)]
    losses = [program.replay(list(batch)) for batch in batches]
    later.run()
    assert [float(loss) for loss in losses] == [8.0 * number for number in range(200)]
    assert len({loss.data_ptr() for loss in losses}) == 200
    losses[3].zero_()
    assert losses[4]._version == 0
    assert not losses[3]._is_view()


def test_whoever_is_too_far_ahead_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mails, "SLOTS", 4)
    leaf = torch.zeros(2)
    program, later = _program([leaf], [leaf.clone()], lambda: program.inputs[0].sum())
    monkeypatch.setattr(torch.cuda, "synchronize", later.run)
    given = [torch.full((2,), float(number)) for number in range(11)]
    losses = [program.replay([one]) for one in given]
    assert later.queue == 3
    later.run()
    assert [float(loss) for loss in losses] == [2.0 * number for number in range(11)]


STRANGE = {
    "strided": lambda: torch.arange(24.0)[::2],
    "transposed": lambda: torch.arange(12.0).view(3, 4).T.reshape(-1, 1).T[0],
    "misaligned": lambda: torch.arange(13.0)[1:],
    "expanded": lambda: torch.ones(1).expand(12),
    "wants a gradient": lambda: torch.arange(13.0, requires_grad=True)[1:],
}


@pytest.mark.parametrize("case", STRANGE)
def test_inputs_that_lie_differently_arrive_too(case: str) -> None:
    buffer = torch.zeros(12)
    program, later = _program([torch.zeros(12)], [buffer], lambda: torch.zeros(()))
    # Kept until it is read: a CPU's memory knows no order of streams.
    given = STRANGE[case]()
    program.replay([given])
    later.run()
    assert torch.equal(buffer, given.detach())
    assert not buffer.requires_grad


@pytest.mark.parametrize(
    ("leaf", "buffer"),
    [
        (torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64)),
        (torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float16)),
        (torch.ones(0), torch.zeros(0)),
        (torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    ],
    ids=["complex", "float64 to float16", "empty", "another layout"],
)
def test_what_torch_copies_better_is_left_to_torch(
    leaf: torch.Tensor, buffer: torch.Tensor
) -> None:
    program, later = _program(
        [leaf, torch.ones(1)],
        [buffer, torch.zeros(1)],
        lambda: buffer.float().sum() if not buffer.is_complex() else torch.zeros(()),
    )
    given = [leaf * 2, torch.full((1,), 7.0)]
    program.replay(given)
    later.run()
    assert torch.equal(buffer, given[0].to(buffer.dtype))
    assert program.inputs[1].item() == 7.0


@pytest.mark.parametrize(
    "returned",
    [torch.ones(()).half(), torch.ones(1), torch.ones(3), (torch.ones(()),), None],
    ids=str,
)
def test_what_is_no_loss_is_copied(returned: object) -> None:
    leaf = torch.zeros(2)
    mail = ReplayInputs(CPU, [leaf], [leaf.clone()])
    mail.warm_up([leaf])
    mail.store_loss(returned)
    assert mail.write([leaf]) is None


def test_letters_outlive_their_program_until_they_are_read() -> None:
    leaf = torch.zeros(2)
    mail = ReplayInputs(CPU, [leaf], [leaf.clone()])
    mail.write([leaf])
    box = mail._ring
    del mail
    words, memory = box.values, box.memory
    del box
    assert any(box.memory is memory for box in mails._unread_buffers)
    words[0] = 1
    ReplayInputs(CPU, [leaf], [leaf.clone()])
    assert not any(box.memory is memory for box in mails._unread_buffers)
