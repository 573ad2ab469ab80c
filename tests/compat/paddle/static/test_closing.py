"""`minimize` closes a program, and every run trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import static
from mezzo.optim.master_weights import has_companion

X = np.ones((2, 4), dtype=np.float32)


def written(optimizer=paddle.optimizer.SGD, **words):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    loss = model(static.data("x", [-1, 4])).square().mean()
    return model, loss, optimizer(learning_rate=0.1, parameters=model.parameters(), **words)


def test_a_run_is_a_step_of_eager_training(exe, program):
    model, loss, optimizer = written(paddle.optimizer.Momentum)
    optimizer.minimize(loss)
    for _ in range(3):
        exe.run(program, feed={"x": X}, fetch_list=[loss])
    torch.manual_seed(0)
    plain = nn.Linear(4, 1)
    stepping = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        stepping.zero_grad()
        plain(torch.from_numpy(X)).square().mean().backward()
        stepping.step()
    assert torch.equal(model.weight, plain.weight)


def test_a_function_that_builds_the_loss_is_a_program(exe, program):
    model = nn.Linear(4, 1)
    static.data("data", [-1, 4])
    static.data("label", [-1, 1])

    def loss(data, label):
        return F.mse_loss(model(data), label)

    paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()).minimize(loss)
    feed = {"data": X, "label": np.zeros((2, 1), dtype=np.float32)}
    (first,), (second,), (third,) = (
        exe.run(program, feed=feed, fetch_list=[word]) for word in (loss, "loss", loss.name)
    )
    assert third < second < first


def test_a_function_that_takes_what_is_not_fed_is_refused():
    model, _, optimizer = written()
    with pytest.raises(
        ValueError,
        match=r"The function takes target, and the program has no static.data of that name",
    ):
        optimizer.minimize(lambda target: model(target).mean())
    with pytest.raises(
        TypeError, match="The function gave float, not a loss computed from what is fed"
    ):
        optimizer.minimize(lambda x: 0.5)


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
    model, loss, optimizer = written(grad_clip=paddle.nn.ClipGradByGlobalNorm(0.5))
    before = [one.detach().clone() for one in model.parameters()]
    static.amp.decorate(optimizer, init_loss_scaling=8.0).minimize(loss)
    exe.run(program, feed={"x": 10 * X})
    moved = torch.cat(
        [(one - old).flatten() for one, old in zip(model.parameters(), before, strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.05, rel=1e-3)


def test_other_clipping_is_refused_where_gradients_are_scaled(exe, program):
    _, loss, optimizer = written(grad_clip=paddle.nn.ClipGradByValue(0.5))
    static.amp.decorate(optimizer).minimize(loss)
    with pytest.raises(
        ValueError,
        match=r"ClipGradByValue.* clips gradients that are still scaled.*ClipGradByGlobalNorm",
    ):
        exe.run(program, feed={"x": X})


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ({"level": "O2"}, True),
        ({"level": "O2", "master_weight": False}, False),
        ({"use_pure_fp16": True, "use_fp16_guard": False}, False),
    ],
    ids=str,
)
def test_masters_are_kept_as_the_signature_says(words, kept, exe, program):
    model, loss, optimizer = written()
    static.amp.decorate(optimizer, init_loss_scaling=8.0, **words).minimize(loss)
    exe.run(program, feed={"x": X})
    assert model.weight.dtype is torch.float16
    assert any(map(has_companion, optimizer.state_dict()["state"].values())) is kept


def test_multi_precision_keeps_masters_in_the_older_signature(exe, program):
    _, loss, optimizer = written(multi_precision=True)
    static.amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False).minimize(loss)
    exe.run(program, feed={"x": X})
    assert any(map(has_companion, optimizer.state_dict()["state"].values()))


def test_the_last_optimizer_trains(exe, program):
    model, loss, first = written()
    first.minimize(loss)
    paddle.optimizer.SGD(learning_rate=0.0, parameters=model.parameters()).minimize(loss)
    before = model.weight.detach().clone()
    exe.run(program, feed={"x": X})
    assert torch.equal(model.weight, before)


def test_another_fetch_goes_on_with_the_same_training(exe, program):
    model, loss, optimizer = written(paddle.optimizer.Adam)
    optimizer.minimize(loss)
    squared = loss * loss
    (one,) = exe.run(program, feed={"x": X}, fetch_list=[loss])
    other, both = exe.run(program, feed={"x": X}, fetch_list=[loss, squared])
    assert other < one
    assert both == pytest.approx(other * other)
    assert optimizer.state[model.weight]["step"] == 2
