"""`paddle.DataParallel` in one process and in a group of two."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.processes import run_ranks
from torch import distributed, nn

from mezzo.compat import paddle


def train_wrapped(rank):
    """Train in a group of two; return the last gradient and the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    model, optimizer = paddle.amp.decorate(models=model, optimizers=optimizer, level="O2")
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    dp_model = paddle.DataParallel(model)
    with dp_model.no_sync():
        pass
    for _ in range(3):
        with paddle.amp.auto_cast(level="O2"):
            loss = dp_model(torch.full((2, 4), float(1 + rank))).sum()
        scaler.scale(loss).backward()
        gradient = model.weight.grad.tolist()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
    return {"gradient": gradient, "state": dict(dp_model.state_dict())}


@pytest.fixture
def group_of_one(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_parameters_state_dict_and_outputs_are_the_models():
    model = nn.Linear(2, 1)
    wrapped = paddle.DataParallel(model)
    x = torch.ones(3, 2)
    assert torch.equal(wrapped(x), model(x))
    assert list(wrapped.state_dict()) == ["weight", "bias"]
    assert all(
        wrapped_parameter is parameter
        for wrapped_parameter, parameter in zip(
            wrapped.parameters(), model.parameters(), strict=True
        )
    )
    wrapped.set_state_dict({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)})
    assert not wrapped(x).any()


def test_losses_and_gradients_are_unchanged():
    wrapped, loss = paddle.DataParallel(nn.Linear(2, 1)), torch.tensor(2.0)
    assert wrapped.scale_loss(loss) is loss
    assert wrapped.apply_collective_grads() is None
    assert isinstance(wrapped.no_sync(), contextlib.nullcontext)


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_process_is_not_distributed():
    wrapped = paddle.DataParallel(nn.Linear(2, 1))
    wrapped(torch.ones(1, 2)).sum().backward()
    assert isinstance(wrapped.no_sync(), contextlib.nullcontext)


def test_a_wrapped_decorated_model_trains():
    model = nn.Linear(4, 1)
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    model, optimizer = paddle.amp.decorate(
        models=model, optimizers=optimizer, level="O2", dtype="bfloat16"
    )
    wrapped, before = paddle.DataParallel(model), model.weight.detach().clone()
    with paddle.amp.auto_cast(level="O2", dtype="bfloat16"):
        wrapped(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.slow
def test_two_processes_average_their_gradients():
    first, second = run_ranks(2, train_wrapped)
    # Two rows of 1 on rank 0 and of 2 on rank 1, scaled by 8: 16 and 32, averaged to 24.
    assert first["gradient"] == second["gradient"] == [[24.0] * 4]
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
