"""mezzo.compat.mxnet and gluoncv on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import mezzo.compat.gluoncv as gcv
import mezzo.compat.mxnet as mx
from mezzo.compat.mxnet import amp, autograd, gluon, nd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def disable_amp_at_the_end() -> Iterator[None]:
    yield
    amp.uninit()


def test_arrays_are_in_their_contexts() -> None:
    assert nd.ones((2,), ctx=mx.gpu(0)).context == mx.gpu(0)
    pinned = nd.random.uniform(shape=(2,), ctx=mx.cpu_pinned())
    assert pinned.context == mx.cpu_pinned()
    assert gluon.utils.split_and_load(pinned, [mx.gpu(0)])[0].is_cuda
    with mx.Context(mx.gpu(0)):
        array = nd.array(np.ones(3))
    assert array.is_cuda
    array.wait_to_read()
    nd.waitall()
    assert array.as_in_context(mx.gpu(0)) is array
    assert array.copyto(mx.cpu()).context == mx.cpu()
    with pytest.raises(ValueError, match=r"gpu\(99\) does not exist"):
        nd.ones((1,), ctx=mx.gpu(99))


def test_deferred_layers_are_made_on_the_device_of_the_network() -> None:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(4, 3), gluon.nn.BatchNorm(), gluon.nn.Dense(2), gluon.nn.LayerNorm())
    net.initialize(ctx=mx.gpu(0))
    assert net(nd.ones((2, 3, 8, 8), ctx=mx.gpu(0))).context == mx.gpu(0)
    assert all(value.list_ctx() == [mx.gpu(0)] for value in net.collect_params().values())


def test_ssd_trains_with_amp_as_without() -> None:
    losses = {}
    for is_amp in (False, True):
        if is_amp:
            amp.init()
        mx.random.seed(0)
        net = gcv.model_zoo.get_model("ssd_512_resnet50_v1_coco", pretrained_base=False)
        net.initialize(ctx=mx.gpu(0))
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001})
        if is_amp:
            amp.init_trainer(trainer)
        data = nd.random.uniform(-1, 1, shape=(2, 3, 512, 512), ctx=mx.gpu(0))
        classes = nd.random.uniform(0, 1, shape=(2, 6132), ctx=mx.gpu(0))
        boxes = nd.random.uniform(0, 1, shape=(2, 6132, 4), ctx=mx.gpu(0))
        means = []
        for _ in range(12):
            with autograd.record():
                scores, positions, _ = net(data)
                sums, *_ = gcv.loss.SSDMultiBoxLoss()([scores], [positions], [classes], [boxes])
                if is_amp:
                    with amp.scale_loss(sums, trainer) as scaled:
                        autograd.backward(scaled)
                else:
                    autograd.backward(sums)
            trainer.step(1)
            means.append(float(sums[0].mean()))
        assert scores.dtype == (np.float16 if is_amp else np.float32)
        losses[is_amp] = means
        assert means[-1] < means[0]
    # With AMP the first updates are skipped until the loss scale fits.
    assert losses[True][0] == pytest.approx(losses[False][0], rel=0.02)
    ids, _, found = net(data)
    assert (ids.shape, found.shape) == ((2, 100, 1), (2, 100, 4))
