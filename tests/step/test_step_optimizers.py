"""Optimizers of a training step: Muon with AdamW, others by hand, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_graphs import fake_captures, use_capture
from support.step_models import Made, Mlp, batches, boosted, same, weights
from torch import nn

import mezzo
from mezzo.optim.binding import OptimizerBinding, optimizer_binding

# -- optimizers that cannot step without arguments -------------------------------------------------


class NeedsLoss(torch.optim.SGD):
    def step(self, *, loss: torch.Tensor) -> None:  # type: ignore[override]
        raise AssertionError(loss)


class TakesAnything(torch.optim.SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


def with_train_step(model: nn.Module, optimizer: Any, level: str) -> Any:
    return mezzo.train_step(models=model, optimizers=optimizer, policy=level)(
        lambda x: model(x).sum()
    )


def with_class(model: nn.Module, optimizer: Any, level: str) -> Any:
    return mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, level)


@pytest.mark.parametrize("make", [with_class, with_train_step])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("optimizer_class", "argument"), [(torch.optim.LBFGS, "closure"), (NeedsLoss, "loss")]
)
def test_an_optimizer_that_needs_a_closure_is_refused_and_nothing_changes(
    make: Callable[..., Any], level: str, optimizer_class: Any, argument: str
) -> None:
    model = Mlp()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    companion = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    before = (dict(vars(optimizer)), dict(vars(companion)), dict(vars(model)))
    with pytest.raises(
        mezzo.UnsupportedError,
        match=rf"{optimizer_class.__name__}\.step\(\) needs its argument '{argument}'",
    ):
        make(model, [companion, optimizer], level)
    assert (dict(vars(optimizer)), dict(vars(companion)), dict(vars(model))) == before
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_an_optimizer_whose_step_takes_any_arguments_is_accepted() -> None:
    made = Made("mlp")
    made.optimizer = TakesAnything(made.model.parameters(), lr=0.1)
    step = mezzo.TrainStep(made.model, boosted, made.optimizer, "O2", dtype="bfloat16")
    losses = [float(step(*batch)) for batch in batches("mlp", 2)]
    assert losses[0] > 0


# -- Muon with AdamW -------------------------------------------------------------------------------


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for parameter in model.parameters():
        (matrices if parameter.dim() == 2 else others).append(parameter)
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01)]


def muon_step(level: str, dtype: str, **options: Any) -> tuple[nn.Module, mezzo.TrainStep]:
    made = Made("mlp")
    optimizers = muon_and_adamw(made.model)
    return made.model, mezzo.TrainStep(
        made.model, boosted, optimizers, level, dtype=dtype, **options
    )


@pytest.mark.parametrize(
    ("level", "dtype"), [("O1", "bfloat16"), ("O2", "bfloat16"), ("O2", "float16")]
)
def test_muon_trains_matrices_and_adamw_the_other_parameters(level: str, dtype: str) -> None:
    _, step = muon_step(level, dtype, clip_norm=1.0)
    (batch,) = batches("mlp", 1)
    losses = [float(step(*batch)) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    float32 = Made("mlp")
    optimizers = muon_and_adamw(float32.model)
    for _ in range(12):
        loss = boosted(float32.model(batch[0]), *batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(optimizers[0].param_groups[0]["params"], 1.0)
        nn.utils.clip_grad_norm_(optimizers[1].param_groups[0]["params"], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] == pytest.approx(float(loss.detach()), abs=0.05)


def test_an_overflow_skips_both_optimizers() -> None:
    model, step = muon_step("O2", "float16")
    for place, batch in enumerate(batches("mlp", 4, overflows=(3,))):
        before = weights(model)
        step(*batch)
        assert step.skipped == (place == 3)
        assert same(before, weights(model)) == (place == 3)


def test_captured_steps_of_muon_and_adamw_equal_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    capturer = fake_captures(monkeypatch)
    runs = []
    for captured in (True, False):
        model, step = muon_step("O2", "bfloat16", capture=False)
        if captured:
            use_capture(step)
        muon = step.optimizer[0]
        losses = []
        for place, batch in enumerate(batches("mlp", 8)):
            muon.param_groups[0]["lr"] = 0.05 if place < 6 else 0.01
            losses.append(float(step(*batch)))
        runs.append((losses, weights(model)))
    assert [graph.replays for graph in capturer.graphs] == [5]
    assert same(*runs)


def test_a_step_of_muon_and_adamw_resumes_bit_for_bit() -> None:
    data = list(batches("mlp", 6))
    runs = []
    for resumes in (False, True):
        model, step = muon_step("O2", "bfloat16")
        for place, batch in enumerate(data):
            if resumes and place == 3:
                saved = step.state_dict()
                model, step = muon_step("O2", "bfloat16")
                step.load_state_dict(saved)
            step(*batch)
        runs.append(weights(model))
    assert same(*runs)


# -- optimizers that are not torch's ---------------------------------------------------------------


class SignMomentum(torch.optim.Optimizer):
    """An optimizer by hand, with a state and a host read."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    assert parameter.grad.dtype is torch.float32
                    momentum = self.state[parameter].setdefault(
                        "momentum", torch.zeros_like(parameter)
                    )
                    momentum.mul_(0.9).add_(parameter.grad)
                    if float(momentum.abs().sum()) > 0:
                        parameter.sub_(group["lr"] * momentum.sign())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_by_hand_steps_after_unscale(level: str) -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = SignMomentum(model.parameters())
    mezzo.decorate(model, optimizer, level, dtype="float16")
    scaler = mezzo.GradScaler("cpu", init_scale=2.0**16)
    if level == "O2":
        assert type(optimizer_binding(optimizer)) is OptimizerBinding
    # Below float16's smallest number: unscaled in float16 the gradients would be zero.
    scaler.scale(model(torch.ones(1, 4)).float().sum() * 2.0**-26).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.dtype is torch.float32
    assert torch.equal(model.weight.grad, torch.full((3, 4), 2.0**-26))
    before = mezzo.master_params(model)["weight"].clone()
    assert not scaler.step(optimizer).skipped
    scaler.update()
    after = mezzo.master_params(model)["weight"]
    assert torch.allclose(before - after, torch.full((3, 4), 0.01))
    assert optimizer.state[model.weight]["momentum"].dtype is torch.float32
    scaler.scale(model(torch.ones(1, 4)).float().sum() * torch.inf).backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer).skipped
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(after, mezzo.master_params(model)["weight"])
