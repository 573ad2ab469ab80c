import pytest
import torch
from torch import nn

from mezzo.compat.mxnet import amp, autograd, gluon, nd

# Small, for 65536 times its gradients have to be a float16.
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
def test_the_gradient_of_an_output_layer_gets_the_scale_and_the_step_takes_it_off(name):
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


def test_two_trainers_with_two_scales_and_backward_after_both_regions():
    amp.init()
    (one, first), (other, second) = make(), make()
    for trainer in (first, second):
        amp.init_trainer(trainer)
    with amp.scale_loss(other(X).float().sum() * float("inf"), second) as scaled:
        scaled.backward()
    second.step(1)
    with (
        amp.scale_loss(nd.SoftmaxOutput(one(X), Y).mean(), first) as scaled_one,
        amp.scale_loss(nd.SoftmaxOutput(other(X), Y), second) as scaled_other,
    ):
        pass
    autograd.backward([scaled_one, scaled_other])
    assert torch.equal(one.weight.grad, 2.0 * other.weight.grad)
    for trainer in (first, second):
        trainer.step(1)
    assert torch.equal(one.weight, other.weight)


def test_a_loss_without_such_layers_is_found_to_have_none():
    amp.init()
    net, trainer = make()
    amp.init_trainer(trainer)
    nd.SoftmaxOutput(net(X), Y)
    with amp.scale_loss(net(X).float().sum() * 0.25, trainer) as scaled:
        scaled.backward()
    assert net.bias.grad.tolist() == [16384.0] * 3
