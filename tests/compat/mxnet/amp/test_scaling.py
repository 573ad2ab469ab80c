"""`amp.init_trainer`, `scale_loss` and `unscale`, and the gradients of output layers."""

import math

import pytest
import torch
from torch import nn

from mezzo import ScalerError
from mezzo.compat.mxnet import amp, autograd, gluon, nd


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
    from mezzo.compat.mxnet._trainer import scaled_optimizer_of

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


# -- order of calls --------------------------------------------------------------------------------


def run_backward(loss, trainer):
    with amp.scale_loss(loss, trainer) as scaled:
        autograd.backward(scaled)


def test_unscaling_twice_before_a_step_is_refused(weight, trainer):
    run_backward(8.0 * weight.sum(), trainer)
    amp.unscale(trainer)
    with pytest.raises(ScalerError, match="called twice before the step of this trainer"):
        amp.unscale(trainer)
    assert weight.grad.tolist() == [8.0, 8.0]
    trainer.step(8)
    assert weight.tolist() == [0.5, 0.5]
    run_backward(8.0 * weight.sum(), trainer)
    amp.unscale(trainer)


def test_unscaling_without_a_scaled_loss_is_refused(weight, trainer):
    weight.sum().backward()
    for _ in range(2):
        with pytest.raises(ScalerError, match="no loss of this trainer was scaled since its last"):
            amp.unscale(trainer)
        assert weight.grad.tolist() == [1.0, 1.0]
        trainer.step(1)
        run_backward(weight.sum(), trainer)
        trainer.step(1)
        weight.sum().backward()


def test_unscaling_before_backward_is_refused(weight, trainer):
    with amp.scale_loss(weight.sum(), trainer) as scaled:
        with pytest.raises(
            ScalerError, match=r"found no gradients.*autograd.backward\(scaled_loss\)"
        ):
            amp.unscale(trainer)
        autograd.backward(scaled)
    amp.unscale(trainer)
    assert weight.grad.tolist() == [1.0, 1.0]


def test_unscaling_a_trainer_without_scaling_is_refused(weight):
    amp.init()
    with pytest.raises(AssertionError, match=r"did you forget to call amp.init_trainer\(\)"):
        amp.unscale(gluon.Trainer([weight], "sgd"))


def test_scaling_a_loss_between_unscale_and_step_is_refused(weight, trainer):
    run_backward(weight.sum(), trainer)
    amp.unscale(trainer)
    with (
        pytest.raises(ScalerError, match=r"would be added to unscaled ones. Call trainer.step"),
        amp.scale_loss(weight.sum(), trainer),
    ):
        pass
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


def test_gradients_dropped_after_unscale_back_the_scale_off(weight, trainer):
    run_backward(weight.sum() * math.inf, trainer)
    amp.unscale(trainer)
    weight.grad = None
    run_backward(weight.sum(), trainer)
    assert weight.grad.tolist() == [32768.0, 32768.0]
    trainer.step(1)
    assert (weight.tolist(), trainer.amp_loss_scale) == ([0.5, 0.5], 32768.0)


def test_a_loss_whose_gradients_were_dropped_is_forgotten_by_the_step(weight, trainer):
    run_backward(weight.sum(), trainer)
    weight.grad = None
    trainer.step(1, ignore_stale_grad=True)
    weight.sum().backward()
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


def test_init_trainer_again_starts_at_the_first_scale(weight, trainer):
    run_backward(weight.sum() * math.inf, trainer)
    trainer.step(1)
    amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == 65536.0


def test_init_trainer_with_scaled_gradients_is_refused(weight, trainer):
    run_backward(weight.sum(), trainer)
    with pytest.raises(ScalerError, match="between scale_loss and step of this trainer"):
        amp.init_trainer(trainer)
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


def test_a_step_after_uninit_uses_unscaled_gradients(weight, trainer):
    run_backward(weight.sum(), trainer)
    amp.uninit()
    with (
        pytest.raises(AssertionError, match="Loss scaler is not initialized"),
        amp.scale_loss(weight.sum(), trainer),
    ):
        pass
    trainer.step(1)
    assert (weight.tolist(), trainer.amp_loss_scale) == ([0.5, 0.5], 1.0)


def test_a_loss_without_a_graph_is_refused(weight, trainer):
    with autograd.pause():
        loss = weight.sum()
    for losses, name in ((loss, "loss"), ([weight.sum(), loss], r"loss\[1\]")):
        with (
            pytest.raises(
                ScalerError, match=f"Cannot differentiate {name}, because it is not in a"
            ),
            amp.scale_loss(losses, trainer),
        ):
            pass
    weight.sum().backward()
    trainer.step(1)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        ("loss", TypeError, "loss should be an NDArray, here a tensor, got str"),
        (None, TypeError, "got NoneType"),
        ([], ValueError, "loss is an empty list"),
        ([[torch.ones(1)]], TypeError, "got list"),
    ],
    ids=["a name", "None", "an empty list", "a nested list"],
)
def test_another_object_than_a_loss_is_refused(trainer, loss, error, message):
    with pytest.raises(error, match=message), amp.scale_loss(loss, trainer):
        pass


# -- several trainers ------------------------------------------------------------------------------


@pytest.fixture
def pair(weight, trainer):
    """Two trainers with the scales 65536 and 32768, and their parameters."""
    other = nn.Parameter(torch.ones(2))
    second = gluon.Trainer([other], "sgd", {"learning_rate": 0.5})
    amp.init_trainer(second)
    run_backward(other.sum() * math.inf, second)
    second.step(1)
    return (weight, trainer), (other, second)


def check_pair(pair):
    (weight, trainer), (other, second) = pair
    assert (weight.grad.tolist(), other.grad.tolist()) == ([65536.0] * 2, [32768.0] * 2)
    trainer.step(1)
    second.step(1)
    assert (weight.tolist(), other.tolist()) == ([0.5, 0.5], [0.5, 0.5])


def test_losses_of_two_trainers_are_scaled_in_turn(pair):
    for weight, trainer in pair:
        run_backward(weight.sum(), trainer)
    check_pair(pair)


def test_losses_of_two_trainers_are_scaled_in_nested_blocks(pair):
    (weight, trainer), (other, second) = pair
    with amp.scale_loss(weight.sum(), trainer) as scaled:
        with amp.scale_loss(other.sum(), second) as other_scaled:
            autograd.backward(other_scaled)
        autograd.backward(scaled)
    check_pair(pair)


def test_losses_of_two_trainers_are_scaled_in_one_block(pair):
    (weight, trainer), (other, second) = pair
    with amp.scale_loss([weight.sum(), other.sum()], [trainer, second]) as scaled:
        autograd.backward(scaled)
    check_pair(pair)


def test_the_sum_of_scaled_losses_of_two_trainers_has_one_backward(pair):
    (weight, trainer), (other, second) = pair
    with amp.scale_loss([weight.sum(), other.sum()], (trainer, second)) as (one, two):
        (one + two).backward()
    check_pair(pair)


@pytest.mark.parametrize("skipped", [0, 1])
def test_one_trainer_skips_its_step_and_the_other_does_not(pair, skipped):
    factors = [1.0, 1.0]
    factors[skipped] = math.inf
    for (weight, trainer), factor in zip(pair, factors, strict=True):
        run_backward(weight.sum() * factor, trainer)
    scales = [trainer.amp_loss_scale for _, trainer in pair]
    for _, trainer in pair:
        trainer.step(1)
    scales[skipped] /= 2
    assert [trainer.amp_loss_scale for _, trainer in pair] == scales
    expected = [[0.5, 0.5], [0.5, 0.5]]
    expected[skipped] = [1.0, 1.0]
    assert [weight.tolist() for weight, _ in pair] == expected


def test_a_loss_through_the_parameters_of_another_trainer_leaves_no_gradients_behind(pair):
    # As in the training of a GAN: the generator's loss flows through the discriminator.
    (weight, trainer), (other, second) = pair
    for _ in range(2):
        run_backward((weight * other).sum(), trainer)
        trainer.step(1)
        before = other.tolist()
        run_backward(other.sum(), second)
        assert other.grad.tolist() == [32768.0, 32768.0]
        second.step(1)
        assert other.tolist() == [value - 0.5 for value in before]


def test_a_trainer_of_another_type_in_a_list_is_refused(weight, trainer):
    with (
        pytest.raises(TypeError, match="should be a Gluon Trainer or an optimizer, instead is"),
        amp.scale_loss([weight.sum(), weight.sum()], [trainer, "sgd"]),
    ):
        pass
    assert not trainer._optimizer._mezzo_attached.is_pending()


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


def test_an_output_layer_of_two_trainers_is_scaled_in_turn_only():
    amp.init()
    net, trainer = make()
    other_net, other = make()
    for each in (trainer, other):
        amp.init_trainer(each)
    run_backward(other_net(X).float().sum() * math.inf, other)
    other.step(1)
    output = nd.SoftmaxOutput(net(X) + other_net(X), Y)
    for each, scale in ((trainer, 65536.0), (other, 32768.0)):
        with amp.scale_loss(output, each) as scaled:
            autograd.backward(scaled, retain_graph=True)
        assert torch.equal(net.bias.grad, other_net.bias.grad)
        assert net.bias.grad.abs().max() > 0.3 * scale
    with (
        pytest.raises(ScalerError, match="part of scaled losses of two trainers"),
        amp.scale_loss([output, output], [trainer, other]),
    ):
        pass


def test_a_loss_without_output_layers_is_scaled_once():
    amp.init()
    net, trainer = make()
    amp.init_trainer(trainer)
    nd.SoftmaxOutput(net(X), Y)
    with amp.scale_loss(net(X).float().sum() * 0.25, trainer) as scaled:
        scaled.backward()
    assert net.bias.grad.tolist() == [16384.0] * 3
