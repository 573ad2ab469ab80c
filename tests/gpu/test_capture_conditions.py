"""When steps are captured on a device: kept losses, few graphs, inputs that fail, many inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.differential_paths import Reading
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.step import replay_timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).cuda()


def make_step(model: nn.Module, **options: Any) -> mezzo.TrainStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mezzo.TrainStep(model, F.mse_loss, optimizer, **{"dtype": "bfloat16"} | options)


def inputs(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    x, y = torch.randn(2, size, 16, generator=generator).cuda()
    return x, y


def run(step: mezzo.TrainStep, sizes: list[int]) -> list[float]:
    return [float(step(*inputs(size))) for size in sizes]


# torch's, once for each process: the nodes of the kept loss run on the stream of their creation.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.filterwarnings("ignore:The step cannot be captured")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loss_from_before_the_step_that_is_kept_does_not_change_training(dtype: str) -> None:
    losses = []
    for keeps in (True, False):
        model = make_model()
        kept = F.mse_loss(model(inputs()[0]), inputs()[1]) if keeps else None
        step = make_step(model, dtype=dtype)
        losses.append(run(step, [8] * 10))
        if kept is not None:
            assert step.captured or "torch.no_grad()" in str(step.eager_reason)
            assert kept.requires_grad
        else:
            assert step.captured
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.filterwarnings("ignore:The step was called with more than")
@pytest.mark.parametrize("limit", [1, 2])
def test_few_graphs_are_replaced_and_every_call_computes_what_it_does_eagerly(limit: int) -> None:
    sizes = [*[20] * 6, *[4] * 5, *[5] * 5, 20, 4, 5, *[20] * 4]
    step = make_step(make_model(), max_graphs=limit)
    losses = run(step, sizes)
    assert step.captured, step.eager_reason
    assert step._runner.graph_count == limit
    assert step.replays >= 10
    eager = run(make_step(make_model(), capture=False), sizes)
    assert losses == pytest.approx(eager, rel=1e-3)


class ReadsSmall(nn.Module):
    """Reads from the device for small batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 4 and float(x.detach().sum()) == 0:
            x = x + 1
        return self.layers(x)


def test_inputs_that_cannot_be_captured_leave_the_graphs_of_others() -> None:
    step = make_step(ReadsSmall())
    losses = run(step, [20] * 6)
    with pytest.warns(UserWarning, match=r"\(2, 16\).*the host reads from the device"):
        losses += run(step, [2, 2])
    losses += run(step, [20, 2, 20, 5, 5, 5])
    assert step.captured
    assert step.eager_reason is None
    assert step._runner.graph_count == 2
    sizes = [*[20] * 6, 2, 2, 20, 2, 20, 5, 5, 5]
    assert losses == pytest.approx(run(make_step(ReadsSmall(), capture=False), sizes), rel=1e-3)


def test_more_than_sixteen_inputs_on_the_host_are_copied_without_a_wait(
    request: pytest.FixtureRequest,
) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @mezzo.train_step(models=model, optimizers=optimizer, dtype="bfloat16", capture=True)
    def step(parts: list[torch.Tensor]) -> torch.Tensor:
        return model(torch.stack(parts)).square().mean()

    batches = [[torch.randn(16).pin_memory() for _ in range(20)] for _ in range(8)]
    for batch in batches[:5]:
        step(batch)
    assert step.captured
    torch.cuda.synchronize()
    request.getfixturevalue("no_host_reads")
    for batch in batches[5:]:
        step(batch)


def _captured_update(step: mezzo.TrainStep) -> Any:
    return step._runner._update._captured


@pytest.mark.filterwarnings("ignore:The step cannot be captured")
def test_the_update_alone_is_captured_again_after_a_loaded_state() -> None:
    losses = []
    for capture in ("auto", False):
        torch.manual_seed(0)
        model = Reading().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = mezzo.TrainStep(
            model, F.cross_entropy, optimizer, "O2", dtype="float16", capture=capture
        )
        x, y = torch.randn(8, 8, device="cuda"), torch.arange(8, device="cuda")
        found = [float(step(x, y)) for _ in range(12)]
        if capture:
            assert _captured_update(step) is not None
        step.load_state_dict(step.state_dict())
        found += [float(step(x, y)) for _ in range(6)]
        if capture:
            assert _captured_update(step) is not None
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.filterwarnings("ignore:The step cannot be captured")
def test_the_update_alone_is_captured_after_a_slower_graph_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = make_step(make_model())
    monkeypatch.setattr(replay_timing, "MARGIN", 0.0)
    run(step, [8] * 7)
    assert "a replay takes" in str(step.eager_reason)
    monkeypatch.setattr(replay_timing, "MARGIN", 1e9)
    run(step, [8] * 6)
    assert _captured_update(step) is not None


class Branching(nn.Module):
    """Has parameters that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(16, 16).cuda(), nn.Linear(16, 16).cuda()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if len(x) == 8 else 0)


@pytest.mark.filterwarnings("ignore:The step cannot be captured")
@pytest.mark.parametrize("sizes", [(8, 3), (3, 8)])
def test_parameters_that_some_accumulations_do_not_use_are_not_stepped_in_them(
    sizes: tuple[int, int],
) -> None:
    one, other = sizes
    calls = [*[one] * 8, *[other] * 8, *[one] * 5, *[one, other] * 3]
    # Ends with an eager and a captured call for one update, and two eager calls for the next.
    calls += [other, other, one, other, other]
    weights = []
    for capture in ("auto", False):
        model = Branching()
        run(make_step(model, accumulate=2, capture=capture), calls)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for captured, eager in zip(*weights, strict=True):
        assert torch.allclose(captured, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("master", ["float32", "split"])
def test_a_parameter_that_was_frozen_and_written_is_trained_on_from_what_was_written(
    master: str,
) -> None:
    weights = []
    for capture in (True, False):
        model = make_model()
        step = make_step(model, policy="O2", master=master, capture=capture)
        run(step, [8] * 6)
        model[0].weight.requires_grad_(False)
        run(step, [8] * 4)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        model[0].weight.requires_grad_(True)
        # Captured without a call before, after one that stepped other parameters.
        run(step, [8])
        # Pinned memory that is free is used again, and written.
        kept = [torch.ones(size, dtype=torch.int64).pin_memory() for size in range(1, 200)]
        run(step, [8] * 4)
        weights.append([one.detach().clone() for one in model.parameters()])
        del kept
    for captured, eager in zip(*weights, strict=True):
        assert torch.allclose(captured, eager, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_replays_follow_a_learning_rate_in_a_tensor(device: str) -> None:
    weights = []
    for capture in (True, False):
        model, rate = make_model(), torch.tensor(1e-2, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        step = mezzo.TrainStep(model, F.mse_loss, optimizer, dtype="bfloat16", capture=capture)
        run(step, [8] * 6)
        assert step.captured is capture
        rate.fill_(1e-4)
        run(step, [8] * 4)
        weights.append([one.detach().clone() for one in model.parameters()])
    for captured, eager in zip(*weights, strict=True):
        assert torch.allclose(captured, eager, rtol=1e-2, atol=1e-3)


class RunningMean(nn.Module):
    """Assigns a buffer and a tuple in its forward pass, and reads what the last call assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.register_buffer("mean", torch.zeros(16))
        self.state = (torch.zeros(16).cuda(), torch.ones(()).cuda())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total, count = self.state
        self.state = (total + x.detach().float().mean(0), count + 1)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        output: torch.Tensor = self.layers(x - self.mean - total / count)
        return output


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_that_a_forward_pass_assigns_are_those_of_the_eager_step(dtype: str) -> None:
    results = []
    for capture in (True, False):
        model = RunningMean().cuda()
        step = make_step(model, policy="O2", dtype=dtype, capture=capture)
        losses = run(step, [8] * 10)
        assert step.captured is capture
        results.append([*map(torch.as_tensor, losses), model.mean, *model.state])
    for captured, eager in zip(*results, strict=True):
        torch.testing.assert_close(
            captured.float().cpu(), eager.float().cpu(), rtol=1e-2, atol=1e-3
        )


class Differences(nn.Module):
    """Assigns its batch, and goes on from a state and a view of a table that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.register_buffer("table", torch.randn(2, 16))
        self.batch, self.state = torch.zeros(8, 16).cuda(), torch.zeros(16).cuda()
        self.row = torch.zeros(16).cuda().expand(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x - self.batch + self.state + self.row)
        self.batch, self.state = x, torch.tanh(self.state + x.detach().float().mean(0))
        self.row = self.table[1].expand(8, 16)
        return output


@pytest.mark.parametrize("reset_every", [1, 3, 100])
@pytest.mark.parametrize("policy", ["O1", "O2"])
def test_replays_write_to_no_batch_and_no_state_of_other_code(
    policy: str, reset_every: int
) -> None:
    results = []
    for capture in (True, False):
        model, initial = Differences().cuda(), torch.zeros(16).cuda()
        step = make_step(model, policy=policy, capture=capture)
        batches = torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(0)).cuda()
        before, losses = batches.clone(), []
        for number, x in enumerate(batches):
            if number % reset_every == 0:
                model.state = initial
            losses.append(step(x, torch.ones_like(x)))
        assert step.captured is capture
        assert torch.equal(batches, before)
        assert not initial.any()
        results.append((torch.stack(losses), model.batch, model.state, model.row))
    for captured, eager in zip(*results, strict=True):
        torch.testing.assert_close(captured.float(), eager.float(), rtol=1e-2, atol=1e-3)


class Resettable(nn.Module):
    """Starts anew if it has no state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x) if self.state is None else self.state
        self.state = torch.tanh(state + x)
        output: torch.Tensor = self.layers(self.state)
        return output


@pytest.mark.parametrize("reset_every", [1, 2, 3, 7])
def test_a_state_that_is_reset_starts_anew(reset_every: int) -> None:
    losses = []
    batches = torch.randn(30, 8, 16, generator=torch.Generator().manual_seed(0)).cuda()
    for capture in (True, False):
        model = Resettable().cuda()
        step = make_step(model, policy="O2", capture=capture)
        for number, x in enumerate(batches):
            if number % reset_every == 0:
                model.state = None
            losses.append(step(x, torch.ones_like(x)))
        assert (step.replays > 15) is capture
    torch.testing.assert_close(
        torch.stack(losses[:30]), torch.stack(losses[30:]), rtol=1e-2, atol=1e-3
    )


class AssignedMean(nn.Module):
    """Assigns a running mean in training, and has a buffer without an address."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("adjacency", torch.eye(16).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().float().mean(0)
        output: torch.Tensor = self.layer(x - self.mean)
        return output


def test_inference_between_captured_steps_reads_the_buffers_that_they_assign() -> None:
    outputs = []
    for capture in ("auto", False):
        torch.manual_seed(0)
        model = AssignedMean().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mezzo.TrainStep(
            model, nn.functional.mse_loss, optimizer, dtype="bfloat16", capture=capture
        )
        evaluate = mezzo.EvalStep(model, capture=capture)
        found = []
        for sizes in ([8] * 6, [4] * 6, [8, 4, 8, 8]):
            for size in sizes:
                step(torch.ones(size, 16, device="cuda"), torch.zeros(size, 16, device="cuda"))
                found.append(evaluate(torch.ones(2, 16, device="cuda")))
        assert step.captured is evaluate.captured is bool(capture)
        outputs.append(torch.stack(found))
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-3)
