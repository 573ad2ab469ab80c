"""AMP with gluon's blocks and with arrays."""

import math

import numpy as np
import pytest
import torch

import mezzo.compat.mxnet as mx
from mezzo import ScalerError
from mezzo.compat.mxnet import amp, autograd, gluon

DATA = mx.nd.array(np.linspace(-1, 1, 4 * 3 * 6 * 6).reshape(4, 3, 6, 6).astype(np.float32))
LABEL = mx.nd.array([0, 1, 2, 3])
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def make(**kwargs):
    torch.manual_seed(0)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, kernel_size=3, activation="relu"),
        gluon.nn.BatchNorm(),
        gluon.nn.GlobalAvgPool2D(),
        gluon.nn.Dense(4),
    )
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    net(DATA)
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1, **kwargs}, update_on_kvstore=False
    )
    return net, trainer


def weights(net):
    return {name: value.data().asnumpy().copy() for name, value in net.collect_params().items()}


def train(steps):
    net, trainer = make(momentum=0.9)
    amp.init_trainer(trainer)
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = LOSS(net(DATA), LABEL)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(4)
        losses.append(loss.mean().asscalar())
    return losses


def test_layers_compute_in_float16_and_losses_in_float32():
    amp.init()
    net, _ = make()
    with autograd.record():
        features = net[0](DATA)
        output = net(DATA)
        loss = LOSS(output, LABEL)
    assert [features.dtype, output.dtype, loss.dtype] == [np.float16, np.float16, np.float32]
    assert {value.dtype for value in net.collect_params().values()} == {np.float32}
    assert isinstance(loss, mx.nd.NDArray)


def test_training_lowers_the_loss():
    amp.init()
    losses = train(10)
    assert losses[-1] < 0.8 * losses[0]


# 65536 times the gradients of a sum over samples does not fit into float16; of a 64th it does.


def test_a_step_divides_by_scale_and_batch_size():
    expected, trainer = make()
    with autograd.record():
        LOSS(expected(DATA), LABEL).backward()
    trainer.step(4)
    amp.init()
    net, trainer = make()
    amp.init_trainer(trainer)
    with autograd.record():
        loss = LOSS(net(DATA), LABEL)
        with amp.scale_loss(loss / 64, trainer) as scaled:
            scaled.backward()
    trainer.step(4 / 64)
    for name, value in weights(expected).items():
        assert np.allclose(weights(net)[name], value, atol=2e-3), name


def test_an_overflow_skips_the_step_and_halves_the_scale():
    amp.init()
    net, trainer = make()
    amp.init_trainer(trainer)
    before = weights(net)
    with autograd.record():
        loss = LOSS(net(DATA), LABEL) * math.inf
        with amp.scale_loss([loss], trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(4)
    after = weights(net)
    assert trainer.amp_loss_scale == 32768.0
    assert all(
        np.array_equal(after[name], value)
        for name, value in before.items()
        if "running" not in name
    )


def test_unscaled_gradients_are_clipped_by_their_global_norm():
    amp.init()
    net, trainer = make()
    amp.init_trainer(trainer)
    with autograd.record():
        loss = LOSS(net(DATA), LABEL) / 64
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    amp.unscale(trainer)
    gradients = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    norm = gluon.utils.clip_global_norm(gradients, 0.001)
    assert 0.001 < norm < 10.0
    total = math.sqrt(sum(float((g.asnumpy() ** 2).sum()) for g in gradients))
    assert total == pytest.approx(0.001, rel=1e-3)
    trainer.step(1)


def test_an_array_outside_a_graph_raises_in_mxnets_words():
    amp.init()
    net, trainer = make()
    amp.init_trainer(trainer)
    with autograd.pause():
        loss = LOSS(net(DATA), LABEL)
    with (
        pytest.raises(ScalerError, match="not in a computational graph"),
        amp.scale_loss(loss, trainer),
    ):
        pass
    with pytest.raises(ScalerError, match="not in a computational graph"):
        loss.backward()


def test_gradients_add_up_with_grad_req_add():
    net, trainer = make()
    parameters = net.collect_params()
    parameters.setattr("grad_req", "add")
    for _ in range(2):
        with autograd.record():
            LOSS(net(DATA), LABEL).backward()
    twice = parameters["3.weight"].grad().asnumpy().copy()
    parameters.setattr("grad_req", "write")
    with autograd.record():
        LOSS(net(DATA), LABEL).backward()
    assert np.allclose(twice, 2 * parameters["3.weight"].grad().asnumpy(), rtol=1e-4)
    trainer.step(4)


def test_dropout_and_batch_normalization_train_inside_record_only():
    layer = gluon.nn.Dropout(0.5)
    ones = mx.nd.ones((64,))
    assert layer(ones).asnumpy().tolist() == [1.0] * 64
    with autograd.record():
        assert 0.0 in layer(ones).asnumpy()
        with autograd.predict_mode():
            assert layer(ones).asnumpy().tolist() == [1.0] * 64
    with autograd.record(train_mode=False):
        assert layer(ones).asnumpy().tolist() == [1.0] * 64
    with autograd.train_mode():
        assert 0.0 in layer(ones).asnumpy()
