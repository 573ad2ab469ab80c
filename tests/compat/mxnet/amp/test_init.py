"""`amp.init`, `init_trainer` and `scale_loss`, and the gradients of output layers."""

import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat.mxnet import amp, autograd, gluon, nd

# -- init ------------------------------------------------------------------------------------------


def linear_dtype():
    return nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype


def softmax_dtype():
    return torch.softmax(torch.ones(2, dtype=torch.float16), 0).dtype


@pytest.mark.parametrize(
    ("target_dtype", "dtype"),
    [("float16", torch.float16), (np.float16, torch.float16), ("bfloat16", torch.bfloat16)],
    ids=repr,
)
def test_init_activates_autocast_and_uninit_ends_it(target_dtype, dtype):
    amp.init(target_dtype=target_dtype)
    assert (linear_dtype(), softmax_dtype()) == (
        dtype,
        torch.float32 if dtype is torch.float16 else torch.float16,
    )
    amp.uninit()
    assert linear_dtype() is torch.float32
    amp.uninit()


def test_init_as_a_context_manager_ends_with_the_block():
    with amp.init():
        assert linear_dtype() is torch.float16
    assert linear_dtype() is torch.float32


def test_using_amp_is_logged_once(caplog):
    with caplog.at_level(logging.INFO):
        amp.init()
        amp.init("bfloat16")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("root", "INFO", "Using AMP")
    ]
    assert linear_dtype() is torch.float16


def test_a_network_created_before_init_warns(caplog):
    network = nn.Linear(1, 1)
    amp.init()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith(f"Block network created in [{__file__}:")
    assert caplog.messages[0].endswith("] before AMP init.")
    assert network is not None


def test_init_without_a_network_does_not_warn(caplog):
    amp.init()
    assert not caplog.records


def test_passed_lists_replace_mxnets():
    amp.init(
        target_precision_ops=["Convolution"],
        fp32_ops=["FullyConnected"],
        conditional_fp32_ops=[("Activation", "act_type", ["relu"])],
    )
    assert nn.functional.conv1d(torch.ones(1, 1, 2), torch.ones(1, 1, 1)).dtype is torch.float16
    half = torch.ones(1, 1, dtype=torch.float16)
    assert nn.functional.linear(half, half).dtype is torch.float32
    assert (softmax_dtype(), torch.relu(half).dtype) == (torch.float16, torch.float32)


def test_other_dtypes_raise_and_activate_nothing():
    with pytest.raises(
        AssertionError,
        match="AMP currently supports only float16 or bfloat16 as a target_dtype, got 'int8'",
    ):
        amp.init("int8")
    with pytest.raises(AttributeError, match="MXNet has no op 'Conv'"):
        amp.init(fp32_ops=["Conv"])
    assert linear_dtype() is torch.float32


def test_layout_optimization_raises_with_a_remedy():
    with pytest.raises(RuntimeError, match=r"mezzo.channels_last\(net\)"):
        amp.init(layout_optimization=True)


# -- loss scaling ----------------------------------------------------------------------------------


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def trainer(weight):
    amp.init()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 0.5}, update_on_kvstore=False)
    amp.init_trainer(trainer)
    return trainer


def test_the_scale_starts_at_65536_and_a_step_unscales(weight, trainer):
    with amp.scale_loss(weight.sum(), trainer) as scaled:
        assert scaled.item() == 2 * 65536.0
        autograd.backward(scaled)
    assert weight.grad.tolist() == [65536.0] * 2
    trainer.step(2)
    assert weight.tolist() == [0.75, 0.75]
    assert weight.grad is None


def test_a_non_finite_gradient_skips_the_step_and_halves_the_scale(weight, trainer):
    with amp.scale_loss(weight.sum() * math.inf, trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert (weight.tolist(), trainer.amp_loss_scale) == ([1.0, 1.0], 32768.0)
    with amp.scale_loss(weight.sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert (weight.tolist(), trainer.amp_loss_scale) == ([0.5, 0.5], 32768.0)


def test_the_scale_doubles_after_2000_successful_steps(weight, trainer):
    trainer.set_learning_rate(0.0)
    for _ in range(2000):
        with amp.scale_loss(weight.sum(), trainer) as scaled:
            scaled.backward()
        trainer.step(1)
    assert trainer.amp_loss_scale == 131072.0


def test_the_largest_scale_is_two_to_the_24(weight, trainer):
    from mezzo.compat.mxnet.gluon import scaled_optimizer_of

    assert scaled_optimizer_of(trainer.optimizer).scaler._scales.rule.max_scale == 2.0**24


def test_several_losses_are_scaled_together(weight, trainer):
    with amp.scale_loss([weight.sum(), 2.0 * weight.sum()], trainer) as scaled:
        assert isinstance(scaled, list)
        autograd.backward(scaled)
    trainer.step(1)
    assert weight.tolist() == [-0.5, -0.5]


def test_a_vector_of_losses_is_scaled_and_divided_by_the_batch_size(weight, trainer):
    with amp.scale_loss(weight * torch.tensor([1.0, 2.0]), trainer) as scaled:
        autograd.backward(scaled)
    trainer.step(2)
    assert weight.tolist() == [0.75, 0.5]


def test_each_trainer_has_its_own_scale(weight, trainer):
    other = nn.Parameter(torch.ones(1))
    second = gluon.Trainer([other], "sgd", {"learning_rate": 0.5})
    amp.init_trainer(second)
    with (
        amp.scale_loss(weight.sum(), trainer) as scaled,
        amp.scale_loss(other.sum() * math.inf, second) as other_scaled,
    ):
        autograd.backward([scaled, other_scaled])
    trainer.step(1)
    second.step(1)
    assert (weight.tolist(), other.tolist()) == ([0.5, 0.5], [1.0])
    assert (trainer.amp_loss_scale, second.amp_loss_scale) == (65536.0, 32768.0)
    with amp.scale_loss([weight.sum(), other.sum()], [trainer, second]) as scaled:
        assert [loss.item() for loss in scaled] == [65536.0, 32768.0]


def test_a_different_number_of_losses_and_trainers_raises(weight, trainer):
    with (
        pytest.raises(ValueError, match="1 losses and 2 trainers"),
        amp.scale_loss(weight.sum(), [trainer, trainer]),
    ):
        pass


def test_a_torch_optimizer_is_scaled_in_its_step(weight):
    amp.init()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    amp.init_trainer(optimizer)
    for factor, expected in ((math.nan, 1.0), (1.0, 0.5)):
        optimizer.zero_grad()
        with amp.scale_loss(weight.sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert weight.tolist() == [expected, expected]


def test_unscaled_gradients_can_be_clipped(weight, trainer):
    with amp.scale_loss(8.0 * weight.sum(), trainer) as scaled:
        scaled.backward()
    amp.unscale(trainer)
    assert weight.grad.tolist() == [8.0, 8.0]
    torch.nn.utils.clip_grad_value_([weight], 1.0)
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


def test_an_unscaled_loss_runs_the_original_step(weight, trainer):
    weight.sum().backward()
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


def test_uninit_removes_loss_scaling_from_trainers(weight, trainer):
    amp.uninit()
    assert trainer.amp_loss_scale == 1.0
    with (
        pytest.raises(AssertionError, match="Loss scaler is not initialized"),
        amp.scale_loss(weight.sum(), trainer),
    ):
        pass
    amp.init()
    amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == 65536.0


def test_calls_out_of_order_raise_as_in_mxnet(weight):
    trainer = gluon.Trainer([weight], "sgd")
    with pytest.raises(
        AssertionError, match=r"AMP not initialized, did you forget to call amp.init\(\)"
    ):
        amp.init_trainer(trainer)
    with (
        pytest.raises(AssertionError, match=r"did you forget to call amp.init_trainer\(\)"),
        amp.scale_loss(weight.sum(), trainer),
    ):
        pass


@pytest.mark.parametrize("call", [amp.init_trainer, amp.unscale], ids=["init_trainer", "unscale"])
def test_another_object_than_a_trainer_raises_as_in_mxnet(call):
    amp.init()
    with pytest.raises(
        TypeError, match="should be a Gluon Trainer or an optimizer, instead is <class 'str'>"
    ):
        call("sgd")


# -- output layers ---------------------------------------------------------------------------------


# Small, because 65536 times the gradients must fit into float16.
X, Y = torch.tensor([[0.125, 0.25]]), torch.tensor([1.0])
OUTPUTS = {
    "SoftmaxOutput": (nd.SoftmaxOutput, Y),
    "LinearRegressionOutput": (nd.LinearRegressionOutput, torch.zeros(1, 3)),
    "LogisticRegressionOutput": (nd.LogisticRegressionOutput, torch.zeros(1, 3)),
    "MAERegressionOutput": (nd.MAERegressionOutput, torch.zeros(1, 3)),
}


def make():
    torch.manual_seed(0)
    net = nn.Linear(2, 3)
    trainer = gluon.Trainer(
        dict(net.named_parameters()), "sgd", {"learning_rate": 1.0}, update_on_kvstore=False
    )
    return net, trainer


@pytest.mark.parametrize("name", amp.list_loss_output_functions("float16"))
def test_gradients_of_output_layers_are_scaled_and_unscaled(name):
    layer, label = OUTPUTS[name]
    plain, plain_trainer = make()
    layer(plain(X), label).sum().backward()
    expected = plain.weight.grad.clone()
    plain_trainer.step(1)
    amp.init()
    net, trainer = make()
    amp.init_trainer(trainer)
    with amp.scale_loss(layer(net(X), label), trainer) as scaled:
        autograd.backward(scaled)
    assert torch.allclose(net.weight.grad / 65536.0, expected, rtol=1e-2)
    trainer.step(1)
    assert torch.allclose(net.weight, plain.weight, rtol=1e-2, atol=1e-3)


def test_two_trainers_have_two_scales_when_backward_runs_later():
    amp.init()
    (first_net, first), (second_net, second) = make(), make()
    for trainer in (first, second):
        amp.init_trainer(trainer)
    with amp.scale_loss(second_net(X).float().sum() * float("inf"), second) as scaled:
        scaled.backward()
    second.step(1)
    with (
        amp.scale_loss(nd.SoftmaxOutput(first_net(X), Y).mean(), first) as first_scaled,
        amp.scale_loss(nd.SoftmaxOutput(second_net(X), Y), second) as second_scaled,
    ):
        pass
    autograd.backward([first_scaled, second_scaled])
    assert torch.equal(first_net.weight.grad, 2.0 * second_net.weight.grad)
    for trainer in (first, second):
        trainer.step(1)
    assert torch.equal(first_net.weight, second_net.weight)


def test_a_loss_without_output_layers_is_scaled_once():
    amp.init()
    net, trainer = make()
    amp.init_trainer(trainer)
    nd.SoftmaxOutput(net(X), Y)
    with amp.scale_loss(net(X).float().sum() * 0.25, trainer) as scaled:
        scaled.backward()
    assert net.bias.grad.tolist() == [16384.0] * 3
