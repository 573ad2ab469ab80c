"""`paddle.Model`: `amp_configs`, batches, saving and loading."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle import hapi
from mezzo.compat.paddle.hapi import AmpConfigs, read_amp_configs

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def make_model(amp_configs=None, metrics=None, **options):
    torch.manual_seed(0)
    model = paddle.Model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    model.prepare(
        paddle.optimizer.Adam(learning_rate=0.05, parameters=model.parameters(), **options),
        nn.MSELoss(),
        metrics,
        amp_configs=amp_configs,
    )
    return model


@pytest.mark.parametrize(
    ("level", "dtype"), [(None, torch.float32), ("O1", torch.float32), ("O2", torch.float16)]
)
def test_a_model_trains_at_every_level(level, dtype):
    model = make_model(level)
    losses = [model.train_batch([X], [Y])[0] for _ in range(40)]
    assert losses[-1] < losses[0] / 4
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_gradients_accumulate_until_an_update():
    model, whole = make_model(), make_model()
    model.train_batch([X[:8]], [Y[:8]], update=False)
    model.train_batch([X[8:]], [Y[8:]])
    whole._optimizer.zero_grad()
    (2 * nn.MSELoss()(whole.network(X), Y)).backward()
    whole._optimizer.step()
    assert torch.allclose(model.network[0].weight, whole.network[0].weight, atol=1e-6)


def test_amp_configs_configure_loss_scaling():
    model = make_model({"level": "O1", "init_loss_scaling": 8.0, "incr_every_n_steps": 1})
    model.train_batch([X], [Y])
    assert model._scaler.state_dict()["scale"].item() == 16.0


def test_amp_configs_configure_op_lists():
    model = make_model({"level": "O1", "custom_black_list": {"linear_v2"}})
    assert model.predict_batch([X])[0].dtype == np.float32
    assert make_model("O1").predict_batch([X])[0].dtype == np.float16


def test_metrics_are_returned_with_the_loss():
    torch.manual_seed(0)
    model = paddle.Model(nn.Linear(4, 2))
    model.prepare(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()),
        nn.CrossEntropyLoss(),
        paddle.metric.Accuracy(),
    )
    (loss,), (accuracy,) = model.train_batch([X], [(X.sum(1) > 0).long()])
    assert loss > 0
    assert 0 <= accuracy <= 1
    assert len(model.eval_batch([X], [(X.sum(1) > 0).long()])) == 2


def test_evaluation_changes_no_parameter_and_each_call_sets_its_own_mode():
    model = make_model()
    before = model.network[0].weight.detach().clone()
    model.eval_batch([X], [Y])
    assert torch.equal(model.network[0].weight, before)
    assert not model.network.training
    model.train_batch([X], [Y])
    assert model.network.training


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_training_continues_from_a_saved_model(level, tmp_path):
    saved, loaded = make_model(level), make_model(level)
    for _ in range(3):
        saved.train_batch([X], [Y])
    saved.save(tmp_path / "run" / "checkpoint")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint.pdopt",
        "checkpoint.pdparams",
    ]
    loaded.load(tmp_path / "run" / "checkpoint")
    loaded._scaler.load_state_dict(saved._scaler.state_dict())
    assert [saved.train_batch([X], [Y]) for _ in range(3)] == [
        loaded.train_batch([X], [Y]) for _ in range(3)
    ]


def test_skip_mismatch_leaves_out_entries_that_do_not_fit(tmp_path):
    saved = make_model()
    saved.save(tmp_path / "a")
    other = paddle.Model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    other.prepare(
        paddle.optimizer.SGD(learning_rate=0.1, parameters=other.parameters()), nn.MSELoss()
    )
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load(tmp_path / "a")
    other.load(tmp_path / "a", skip_mismatch=True, reset_optimizer=True)
    assert torch.equal(other.network[0].weight, saved.network[0].weight)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"loss": 3},
            TypeError,
            "'loss' must be a paddle.nn.Layer or any callable function, got int",
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
def test_invalid_arguments_of_prepare_raise_and_change_nothing(kwargs, error, message):
    model = paddle.Model(nn.Linear(4, 1))
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    with pytest.raises(error, match=message):
        model.prepare(optimizer, **kwargs)
    assert model.network.weight.dtype is torch.float32


def test_training_an_unprepared_model_raises():
    with pytest.raises(
        RuntimeError,
        match=r"not prepared for training. Call model.prepare\(optimizer, loss\) first",
    ):
        paddle.Model(nn.Linear(4, 1)).train_batch([X], [Y])


def test_a_network_that_is_no_module_raises():
    with pytest.raises(TypeError, match=r"'network' should be a paddle.nn.Layer, got function"):
        paddle.Model(lambda x: x)


def test_saving_for_inference_raises_and_names_torch_export(tmp_path):
    with pytest.raises(ValueError, match=r"torch.export"):
        make_model().save(tmp_path / "a", training=False)


@pytest.mark.parametrize("amp_configs", [None, {}, "O0", {"level": "O0", "nonsense": 1}], ids=str)
def test_without_configs_or_at_o0_a_model_is_float32(amp_configs):
    assert read_amp_configs(amp_configs, None) == AmpConfigs("O0")


def test_the_level_may_be_passed_alone_and_defaults_to_o1():
    assert read_amp_configs("O1", None) == AmpConfigs("O1")
    assert read_amp_configs({"custom_black_list": {"exp"}}, None).level == "O1"


def test_list_and_scaling_arguments_are_separated():
    amp_configs = {
        "level": "O2",
        "custom_white_list": {"conv2d"},
        "init_loss_scaling": 8.0,
        "use_dynamic_loss_scaling": False,
    }
    assert read_amp_configs(amp_configs, None) == AmpConfigs(
        "O2",
        {"custom_white_list": {"conv2d"}},
        {"init_loss_scaling": 8.0, "use_dynamic_loss_scaling": False},
    )


@pytest.mark.parametrize(
    ("amp_configs", "message"),
    [
        ("O3", "The level of amp_configs should be 'O0', 'O1' or 'O2'"),
        ({"level": "OD"}, r"amp_configs\['level'\] should be 'O0', 'O1' or 'O2'"),
        (
            {"use_pure_fp16": True},
            (
                "'use_pure_fp16' is an invalid parameter, the level of mixed precision training"
                " only depends on 'O1' or 'O2'"
            ),
        ),
        ({"use_fp16_guard": True}, "'use_fp16_guard' is supported in static graph mode only"),
        ({"custom_black_varnames": {"w"}}, "'custom_black_varnames' names variables"),
        (
            {"dtype": "bfloat16"},
            (
                r"Except for 'level', the keys of 'amp_configs' must be accepted by mixed precision"
                r" APIs, but \('dtype'\) could not be recognized"
            ),
        ),
        ({"init_loss_scale": 8.0}, "Did you mean 'init_loss_scaling'"),
    ],
    ids=str,
)
def test_invalid_amp_configs_raise(amp_configs, message):
    with pytest.raises(ValueError, match=message):
        read_amp_configs(amp_configs, None)


@pytest.mark.parametrize(
    "amp_configs", ["O2", {"level": "O2"}, {"level": "O2", "incr_ratio": 3.0}], ids=str
)
def test_o2_allows_clipping_by_norm_only(amp_configs):
    def optimizer(clip):
        return paddle.optimizer.SGD(
            learning_rate=0.1, parameters=[nn.Parameter(torch.ones(1))], grad_clip=clip
        )

    assert read_amp_configs(amp_configs, optimizer(paddle.nn.ClipGradByNorm(1.0))).level == "O2"
    with pytest.raises(
        AssertionError,
        match=(
            "Only ClipGradByNorm and ClipGradByGlobalNorm are supported in amp training with"
            " level=O2"
        ),
    ):
        read_amp_configs(amp_configs, optimizer(paddle.nn.ClipGradByValue(1.0)))


def test_amp_configs_of_another_type_raise():
    with pytest.raises(TypeError, match=r"amp_configs=3 is int.*a dict with a 'level'"):
        read_amp_configs(3, None)


def test_a_network_on_the_cpu_moves_to_the_default_place(monkeypatch):
    monkeypatch.setattr(hapi, "device_of", lambda _: torch.device("meta"))
    assert paddle.Model(nn.Linear(4, 1)).network.weight.is_meta
