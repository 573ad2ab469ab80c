"""`paddle.optimizer`: arguments, methods and 16-bit parameters; each class steps as torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat import paddle
from mezzo.compat.paddle.amp._decorate import optimizers_of_models
from mezzo.optim.fused_algorithms import ALGORITHMS, algorithm_name


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def optimizer(weight):
    return paddle.optimizer.SGD(learning_rate=0.5, parameters=[weight])


@pytest.mark.parametrize(
    ("kwargs", "gradient"),
    [({}, [0.0, 0.0]), ({"set_to_zero": True}, [0.0, 0.0]), ({"set_to_zero": False}, None)],
    ids=str,
)
def test_clear_grad_zeroes_or_removes_gradients(kwargs, gradient, weight, optimizer):
    weight.sum().backward()
    optimizer.clear_grad(**kwargs)
    assert (weight.grad if weight.grad is None else weight.grad.tolist()) == gradient


def test_minimize_steps_with_the_existing_gradients(weight, optimizer):
    loss = weight.sum()
    loss.backward()
    _, pairs = optimizer.minimize(loss)
    assert weight.tolist() == [0.5, 0.5]
    assert [gradient.tolist() for _, gradient in pairs] == [[1.0, 1.0]]


def test_minimize_raises_for_a_loss_that_is_no_tensor(optimizer):
    with pytest.raises(AssertionError, match="The loss should be a Tensor, got float"):
        optimizer.minimize(0.5)


def test_the_learning_rate_can_be_read_and_set(optimizer):
    assert optimizer.get_lr() == 0.5
    optimizer.set_lr(0.25)
    assert (optimizer.get_lr(), optimizer.param_groups[0]["lr"]) == (0.25, 0.25)
    with pytest.raises(
        TypeError, match=r"The type of 'value' in optimizer.set_lr must be float, but received str"
    ):
        optimizer.set_lr("0.1")


def test_torch_schedulers_set_the_learning_rate(optimizer, weight):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    weight.sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.get_lr() == pytest.approx(0.05)


def test_a_groups_learning_rate_is_a_multiple_of_the_optimizers():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [
        {"params": [first]},
        {
            "params": [second],
            "learning_rate": 0.1,
            "weight_decay": 0.25,
            "beta1": 0.5,
            "epsilon": 1e-3,
        },
    ]
    optimizer = paddle.optimizer.Adam(learning_rate=2.0, parameters=groups)
    options = optimizer.param_groups[1]
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 0.2]
    assert (options["weight_decay"], options["betas"], options["eps"]) == (0.25, (0.5, 0.999), 1e-3)
    optimizer.set_lr(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    assert optimizer.get_lr() == 1.0


class L2Decay:
    coeff = 0.125


def test_a_weight_decay_may_be_a_regularizer(weight):
    assert (
        paddle.optimizer.SGD(
            learning_rate=0.1, parameters=[weight], weight_decay=L2Decay()
        ).param_groups[0]["weight_decay"]
        == 0.125
    )


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
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
            "Unknown options of a parameter group: colour. Allowed are params, learning_rate",
        ),
        (
            {"learning_rate": "fast"},
            TypeError,
            r"learning rate should be float or LRScheduler, got str here.*paddle.optimizer.lr",
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
def test_invalid_arguments_raise(kwargs, error, message, weight):
    with pytest.raises(error, match=message):
        paddle.optimizer.SGD(**{"learning_rate": 0.1, "parameters": [weight], **kwargs})


@pytest.mark.parametrize("order", ["before", "after", "passed"])
@pytest.mark.parametrize(
    "optimizer_class",
    [paddle.optimizer.Adam, paddle.optimizer.Momentum],
    ids=lambda optimizer_class: optimizer_class.__name__,
)
def test_16_bit_parameters_are_stepped_in_float32_whenever_the_optimizer_is_constructed(
    optimizer_class, order
):
    """torch's Adam on float16 parameters divides by 0: square and epsilon both underflow."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = None
    if order != "after":
        optimizer = optimizer_class(learning_rate=0.01, parameters=model.parameters())
    paddle.amp.decorate(
        model, optimizer if order == "passed" else None, level="O2", master_weight=False
    )
    if optimizer is None:
        optimizer = optimizer_class(learning_rate=0.01, parameters=model.parameters())
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


def test_multi_precision_keeps_masters_of_16_bit_parameters():
    weights = {
        multi_precision: nn.Parameter(torch.ones(1, dtype=torch.float16))
        for multi_precision in (True, False)
    }
    for multi_precision, weight in weights.items():
        optimizer = paddle.optimizer.SGD(
            learning_rate=1e-4, parameters=[weight], multi_precision=multi_precision
        )
        for _ in range(20):
            weight.grad = torch.ones(1, dtype=torch.float16)
            optimizer.step()
    assert weights[False].item() == 1.0
    assert weights[True].item() == pytest.approx(0.998, abs=5e-4)


def test_models_find_the_last_optimizers_that_step_only_them():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    replaced = paddle.optimizer.SGD(learning_rate=0.1, parameters=first.parameters())
    last = paddle.optimizer.SGD(learning_rate=0.1, parameters=first.parameters())
    both = paddle.optimizer.SGD(
        learning_rate=0.1, parameters=[*first.parameters(), *second.parameters()]
    )
    assert optimizers_of_models([first]) == [last]
    assert optimizers_of_models([first, second]) == [both]
    assert replaced is not last


def test_set_state_dict_loads_a_torch_state_dict(optimizer, weight):
    other = paddle.optimizer.SGD(learning_rate=0.1, parameters=[weight])
    other.set_state_dict(optimizer.state_dict())
    assert other.get_lr() == 0.5


EQUIVALENTS = {
    "SGD": (
        paddle.optimizer.SGD,
        {"weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    ),
    "Momentum": (
        paddle.optimizer.Momentum,
        {"momentum": 0.8, "use_nesterov": True, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "Adam": (
        paddle.optimizer.Adam,
        {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
    ),
    "AdamW": (
        paddle.optimizer.AdamW,
        {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3},
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.01),
    ),
    "Lamb": (
        paddle.optimizer.Lamb,
        {"lamb_weight_decay": 0.2, "beta1": 0.8, "epsilon": 1e-3},
        lambda p: mezzo.LAMB(p, lr=0.1, betas=(0.8, 0.999), eps=1e-3, weight_decay=0.2),
    ),
    "Adagrad": (
        paddle.optimizer.Adagrad,
        {"epsilon": 1e-3, "initial_accumulator_value": 0.5, "weight_decay": 0.1},
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, eps=1e-3, initial_accumulator_value=0.5, weight_decay=0.1
        ),
    ),
    "Adadelta": (
        paddle.optimizer.Adadelta,
        {"epsilon": 1e-3, "rho": 0.8},
        lambda p: torch.optim.Adadelta(p, lr=0.1, eps=1e-3, rho=0.8),
    ),
    "Adamax": (
        paddle.optimizer.Adamax,
        {"beta1": 0.8, "epsilon": 1e-3},
        lambda p: torch.optim.Adamax(p, lr=0.1, betas=(0.8, 0.999), eps=1e-3),
    ),
    "RMSProp": (
        paddle.optimizer.RMSProp,
        {"rho": 0.8, "epsilon": 1e-3, "momentum": 0.5, "centered": True},
        lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.8, eps=1e-3, momentum=0.5, centered=True),
    ),
}


def trained(make) -> list[float]:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = make([weight])
    for _ in range(3):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    return weight.tolist()


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_an_optimizer_steps_as_its_equivalent(name):
    optimizer_class, options, equivalent = EQUIVALENTS[name]
    assert trained(
        lambda parameters: optimizer_class(learning_rate=0.1, parameters=parameters, **options)
    ) == trained(equivalent)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("Momentum", {"lr": 0.001, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}),
        ("Adam", {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("AdamW", {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
        ("Lamb", {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}),
        ("Adadelta", {"lr": 0.001, "eps": 1e-6, "rho": 0.95}),
    ],
)
def test_default_arguments_are_paddles(name, defaults):
    (group,) = getattr(paddle.optimizer, name)(
        parameters=[nn.Parameter(torch.ones(1))]
    ).param_groups
    assert {key: group[key] for key in defaults} == defaults


@pytest.mark.parametrize("name", ["SGD", "Momentum", "Adam", "AdamW", "Lamb", "Adagrad"])
def test_optimizers_with_a_fused_step_keep_it(name):
    assert (
        algorithm_name(
            getattr(paddle.optimizer, name)(
                learning_rate=0.1, parameters=[nn.Parameter(torch.ones(1))]
            )
        )
        in ALGORITHMS
    )


def test_lamb_excludes_parameters_from_weight_decay():
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = paddle.optimizer.Lamb(
        parameters=[weight, bias], exclude_from_weight_decay_fn=lambda parameter: parameter is bias
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.param_groups[1]["params"] == [bias]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: paddle.optimizer.Momentum(parameters=p, rescale_grad=0.5),
            "rescale_grad=0.5 is not supported. Scale the loss instead",
        ),
        (
            lambda p: paddle.optimizer.AdamW(parameters=p, apply_decay_param_fun=bool),
            "needs names, and a parameter of a torch module has none. Pass groups: parameters=",
        ),
    ],
    ids=["rescale_grad", "apply_decay_param_fun"],
)
def test_unsupported_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(1))])


def test_multi_precision_is_stored():
    optimizer = paddle.optimizer.Adam(
        parameters=[nn.Parameter(torch.ones(1))], multi_precision=True
    )
    assert optimizer._multi_precision


def test_a_regularizer_is_a_weight_decay_and_one_of_a_parameter_comes_first():
    attr = paddle.ParamAttr(learning_rate=0.5, regularizer=paddle.regularizer.L2Decay(0.0))
    layer = paddle.nn.Linear(2, 1, bias_attr=attr)
    optimizer = paddle.optimizer.Momentum(
        learning_rate=0.2,
        parameters=layer.parameters(),
        weight_decay=paddle.regularizer.L2Decay(0.25),
    )
    groups = {id(group["params"][0]): group for group in optimizer.param_groups}
    assert groups[id(layer.weight)]["weight_decay"] == 0.25
    assert groups[id(layer.bias)]["weight_decay"] == 0.0
    assert groups[id(layer.bias)]["lr"] == pytest.approx(0.1)
    optimizer.set_lr(1.0)
    assert groups[id(layer.bias)]["lr"] == 0.5
    assert optimizer.get_lr() == 1.0


def test_adamw_selects_parameters_by_name_and_takes_a_ratio():
    net = paddle.nn.Sequential(paddle.nn.Linear(2, 2), paddle.nn.LayerNorm(2))
    decayed = {net[0].weight.name, net[0].bias.name}
    optimizer = paddle.optimizer.AdamW(
        learning_rate=0.5,
        parameters=net.parameters(),
        weight_decay=0.25,
        apply_decay_param_fun=lambda name: name in decayed,
        lr_ratio=lambda parameter: 0.1 if parameter is net[0].bias else 1.0,
    )
    options = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert options[id(net[0].weight)] == (0.5, 0.25)
    assert options[id(net[0].bias)] == (pytest.approx(0.05), 0.25)
    assert options[id(net[1].weight)] == options[id(net[1].bias)] == (0.5, 0.0)


def test_a_decoupled_weight_decay_refuses_a_regularizer_of_a_parameter():
    attr = paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(0.5))
    layer = paddle.nn.Linear(2, 1, weight_attr=attr)
    with pytest.raises(ValueError, match=r"would add a second weight decay.*Pass groups"):
        paddle.optimizer.AdamW(parameters=layer.parameters())
    without = paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(0.0))
    layer = paddle.nn.Linear(2, 1, weight_attr=without)
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters(), weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5]


def test_lamb_excludes_parameters_of_groups_too():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = paddle.optimizer.Lamb(
        learning_rate=1.0,
        parameters=[{"params": [first], "learning_rate": 0.5}, {"params": [second]}],
        exclude_from_weight_decay_fn=lambda parameter: parameter is second,
    )
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 0.01),
        (1.0, 0.0),
    ]
