"""LAMB and Lion behave as optimizers of torch do. `test_lamb_and_lion.py` checks their updates."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from support.kernel_cases import fresh_seed
from torch import nn

from mezzo import MezzoError
from mezzo.optim.optimizers import LAMB, Lion

pytestmark = pytest.mark.parametrize("optimizer_class", [Lion, LAMB])


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def with_gradient(value: Any, gradient: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.as_tensor(value))
    parameter.grad = torch.as_tensor(gradient)
    return parameter


def test_a_saved_state_continues_bit_for_bit(optimizer_class: type[torch.optim.Optimizer]):
    model = network(seed := fresh_seed())
    optimizer = optimizer_class(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 4, seed=2)

    file.seek(0)
    saved, other = torch.load(file), network(seed + 1)
    resumed = optimizer_class(other.parameters(), lr=0.5)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["weight_decay"] == 0.1
    train(other, resumed, 4, seed=2)
    assert same(weights(other), weights(model)), seed


def test_a_deep_copy_trains_independently(optimizer_class: type[torch.optim.Optimizer]):
    model = network(seed := fresh_seed())
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    other, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, seed=5)
    assert not same(weights(model), weights(other)), seed
    train(other, copied, 2, seed=5)
    assert same(weights(model), weights(other)), seed


def test_a_pickled_state_without_maximize_is_read(optimizer_class: type[torch.optim.Optimizer]):
    optimizer = optimizer_class([with_gradient([1.0], [1.0])])
    state = optimizer.__getstate__()
    del state["param_groups"][0]["maximize"]
    optimizer.__setstate__(state)
    optimizer.step()
    assert optimizer.param_groups[0]["maximize"] is False


def test_maximize_negates_the_gradient(optimizer_class: type[torch.optim.Optimizer]):
    torch.manual_seed(seed := fresh_seed())
    start, gradient = torch.randn(6), torch.randn(6)
    up, down = with_gradient(start.clone(), gradient), with_gradient(start.clone(), -gradient)
    optimizer_class([up], lr=0.1, maximize=True).step()
    optimizer_class([down], lr=0.1).step()
    assert torch.equal(up, down), seed
    assert torch.equal(up.grad, gradient), seed


def test_groups_use_their_own_options(optimizer_class: type[torch.optim.Optimizer]):
    torch.manual_seed(seed := fresh_seed())
    values, gradients = [torch.randn(4) for _ in range(3)], [torch.randn(4) for _ in range(3)]
    settings = [
        {"lr": 0.1, "weight_decay": 0.0},
        {"lr": 0.01, "betas": (0.5, 0.6)},
        {"lr": 0.2, "maximize": True},
    ]

    def parameters() -> list[nn.Parameter]:
        return [
            with_gradient(value.clone(), gradient)
            for value, gradient in zip(values, gradients, strict=True)
        ]

    together, apart = parameters(), parameters()
    optimizers = [
        optimizer_class(
            [
                {"params": [parameter], **setting}
                for parameter, setting in zip(together, settings, strict=True)
            ]
        )
    ]
    optimizers += [
        optimizer_class([parameter], **setting)
        for parameter, setting in zip(apart, settings, strict=True)
    ]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    assert same(together, apart), seed


def test_a_group_added_later_is_updated(optimizer_class: type[torch.optim.Optimizer]):
    first, second = with_gradient([1.0], [1.0]), with_gradient([1.0], [1.0])
    optimizer = optimizer_class([first], lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    optimizer.step()
    assert first.item() < 1.0
    assert second.item() < 1.0


def test_parameters_without_gradients_are_not_changed_and_get_no_state(
    optimizer_class: type[torch.optim.Optimizer],
):
    moved, still, frozen = (
        with_gradient([1.0], [1.0]),
        nn.Parameter(torch.ones(1)),
        nn.Parameter(torch.ones(1), requires_grad=False),
    )
    optimizer = optimizer_class([{"params": [moved, still]}, {"params": [frozen]}], lr=0.1)
    optimizer.step()
    assert moved.item() != 1.0
    assert (still.item(), frozen.item()) == (1.0, 1.0)
    assert set(optimizer.state) == {moved}


def test_empty_and_scalar_parameters_are_updated(optimizer_class: type[torch.optim.Optimizer]):
    parameters = [
        with_gradient(torch.zeros(0), torch.zeros(0)),
        with_gradient(2.0, 1.0),
        with_gradient(torch.ones(2, 3), torch.ones(2, 3)),
    ]
    optimizer = optimizer_class(parameters, lr=0.1)
    optimizer.step()
    assert parameters[0].shape == (0,)
    assert parameters[1].shape == ()
    assert parameters[1].item() < 2.0
    assert bool((parameters[2] < 1.0).all())


def test_parameters_of_several_dtypes_are_updated_in_their_dtype(
    optimizer_class: type[torch.optim.Optimizer],
):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    parameters = [
        with_gradient(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)) for dtype in dtypes
    ]
    optimizer = optimizer_class(parameters, lr=0.125, weight_decay=0.0)
    optimizer.step()
    for parameter, dtype in zip(parameters, dtypes, strict=True):
        assert optimizer.state[parameter]["exp_avg"].dtype is dtype
        assert torch.allclose(
            parameter.double(), torch.full((3,), 0.875, dtype=torch.float64), atol=2e-3
        )


def test_a_moment_has_the_strides_of_its_parameter(optimizer_class: type[torch.optim.Optimizer]):
    value = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    parameter = with_gradient(value, torch.randn_like(value))
    optimizer = optimizer_class([parameter])
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_learning_rate_may_be_a_tensor(
    optimizer_class: type[torch.optim.Optimizer], shape: tuple[int, ...], dtype: torch.dtype
):
    model, other = network(seed := fresh_seed()), network(seed)
    train(model, optimizer_class(model.parameters(), lr=0.03, weight_decay=0.1), 5)
    train(
        other,
        optimizer_class(
            other.parameters(), lr=torch.full(shape, 0.03, dtype=dtype), weight_decay=0.1
        ),
        5,
    )
    for got, wanted in zip(weights(other), weights(model), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, msg=str(seed))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_schedulers_change_the_learning_rate(
    optimizer_class: type[torch.optim.Optimizer], lr: float | torch.Tensor
):
    parameter = with_gradient([1.0], [1.0])
    optimizer = optimizer_class(
        [parameter], lr=lr.clone() if isinstance(lr, torch.Tensor) else lr, weight_decay=0.0
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    optimizer.step()
    moved = parameter.item()
    scheduler.step()
    optimizer.step()
    assert moved < 1.0
    assert parameter.item() == moved


def test_a_closure_is_called_once_with_gradients_on(optimizer_class: type[torch.optim.Optimizer]):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optimizer_class([parameter], lr=0.1)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert (calls, loss.item()) == ([True], 2.0)
    assert bool((parameter < 1.0).all())


def test_step_hooks_run_once(optimizer_class: type[torch.optim.Optimizer]):
    optimizer, calls = optimizer_class([with_gradient([1.0], [1.0])]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"]


def test_entries_of_other_code_in_the_state_are_kept(optimizer_class: type[torch.optim.Optimizer]):
    parameter, plain = with_gradient([1.0], [1.0]), with_gradient([1.0], [1.0])
    optimizer = optimizer_class([parameter])
    optimizer.state[parameter]["note"] = 1
    for each in (optimizer, optimizer_class([plain])):
        each.step()
    assert torch.equal(parameter, plain)
    assert optimizer.state[parameter]["note"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"lr=-0\.1: it must be at least 0"),
        ({"lr": math.nan}, r"lr=nan: it must be at least 0"),
        (
            {"lr": torch.tensor([0.1, 0.2])},
            r"lr=a tensor of 2 elements: it must be a number .* or a tensor that holds one",
        ),
        (
            {"betas": (0.9, 1.0)},
            r"betas=\(0\.9, 1\.0\): it must be two numbers, each at least 0 and below 1",
        ),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"weight_decay": -1.0}, r"weight_decay=-1\.0: it must be at least 0"),
    ],
)
def test_invalid_options_are_refused_with_the_allowed_values(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], message: str
):
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=f"{optimizer_class.__name__} got .*{message}"):
        optimizer_class([parameter], **options)
    optimizer = optimizer_class([parameter])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **options})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused(optimizer_class: type[torch.optim.Optimizer]):
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        MezzoError,
        match=rf"{optimizer_class.__name__} takes dense real gradients, got a sparse .*=False",
    ):
        optimizer_class(embedding.parameters()).step()


def test_complex_gradients_are_refused(optimizer_class: type[torch.optim.Optimizer]):
    parameter = with_gradient(
        torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)
    )
    with pytest.raises(MezzoError, match=r"got a complex one.*view_as_real"):
        optimizer_class([parameter]).step()
    assert parameter.tolist() == [1.0, 1.0]
