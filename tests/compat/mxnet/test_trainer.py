"""`gluon.Trainer`, its optimizers, and scaled steps of an optimizer."""

import gc
import math
from weakref import ref

import pytest
import torch
from torch import nn

import mezzo.compat.mxnet as mx
from mezzo import CheckpointError, GradScaler, ScalerError, UnsupportedError
from mezzo.compat.mxnet import amp, gluon
from mezzo.compat.mxnet._optimizers import make_optimizer
from mezzo.compat.mxnet._trainer import ScaledOptimizer, scaled_optimizer_of


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


def test_a_step_divides_by_the_batch_size_and_clears_gradients(weight):
    trainer = gluon.Trainer({"weight": weight}, "sgd", {"learning_rate": 1.0})
    (weight.sum() * 4.0).backward()
    trainer.step(8)
    assert (weight.tolist(), weight.grad) == ([0.5, 0.5], None)


def test_gradients_are_rescaled_and_clipped_before_the_step(weight):
    trainer = gluon.Trainer(
        [weight], "sgd", {"learning_rate": 1.0, "rescale_grad": 2.0, "clip_gradient": 0.25}
    )
    (weight * torch.tensor([4.0, 0.25])).sum().backward()
    trainer.step(4)
    assert weight.tolist() == [0.75, 0.875]


def test_clip_gradient_clips_unscaled_gradients(weight):
    amp.init()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0, "clip_gradient": 0.25})
    amp.init_trainer(trainer)
    with amp.scale_loss((weight * torch.tensor([4.0, 0.125])).sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert weight.tolist() == [0.75, 0.875]


def test_multipliers_of_parameters_are_applied_also_if_set_later(weight):
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One())
    params = net.collect_params()
    params["bias"].lr_mult = 0.5
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1.0, "wd": 0.25})
    for parameter in net.collect_params(".*bias").values():
        parameter.wd_mult = 0.0
    params["bias"].set_data(mx.nd.ones((1,)))
    for _ in range(2):
        (net.weight * 0.0 + net.bias * 0.0).sum().backward()
        trainer.step(1)
    assert (net.weight.tolist(), net.bias.tolist()) == ([[0.5625, 0.5625]], [1.0])
    trainer.set_learning_rate(0.25)
    (net.weight.sum() * 0.0 + net.bias).sum().backward()
    trainer.step(1)
    assert (trainer.learning_rate, net.bias.item()) == (0.25, 1.0 - 0.25 * 0.5)
    params.setattr("lr_mult", 0.0)
    net.bias.sum().backward()
    trainer.step(1, ignore_stale_grad=True)
    assert net.bias.item() == 1.0 - 0.25 * 0.5


def test_a_scheduler_sets_the_rate_by_the_number_of_updates(weight, tmp_path):
    def make():
        scheduler = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
        return gluon.Trainer([weight], "sgd", {"lr_scheduler": scheduler})

    trainer = make()
    found = []
    for _ in range(3):
        weight.sum().backward()
        trainer.step(1)
        found.append(trainer.learning_rate)
    assert found == [1.0, 0.5, 0.25]
    assert weight.tolist() == [1.0 - 1.75] * 2
    with pytest.raises(UserWarning, match="LRScheduler of the optimizer has already been defined"):
        trainer.set_learning_rate(1.0)
    trainer.save_states(tmp_path / "states")
    loaded = make()
    loaded.load_states(tmp_path / "states")
    assert loaded.learning_rate == 0.25


def test_a_skipped_step_is_no_update_of_the_scheduler(weight):
    amp.init()
    scheduler = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5)
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0, "lr_scheduler": scheduler})
    amp.init_trainer(trainer)
    for factor in (1.0, math.inf, 1.0):
        with amp.scale_loss(weight.sum() * factor, trainer) as scaled:
            scaled.backward()
        trainer.step(1)
    assert weight.tolist() == [1.0 - 1.0 - 0.5] * 2


def test_a_torch_optimizer_is_used_as_passed(weight):
    optimizer = torch.optim.Adam([weight])
    trainer = gluon.Trainer([weight], optimizer)
    assert trainer.optimizer is optimizer
    with pytest.raises(
        AssertionError, match="optimizer_params must be None if optimizer is an instance"
    ):
        gluon.Trainer([weight], optimizer, {"learning_rate": 0.1})


def test_the_learning_rate_can_be_read_and_set(weight):
    trainer = gluon.Trainer([weight], "adam", {"learning_rate": 0.1})
    assert trainer.learning_rate == 0.1
    trainer.set_learning_rate(0.01)
    assert (trainer.learning_rate, trainer.optimizer.param_groups[0]["lr"]) == (0.01, 0.01)


def test_a_stale_gradient_raises_as_in_mxnet(weight):
    trainer = gluon.Trainer(
        {
            "used": weight,
            "unused": nn.Parameter(torch.ones(1)),
            "frozen": nn.Parameter(torch.ones(1), requires_grad=False),
        },
        "sgd",
    )
    weight.sum().backward()
    with pytest.raises(
        UserWarning,
        match="Gradient of Parameter `unused` has not been updated by backward since last `step`",
    ):
        trainer.step(1)
    assert weight.grad is not None
    trainer.step(1, ignore_stale_grad=True)
    assert weight.grad is None


def test_update_is_a_step_and_raises_with_update_on_kvstore(weight):
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    weight.sum().backward()
    trainer.allreduce_grads()
    trainer.update(2)
    assert weight.tolist() == [0.5, 0.5]
    on_kvstore = gluon.Trainer([weight], "sgd", update_on_kvstore=True)
    for call in (on_kvstore.allreduce_grads, lambda: on_kvstore.update(1)):
        with pytest.raises(AssertionError, match="`update_on_kvstore` to False"):
            call()


def test_loss_scaling_works_with_update_on_kvstore(weight):
    amp.init()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0}, update_on_kvstore=True)
    amp.init_trainer(trainer)
    with amp.scale_loss(weight.sum() * math.inf, trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert (weight.tolist(), trainer.amp_loss_scale) == ([1.0, 1.0], 32768.0)


def test_load_states_restores_optimizer_and_scale(weight, tmp_path):
    amp.init()
    trainer, other = (gluon.Trainer([weight], "adam") for _ in range(2))
    for each in (trainer, other):
        amp.init_trainer(each)
    with amp.scale_loss(weight.sum() * math.inf, trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    weight.sum().backward()
    trainer.step(1)
    trainer.save_states(tmp_path / "states")
    other.load_states(tmp_path / "states")
    assert other.amp_loss_scale == 32768.0
    assert torch.equal(
        other.optimizer.state[weight]["exp_avg"], trainer.optimizer.state[weight]["exp_avg"]
    )


def test_shared_parameters_are_used_once(weight):
    trainer = gluon.Trainer({"one": weight, "other": weight}, "sgd")
    assert len(trainer.optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize("params", [nn.Linear(1, 1), "weight", 3], ids=["module", "name", "number"])
def test_params_of_another_type_raise_as_in_mxnet(params):
    with pytest.raises(
        ValueError,
        match=(
            r"First argument must be a list or dict of Parameters, got <class.*Pass"
            r" net.collect_params\(\), or dict\(net.named_parameters\(\)\)"
        ),
    ):
        gluon.Trainer(params, "sgd")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), TypeError, "should be the name of an optimizer or one of torch.optim, got.*None"),
        ((torch.optim.SGD,), TypeError, "got <class 'torch.optim.sgd.SGD'>. The names are: sgd"),
        (("sgd", 0.1), TypeError, r"optimizer_params should be a dict.*got float.*'learning_rate'"),
        (("sgd", "lr"), TypeError, "optimizer_params should be a dict.*got str"),
        (("sgd", {"learning_rate": "0.1"}), TypeError, "learning_rate should be a number, got str"),
        (("sgd", {"learning_rate": -1}), ValueError, "learning_rate should be .* at least 0"),
        (("sgd", {"clip_gradient": "1"}), TypeError, "clip_gradient should be a number, got str"),
        (("sgd", {"rescale_grad": None}), TypeError, "rescale_grad should be a number, got None"),
        (
            ("sgd", {"lr_scheduler": object()}),
            TypeError,
            "lr_scheduler should be a scheduler of mx.lr_scheduler, got object",
        ),
        (
            ("sgd", None, "dist_sync"),
            UnsupportedError,
            "kvstore='dist_sync' is not supported.*DistributedDataParallel",
        ),
        (
            ("sgd", None, "device", {"type": "2bit"}),
            UnsupportedError,
            "gradients are not compressed",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, tuple) else "",
)
def test_invalid_arguments_of_a_trainer_raise(weight, arguments, error, message):
    with pytest.raises(error, match=message):
        gluon.Trainer([weight], *arguments)


@pytest.mark.parametrize("params", [[], {}], ids=["list", "dict"])
def test_a_trainer_without_parameters_raises(params):
    with pytest.raises(ValueError, match="got an empty one"):
        gluon.Trainer(params, "sgd")


def test_a_computed_tensor_is_no_parameter(weight):
    with pytest.raises(ValueError, match="got a list with the result of an operation"):
        gluon.Trainer([weight * 2.0], "sgd")


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (0, ValueError, "batch_size should be a number greater than 0, got 0"),
        ("8", TypeError, "batch_size should be a number, got str '8'"),
        ([8], TypeError, r"batch_size should be a number, got list \[8\]"),
    ],
    ids=str,
)
def test_an_invalid_batch_size_raises_before_the_step(weight, batch_size, error, message):
    trainer = gluon.Trainer([weight], "sgd")
    weight.sum().backward()
    with pytest.raises(error, match=message):
        trainer.step(batch_size)
    with pytest.raises(error, match=message):
        trainer.update(batch_size)
    assert (weight.tolist(), weight.grad.tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_an_invalid_learning_rate_raises(weight):
    trainer = gluon.Trainer([weight], "sgd")
    with pytest.raises(TypeError, match="lr should be a number, got str"):
        trainer.set_learning_rate("0.1")
    assert trainer.learning_rate == 0.01


def test_another_file_than_saved_states_raises(weight, tmp_path):
    trainer = gluon.Trainer([weight], "sgd")
    (tmp_path / "text").write_text("text")
    torch.save({"weight": weight}, tmp_path / "weights")
    for name in ("text", "weights"):
        with pytest.raises(CheckpointError, match=f"{name}' is no file of Trainer.save_states"):
            trainer.load_states(tmp_path / name)


def test_nesterov_without_momentum_is_plain_sgd(weight):
    trainer = gluon.Trainer([weight], "nag", {"learning_rate": 0.5, "momentum": 0.0})
    weight.sum().backward()
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


def test_a_list_of_other_objects_raises_as_in_mxnet():
    with pytest.raises(ValueError, match="got list of <class 'str'>"):
        gluon.Trainer(["weight"], "sgd")


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_without_gradients_does_nothing(weight, scaled):
    trainer = gluon.Trainer(
        [weight], "sgd", {"learning_rate": 1.0, "clip_gradient": 0.25}, update_on_kvstore=False
    )
    if scaled:
        amp.init()
        amp.init_trainer(trainer)
    trainer.update(1, ignore_stale_grad=True)
    assert weight.tolist() == [1.0, 1.0]


# -- optimizers by name ----------------------------------------------------------------------------


CASES = {
    "sgd": (
        {"learning_rate": 0.1, "wd": 0.01, "momentum": 0.9},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "nag": ({"learning_rate": 0.1}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    "adam": (
        {"beta1": 0.8, "epsilon": 1e-6},
        lambda p: torch.optim.Adam(p, 1e-3, betas=(0.8, 0.999), eps=1e-6),
    ),
    "adamw": (
        {"learning_rate": 0.1, "wd": 0.1},
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1),
    ),
    "rmsprop": ({"rho": 0.8}, lambda p: torch.optim.RMSprop(p, 1e-3, alpha=0.8)),
    "adagrad": ({}, lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-6)),
    "adadelta": ({}, lambda p: torch.optim.Adadelta(p, 1.0, eps=1e-5)),
}


@pytest.mark.parametrize("name", CASES)
def test_names_and_arguments_are_translated_to_torch(name):
    arguments, expected = CASES[name]
    weights = [nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
    optimizers = [make_optimizer(name, [weights[0]], arguments), expected([weights[1]])]
    for _ in range(2):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = weight.detach() * 0.5
            optimizer.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", ["adamax", "nadam", "lamb", "SGD"])
def test_other_optimizers_are_created(name):
    assert (
        make_optimizer(
            name, [nn.Parameter(torch.ones(1))], {"learning_rate": 0.5, "multi_precision": True}
        ).param_groups[0]["lr"]
        == 0.5
    )


def test_an_unknown_optimizer_raises_as_in_mxnet():
    with pytest.raises(ValueError, match=r"Cannot find optimizer adem.*Did you mean 'adam'"):
        make_optimizer("adem", [], {})


def test_an_unknown_argument_raises_as_in_mxnet():
    with pytest.raises(
        TypeError,
        match=(
            r"'sgd' got an unexpected keyword argument 'lr'. It takes: learning_rate, wd, momentum"
        ),
    ):
        make_optimizer("sgd", [nn.Parameter(torch.ones(1))], {"lr": 0.1})


# -- scaled steps ----------------------------------------------------------------------------------


@pytest.fixture
def scalar():
    return nn.Parameter(torch.ones(1))


@pytest.fixture
def optimizer(scalar):
    return torch.optim.SGD([scalar], lr=1.0)


def scale_steps(optimizer, **kwargs):
    return ScaledOptimizer(optimizer, GradScaler("cpu", init_scale=8.0, **kwargs))


def test_a_scaled_step_updates_from_unscaled_gradients(scalar, optimizer):
    step = scale_steps(optimizer, growth_interval=1)
    step.scale(scalar.sum() * 0.25).backward()
    assert scalar.grad.item() == 2.0
    optimizer.step()
    assert (scalar.item(), step.scaler.get_scale(), step.last_result.skipped) == (0.75, 16.0, False)


def test_a_non_finite_gradient_skips_the_step_and_backs_off(scalar, optimizer):
    step = scale_steps(optimizer)
    step.scale(scalar.sum() * math.inf).backward()
    optimizer.step()
    assert (scalar.item(), step.scaler.get_scale(), step.last_result.skipped) == (1.0, 4.0, True)


def test_a_step_without_a_scaled_loss_runs_the_original_step(scalar, optimizer):
    step = scale_steps(optimizer)
    (scalar.sum() * 0.25).backward()
    optimizer.step()
    assert (scalar.item(), step.last_result) == (0.75, None)


def test_gradients_are_unscaled_once(scalar, optimizer):
    step = scale_steps(optimizer)
    step.scale(scalar.sum() * 0.25).backward()
    step.unscale()
    step.unscale_pending()
    assert scalar.grad.item() == 0.25
    optimizer.step()
    assert scalar.item() == 0.75


def test_step_hooks_run_once(scalar, optimizer):
    step, calls = scale_steps(optimizer), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    step.scale(scalar.sum()).backward()
    optimizer.step()
    assert calls == ["step"]


def test_a_scheduler_created_later_counts_steps(scalar, optimizer, recwarn):
    step = scale_steps(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step.scale(scalar.sum()).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not recwarn.list


def test_a_scheduler_created_earlier_counts_skipped_steps(scalar, optimizer, recwarn):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = scale_steps(optimizer)
    step.scale(scalar.sum() * math.nan).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not recwarn.list


def test_detach_restores_the_original_step(scalar, optimizer):
    original = optimizer.step.__func__
    step = scale_steps(optimizer)
    assert scaled_optimizer_of(optimizer) is step
    step.detach()
    assert scaled_optimizer_of(optimizer) is None
    assert optimizer.step.__func__ is original
    scalar.sum().backward()
    optimizer.step()
    assert scalar.item() == 0.0


def test_scaled_gradients_are_unscaled_by_a_step_after_detach(scalar, optimizer):
    original = optimizer.step.__func__
    step = scale_steps(optimizer)
    step.scale(scalar.sum()).backward()
    step.detach()
    optimizer.step()
    assert scalar.item() == 0.0
    assert optimizer.step.__func__ is original


def test_a_scheduler_created_in_between_survives_detach(scalar, optimizer):
    step = scale_steps(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step.detach()
    scalar.sum().backward()
    optimizer.step()
    assert scalar.item() == 0.0


def test_a_scaled_optimizer_can_be_garbage_collected(scalar):
    optimizer = torch.optim.SGD([scalar], lr=1.0)
    scale_steps(optimizer)
    reference = ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None


def test_closures_raise_as_with_the_scaler(scalar, optimizer):
    step = scale_steps(optimizer)
    step.scale(scalar.sum()).backward()
    with pytest.raises(ScalerError, match="no closure"):
        optimizer.step(lambda: scalar.sum())
    optimizer.step()
    assert scalar.item() == 0.0
