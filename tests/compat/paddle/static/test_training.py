"""Training a static program: `minimize`, masters, clipping, and the policy of its precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mezzo
from mezzo.compat import paddle
from mezzo.compat.paddle import static
from mezzo.compat.paddle.static import _executor, _training
from mezzo.compat.paddle.static._training import GRAY, Precision
from mezzo.optim.companion import has_companion
from mezzo.policy.presets.paddle import NAMES

X = np.ones((2, 4), dtype=np.float32)


def record_program(optimizer_class=paddle.optimizer.SGD, **options):
    """Record a program and return its model, loss and optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    loss = model(static.data("x", [-1, 4])).square().mean()
    optimizer = optimizer_class(learning_rate=0.1, parameters=model.parameters(), **options)
    return model, loss, optimizer


def test_a_run_equals_a_step_of_eager_training(exe, program):
    model, loss, optimizer = record_program(paddle.optimizer.Momentum)
    optimizer.minimize(loss)
    for _ in range(3):
        exe.run(program, feed={"x": X}, fetch_list=[loss])
    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        plain_optimizer.zero_grad()
        plain(torch.from_numpy(X)).square().mean().backward()
        plain_optimizer.step()
    assert torch.equal(model.weight, plain.weight)


def test_minimize_takes_a_function_that_builds_the_loss(exe, program):
    model = nn.Linear(4, 1)
    static.data("data", [-1, 4])
    static.data("label", [-1, 1])

    def loss(data, label):
        return F.mse_loss(model(data), label)

    paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()).minimize(loss)
    feed = {"data": X, "label": np.zeros((2, 1), dtype=np.float32)}
    (first,), (second,), (third,) = (
        exe.run(program, feed=feed, fetch_list=[key]) for key in (loss, "loss", loss.name)
    )
    assert third < second < first


def test_a_function_with_unknown_parameters_or_without_a_loss_raises():
    model, _, optimizer = record_program()
    with pytest.raises(
        ValueError,
        match=r"The function takes target, and the program has no static.data of that name",
    ):
        optimizer.minimize(lambda target: model(target).mean())
    with pytest.raises(
        TypeError, match="The function returned float, not a loss computed from its arguments"
    ):
        optimizer.minimize(lambda x: 0.5)


@pytest.mark.parametrize(
    ("make_loss", "message"),
    [
        (lambda x, model: x, r"The loss.shape should be \[\], but .*is \[-1, 4\].*paddle.mean"),
        (lambda x, model: x.mean(), "does not depend on any parameter of the optimizer"),
        (lambda x, model: nn.Linear(4, 1)(x).mean(), "Pass the parameters of the network"),
        (lambda x, model: model.requires_grad_(False)(x).mean(), "that needs a gradient"),
    ],
    ids=["shape", "no parameters", "another model", "frozen"],
)
def test_a_loss_that_cannot_be_minimized_raises(make_loss, message, program):
    model = nn.Linear(4, 1)
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.minimize(make_loss(static.data("x", [-1, 4]), model))
    assert program.trainer is None


def test_a_run_on_another_place_than_the_first_raises(exe, program, monkeypatch):
    _, loss, optimizer = record_program()
    optimizer.minimize(loss)
    exe.run(program, feed={"x": X})
    monkeypatch.setattr(exe, "_device", torch.device("meta"))
    with pytest.raises(ValueError, match=r"parameters of this program are on Place\(cpu\)"):
        exe.run(program, feed={"x": X})


@pytest.mark.parametrize("is_trained", [True, False])
def test_parameters_move_to_the_executors_place(is_trained, monkeypatch, exe, program):
    moved = []
    for module in (_executor, _training):
        monkeypatch.setattr(
            module, "move_tensors", lambda tensors, device: moved.extend([*tensors, device])
        )
    model, loss, optimizer = record_program()
    if is_trained:
        optimizer.minimize(loss)
    exe.run(program, feed={"x": X}, fetch_list=[loss])
    assert {id(model.weight), id(model.bias)} <= {id(one) for one in moved}
    assert moved[-1] == torch.device("cpu")


def test_a_skipped_step_changes_neither_parameters_nor_statistics(exe, program):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    loss = model(static.data("x", [-1, 4])).mean()
    optimizer = static.amp.decorate(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()),
        init_loss_scaling=8.0,
    )
    optimizer.minimize(loss)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exe.run(program, feed={"x": np.full((2, 4), np.inf, dtype=np.float32)})
    assert optimizer.get_loss_scaling() == 4.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradients_are_clipped_to_a_global_norm(exe, program):
    model, loss, optimizer = record_program(grad_clip=paddle.nn.ClipGradByGlobalNorm(0.5))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    static.amp.decorate(optimizer, init_loss_scaling=8.0).minimize(loss)
    exe.run(program, feed={"x": 10 * X})
    moved = torch.cat(
        [(new - old).flatten() for new, old in zip(model.parameters(), before, strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.05, rel=1e-3)


def test_other_clipping_with_loss_scaling_raises(exe, program):
    _, loss, optimizer = record_program(grad_clip=paddle.nn.ClipGradByValue(0.5))
    static.amp.decorate(optimizer).minimize(loss)
    with pytest.raises(
        ValueError,
        match=r"ClipGradByValue.* clips gradients that are still scaled.*ClipGradByGlobalNorm",
    ):
        exe.run(program, feed={"x": X})


@pytest.mark.parametrize(
    ("kwargs", "has_masters"),
    [
        ({"level": "O2"}, True),
        ({"level": "O2", "master_weight": False}, False),
        ({"use_pure_fp16": True, "use_fp16_guard": False}, False),
    ],
    ids=str,
)
def test_each_signature_keeps_masters_by_its_own_default(kwargs, has_masters, exe, program):
    model, loss, optimizer = record_program()
    static.amp.decorate(optimizer, init_loss_scaling=8.0, **kwargs).minimize(loss)
    exe.run(program, feed={"x": X})
    assert model.weight.dtype is torch.float16
    assert any(map(has_companion, optimizer.state_dict()["state"].values())) is has_masters


def test_multi_precision_keeps_masters_in_the_older_signature(exe, program):
    _, loss, optimizer = record_program(multi_precision=True)
    static.amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False).minimize(loss)
    exe.run(program, feed={"x": X})
    assert any(map(has_companion, optimizer.state_dict()["state"].values()))


def test_the_last_optimizer_that_minimizes_trains(exe, program):
    model, loss, first = record_program()
    first.minimize(loss)
    paddle.optimizer.SGD(learning_rate=0.0, parameters=model.parameters()).minimize(loss)
    before = model.weight.detach().clone()
    exe.run(program, feed={"x": X})
    assert torch.equal(model.weight, before)


def test_fetching_other_variables_continues_the_same_training(exe, program):
    model, loss, optimizer = record_program(paddle.optimizer.Adam)
    optimizer.minimize(loss)
    squared = loss * loss
    (first,) = exe.run(program, feed={"x": X}, fetch_list=[loss])
    second, second_squared = exe.run(program, feed={"x": X}, fetch_list=[loss, squared])
    assert second < first
    assert second_squared == pytest.approx(second * second)
    assert optimizer.state[model.weight]["step"] == 2


def output_dtypes(precision: Precision, **calls):
    with mezzo.autocast("cpu", policy=precision.policy):
        return {name: call().dtype for name, call in calls.items()}


def test_at_o1_ops_in_no_list_are_float32_and_gray_ops_follow_their_inputs():
    half = torch.ones(2, 2, dtype=torch.float16)
    dtypes = output_dtypes(
        Precision("O1"),
        linear=lambda: F.linear(torch.ones(2, 2), torch.ones(2, 2)),
        relu=lambda: half.relu(),
        sin=lambda: half.sin(),
        exp=lambda: half.exp(),
    )
    assert dtypes == {
        "linear": torch.float16,
        "relu": torch.float16,
        "sin": torch.float32,
        "exp": torch.float32,
    }


def test_with_promotion_ops_in_no_list_run_as_in_eager_mode():
    assert output_dtypes(
        Precision("O1", promote=True), sin=lambda: torch.ones(2, dtype=torch.float16).sin()
    ) == {"sin": torch.float16}


def test_at_o2_ops_in_no_list_are_16_bit_unless_they_promote():
    ones = torch.ones(2)
    assert output_dtypes(Precision("O2"), add=lambda: ones + ones, exp=lambda: ones.exp()) == {
        "add": torch.float16,
        "exp": torch.float16,
    }
    assert output_dtypes(Precision("O2", promote=True), add=lambda: ones + ones) == {
        "add": torch.float32
    }


def test_custom_lists_override_the_gray_list():
    ones = torch.ones(2)
    dtypes = output_dtypes(
        Precision("O1", half=frozenset({"add"}), full=frozenset({"relu"})),
        add=lambda: ones + ones,
        relu=lambda: ones.half().relu(),
    )
    assert dtypes == {"add": torch.float16, "relu": torch.float32}


def test_every_op_of_the_gray_list_is_known():
    assert set(GRAY.split()) <= NAMES.known.keys()


@pytest.mark.parametrize(
    ("precision", "feed_dtype"),
    [
        (Precision(), None),
        (Precision("O1"), None),
        (Precision("O2"), torch.float16),
        (Precision("O2", guarded=True), None),
        (Precision("O2", "bfloat16"), torch.bfloat16),
    ],
    ids=["O0", "O1", "O2", "guarded", "bfloat16"],
)
def test_feeds_are_cast_if_the_whole_program_is_16_bit(precision, feed_dtype):
    assert precision.feed_dtype is feed_dtype


def test_norms_black_list_ops_and_calls_outside_the_guard_keep_float32_parameters(program):
    norm, table, linear, guarded = (
        nn.LayerNorm(4),
        nn.Embedding(3, 4),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
    )
    x = linear(norm(table(static.data("x", [2], "int64"))))
    with static.amp.fp16_guard():
        guarded(x)

    def ids(tensors):
        return {id(tensor) for tensor in tensors}

    expected = [*norm.parameters(), *table.parameters()]
    assert ids(Precision("O2").full_tensors(program.nodes)) == ids(expected)
    expected += linear.parameters()
    assert ids(Precision("O2", guarded=True).full_tensors(program.nodes)) == ids(expected)


def test_an_optimizer_of_static_mode_finds_the_parameters_of_the_program(exe, program):
    layer, other = paddle.nn.Linear(4, 1).to("cpu"), paddle.nn.Linear(4, 1)
    layer.bias.stop_gradient = True
    paddle.enable_static()
    try:
        optimizer = paddle.optimizer.Momentum(learning_rate=0.1)
    finally:
        paddle.disable_static()
    loss = layer(static.data("x", [-1, 4])).square().mean()
    static.amp.decorate(optimizer, init_loss_scaling=8.0).minimize(loss)
    (parameter,) = optimizer.param_groups[0]["params"]
    assert parameter is layer.weight
    losses = [exe.run(program, feed={"x": X}, fetch_list=[loss])[0] for _ in range(3)]
    assert losses[-1] < losses[0]
    paddle.amp.decorate(other, level="O2")
    assert other.weight.dtype is torch.float16
    with pytest.raises(AttributeError, match=r"should not be None. Pass parameters="):
        paddle.optimizer.SGD(learning_rate=0.1)
