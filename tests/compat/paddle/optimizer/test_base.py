"""What every optimizer of Paddle's has beside torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle.amp._decorate import optimizers_of_models


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def optimizer(weight):
    return paddle.optimizer.SGD(learning_rate=0.5, parameters=[weight])


@pytest.mark.parametrize(
    ("words", "gradient"),
    [({}, [0.0, 0.0]), ({"set_to_zero": True}, [0.0, 0.0]), ({"set_to_zero": False}, None)],
    ids=str,
)
def test_clear_grad(words, gradient, weight, optimizer):
    weight.sum().backward()
    optimizer.clear_grad(**words)
    assert (weight.grad if weight.grad is None else weight.grad.tolist()) == gradient


def test_minimize_steps_from_the_gradients_that_are_there(weight, optimizer):
    loss = weight.sum()
    loss.backward()
    _, pairs = optimizer.minimize(loss)
    assert weight.tolist() == [0.5, 0.5]
    assert [gradient.tolist() for _, gradient in pairs] == [[1.0, 1.0]]


def test_minimize_takes_a_loss(optimizer):
    with pytest.raises(AssertionError, match="The loss should be a Tensor, got float"):
        optimizer.minimize(0.5)


def test_the_rate_can_be_read_and_set(optimizer):
    assert optimizer.get_lr() == 0.5
    optimizer.set_lr(0.25)
    assert (optimizer.get_lr(), optimizer.param_groups[0]["lr"]) == (0.25, 0.25)
    with pytest.raises(
        TypeError, match=r"The type of 'value' in optimizer.set_lr must be float, but received str"
    ):
        optimizer.set_lr("0.1")


def test_torchs_schedulers_drive_the_rate(optimizer, weight):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    weight.sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.get_lr() == pytest.approx(0.05)


def test_a_groups_rate_is_a_multiple_of_the_optimizers():
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [
        {"params": [one]},
        {
            "params": [other],
            "learning_rate": 0.1,
            "weight_decay": 0.25,
            "beta1": 0.5,
            "epsilon": 1e-3,
        },
    ]
    optimizer = paddle.optimizer.Adam(learning_rate=2.0, parameters=groups)
    second = optimizer.param_groups[1]
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 0.2]
    assert (second["weight_decay"], second["betas"], second["eps"]) == (0.25, (0.5, 0.999), 1e-3)
    optimizer.set_lr(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    assert optimizer.get_lr() == 1.0


class L2Decay:
    coeff = 0.125


def test_a_decay_is_a_number_or_has_one(weight):
    assert (
        paddle.optimizer.SGD(
            learning_rate=0.1, parameters=[weight], weight_decay=L2Decay()
        ).param_groups[0]["weight_decay"]
        == 0.125
    )


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            {"parameters": None},
            AttributeError,
            "parameters argument given to the Optimizer should not be None",
        ),
        (
            {"parameters": torch.ones(1)},
            TypeError,
            (
                "`parameters` argument given to the optimizer should be an iterable of Tensors, but"
                " got argument type is `Tensor`"
            ),
        ),
        ({"parameters": 3}, TypeError, "but got argument type is `int`"),
        (
            {"parameters": [{"params": [torch.ones(1)], "colour": 3}]},
            ValueError,
            "has colour, which no optimizer here knows",
        ),
        (
            {"learning_rate": "fast"},
            TypeError,
            r"learning rate should be float, got str here.*torch.optim.lr_scheduler",
        ),
        (
            {"weight_decay": "much"},
            TypeError,
            (
                "weight_decay should be float, int or a regularizer with a coefficient, but"
                " received str"
            ),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_refused(words, error, message, weight):
    with pytest.raises(error, match=message):
        paddle.optimizer.SGD(**{"learning_rate": 0.1, "parameters": [weight], **words})


@pytest.mark.parametrize("order", ["before", "after", "named"])
@pytest.mark.parametrize(
    "kind", [paddle.optimizer.Adam, paddle.optimizer.Momentum], ids=lambda kind: kind.__name__
)
def test_16_bit_parameters_are_stepped_in_float32_whenever_the_optimizer_is_made(kind, order):
    """torch's Adam over float16 parameters divides by a square that is 0, and by an epsilon that is 0."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = (
        kind(learning_rate=0.01, parameters=model.parameters()) if order != "after" else None
    )
    paddle.amp.decorate(
        model, optimizer if order == "named" else None, level="O2", master_weight=False
    )
    optimizer = optimizer or kind(learning_rate=0.01, parameters=model.parameters())
    scaler = paddle.amp.GradScaler(init_loss_scaling=8.0)
    for _ in range(3):
        with paddle.amp.auto_cast(level="O2"):
            loss = 1e-3 * model(torch.ones(1, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
    assert model.weight.isfinite().all()
    assert {value.dtype for value in optimizer.state[model.weight].values() if value.dim()} == {
        torch.float32
    }


def test_multi_precision_keeps_masters_of_parameters_that_come_in_16_bits():
    weights = {wanted: nn.Parameter(torch.ones(1, dtype=torch.float16)) for wanted in (True, False)}
    for multi_precision, weight in weights.items():
        optimizer = paddle.optimizer.SGD(
            learning_rate=1e-4, parameters=[weight], multi_precision=multi_precision
        )
        for _ in range(20):
            weight.grad = torch.ones(1, dtype=torch.float16)
            optimizer.step()
    assert weights[False].item() == 1.0
    assert weights[True].item() == pytest.approx(0.998, abs=5e-4)


def test_models_find_the_last_optimizers_that_step_them_alone():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    replaced = paddle.optimizer.SGD(learning_rate=0.1, parameters=one.parameters())
    last = paddle.optimizer.SGD(learning_rate=0.1, parameters=one.parameters())
    both = paddle.optimizer.SGD(
        learning_rate=0.1, parameters=[*one.parameters(), *other.parameters()]
    )
    assert optimizers_of_models([one]) == [last]
    assert optimizers_of_models([one, other]) == [both]
    assert replaced is not last


def test_a_state_is_torchs(optimizer, weight):
    other = paddle.optimizer.SGD(learning_rate=0.1, parameters=[weight])
    other.set_state_dict(optimizer.state_dict())
    assert other.get_lr() == 0.5
