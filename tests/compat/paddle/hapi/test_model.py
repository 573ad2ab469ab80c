"""`Model`, batch by batch, and what it saves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat import paddle

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def model(amp_configs=None, metrics=None, **words):
    torch.manual_seed(0)
    made = paddle.Model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    made.prepare(
        paddle.optimizer.Adam(learning_rate=0.05, parameters=made.parameters(), **words),
        nn.MSELoss(),
        metrics,
        amp_configs=amp_configs,
    )
    return made


@pytest.mark.parametrize(
    ("level", "dtype"), [(None, torch.float32), ("O1", torch.float32), ("O2", torch.float16)]
)
def test_it_trains_at_every_level(level, dtype):
    made = model(level)
    losses = [made.train_batch([X], [Y])[0] for _ in range(40)]
    assert losses[-1] < losses[0] / 4
    assert {parameter.dtype for parameter in made.parameters()} == {dtype}


def test_gradients_add_up_until_an_update():
    made, whole = model(), model()
    made.train_batch([X[:8]], [Y[:8]], update=False)
    made.train_batch([X[8:]], [Y[8:]])
    whole._optimizer.zero_grad()
    (2 * nn.MSELoss()(whole.network(X), Y)).backward()
    whole._optimizer.step()
    assert torch.allclose(made.network[0].weight, whole.network[0].weight, atol=1e-6)


def test_scaling_is_as_configured():
    made = model({"level": "O1", "init_loss_scaling": 8.0, "incr_every_n_steps": 1})
    made.train_batch([X], [Y])
    assert made._scaler.state_dict()["scale"].item() == 16.0


def test_a_custom_list_holds():
    made = model({"level": "O1", "custom_black_list": {"linear_v2"}})
    assert made.predict_batch([X])[0].dtype == np.float32
    assert model("O1").predict_batch([X])[0].dtype == np.float16


def test_metrics_come_beside_the_loss():
    torch.manual_seed(0)
    made = paddle.Model(nn.Linear(4, 2))
    made.prepare(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=made.parameters()),
        nn.CrossEntropyLoss(),
        paddle.metric.Accuracy(),
    )
    (loss,), (accuracy,) = made.train_batch([X], [(X.sum(1) > 0).long()])
    assert loss > 0
    assert 0 <= accuracy <= 1
    assert len(made.eval_batch([X], [(X.sum(1) > 0).long()])) == 2


def test_evaluation_changes_nothing_and_leaves_training_to_training():
    made = model()
    before = made.network[0].weight.detach().clone()
    made.eval_batch([X], [Y])
    assert torch.equal(made.network[0].weight, before)
    assert not made.network.training
    made.train_batch([X], [Y])
    assert made.network.training


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_training_goes_on_from_what_was_saved(level, tmp_path):
    one, other = model(level), model(level)
    for _ in range(3):
        one.train_batch([X], [Y])
    one.save(tmp_path / "run" / "checkpoint")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint.pdopt",
        "checkpoint.pdparams",
    ]
    other.load(tmp_path / "run" / "checkpoint")
    other._scaler.load_state_dict(one._scaler.state_dict())
    assert [one.train_batch([X], [Y]) for _ in range(3)] == [
        other.train_batch([X], [Y]) for _ in range(3)
    ]


def test_loading_can_leave_out_what_does_not_fit(tmp_path):
    one = model()
    one.save(tmp_path / "a")
    other = paddle.Model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    other.prepare(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=other.parameters()), nn.MSELoss()
    )
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load(tmp_path / "a")
    other.load(tmp_path / "a", skip_mismatch=True, reset_optimizer=True)
    assert torch.equal(other.network[0].weight, one.network[0].weight)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            {"loss": 3},
            TypeError,
            "'loss' must be a torch.nn.Module or any callable function, got int",
        ),
        ({"metrics": ["acc"]}, AssertionError, "str is not sub class of Metric"),
        (
            {"amp_configs": {"level": "O2", "init_loss_scaling": -1.0}},
            ValueError,
            "positive finite",
        ),
        (
            {"amp_configs": {"level": "O2", "custom_white_list": "conv2d"}},
            TypeError,
            "should be a set of op names",
        ),
    ],
    ids=["loss", "metric", "scale", "list"],
)
def test_what_is_refused_changes_nothing(words, error, message):
    made = paddle.Model(nn.Linear(4, 1))
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=made.parameters())
    with pytest.raises(error, match=message):
        made.prepare(optimizer, **words)
    assert made.network.weight.dtype is torch.float32


def test_an_unprepared_model_does_not_train():
    with pytest.raises(
        RuntimeError,
        match=r"not prepared for training. Call model.prepare\(optimizer, loss\) first",
    ):
        paddle.Model(nn.Linear(4, 1)).train_batch([X], [Y])


def test_a_network_is_a_module():
    with pytest.raises(TypeError, match=r"'network' should be a torch.nn.Module, got function"):
        paddle.Model(lambda x: x)


def test_a_program_for_inference_is_torchs_work(tmp_path):
    with pytest.raises(ValueError, match=r"torch.export"):
        model().save(tmp_path / "a", training=False)
