import math

import pytest
import torch
from torch import nn

from mezzo.compat.mxnet import amp, gluon


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


def test_a_step_divides_by_the_batch_size_and_forgets_gradients(weight):
    trainer = gluon.Trainer({"weight": weight}, "sgd", {"learning_rate": 1.0})
    (weight.sum() * 4.0).backward()
    trainer.step(8)
    assert (weight.tolist(), weight.grad) == ([0.5, 0.5], None)


def test_gradients_are_rescaled_and_bounded_before_the_step(weight):
    trainer = gluon.Trainer(
        [weight], "sgd", {"learning_rate": 1.0, "rescale_grad": 2.0, "clip_gradient": 0.25}
    )
    (weight * torch.tensor([4.0, 0.25])).sum().backward()
    trainer.step(4)
    assert weight.tolist() == [0.75, 0.875]


def test_what_is_bounded_is_the_unscaled_gradient(weight):
    amp.init()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0, "clip_gradient": 0.25})
    amp.init_trainer(trainer)
    with amp.scale_loss((weight * torch.tensor([4.0, 0.125])).sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert weight.tolist() == [0.75, 0.875]


def test_an_optimizer_of_torchs_is_taken_as_it_is(weight):
    optimizer = torch.optim.Adam([weight])
    trainer = gluon.Trainer([weight], optimizer)
    assert trainer.optimizer is optimizer
    with pytest.raises(
        AssertionError, match="optimizer_params must be None if optimizer is an instance"
    ):
        gluon.Trainer([weight], optimizer, {"learning_rate": 0.1})


def test_the_rate_is_read_and_set(weight):
    trainer = gluon.Trainer([weight], "adam", {"learning_rate": 0.1})
    assert trainer.learning_rate == 0.1
    trainer.set_learning_rate(0.01)
    assert (trainer.learning_rate, trainer.optimizer.param_groups[0]["lr"]) == (0.01, 0.01)


def test_a_parameter_without_a_new_gradient_is_refused_as_there(weight):
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


def test_update_after_allreduce_is_a_step_unless_updates_are_on_the_kvstore(weight):
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    weight.sum().backward()
    trainer.allreduce_grads()
    trainer.update(2)
    assert weight.tolist() == [0.5, 0.5]
    elsewhere = gluon.Trainer([weight], "sgd", update_on_kvstore=True)
    for call in (elsewhere.allreduce_grads, lambda: elsewhere.update(1)):
        with pytest.raises(AssertionError, match="`update_on_kvstore` to False"):
            call()


def test_scaling_works_whatever_is_said_of_the_kvstore(weight):
    amp.init()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0}, update_on_kvstore=True)
    amp.init_trainer(trainer)
    with amp.scale_loss(weight.sum() * math.inf, trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert (weight.tolist(), trainer.amp_loss_scale) == ([1.0, 1.0], 32768.0)


def test_saved_states_go_on(weight, tmp_path):
    amp.init()
    trainer, other = (gluon.Trainer([weight], "adam") for _ in range(2))
    for one in (trainer, other):
        amp.init_trainer(one)
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


def test_shared_parameters_are_taken_once(weight):
    trainer = gluon.Trainer({"one": weight, "other": weight}, "sgd")
    assert len(trainer.optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize("given", [nn.Linear(1, 1), "weight", 3], ids=["module", "name", "number"])
def test_what_is_no_list_or_dict_is_refused_as_there(given):
    with pytest.raises(
        ValueError,
        match=(
            r"First argument must be a list or dict of Parameters, got <class.*Pass"
            r" dict\(net.named_parameters\(\)\)"
        ),
    ):
        gluon.Trainer(given, "sgd")


def test_a_list_of_something_else_is_refused_as_there():
    with pytest.raises(ValueError, match="got list of <class 'str'>"):
        gluon.Trainer(["weight"], "sgd")


@pytest.mark.parametrize("scaled", [False, True])
def test_bounds_without_a_gradient_bound_nothing(weight, scaled):
    trainer = gluon.Trainer(
        [weight], "sgd", {"learning_rate": 1.0, "clip_gradient": 0.25}, update_on_kvstore=False
    )
    if scaled:
        amp.init()
        amp.init_trainer(trainer)
    trainer.update(1, ignore_stale_grad=True)
    assert weight.tolist() == [1.0, 1.0]
