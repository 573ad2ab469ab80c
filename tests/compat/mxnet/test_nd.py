"""`mxnet.nd`: creation of arrays, random values and operators."""

import numpy as np
import pytest
import torch

import mezzo.compat.mxnet as mx
from mezzo.compat.mxnet import autograd, nd
from mezzo.compat.mxnet._ndarray import NDArray


def test_arrays_are_float32_by_default_and_copies():
    source = np.arange(3)
    array = nd.array(source)
    assert array.dtype == np.float32
    array[:] = 9
    assert source.tolist() == [0, 1, 2]
    assert nd.array(source, dtype="int32").dtype == np.int32
    assert nd.array(nd.array([1], dtype="float16")).dtype == np.float16
    assert nd.array([nd.ones((2,)), nd.zeros((2,))]).shape == (2, 2)


def test_arrays_are_filled():
    assert nd.zeros(2).asnumpy().tolist() == [0, 0]
    assert nd.ones((1, 2), dtype=np.float16).dtype == np.float16
    assert nd.full((2,), 3).asnumpy().tolist() == [3, 3]
    assert nd.arange(2, 5, repeat=2).asnumpy().tolist() == [2, 2, 3, 3, 4, 4]
    assert nd.arange(3).asnumpy().tolist() == [0, 1, 2]
    assert nd.eye(2).asnumpy().tolist() == [[1, 0], [0, 1]]
    assert nd.empty((2, 3)).shape == (2, 3)


def test_an_unknown_dtype_names_the_known_ones():
    with pytest.raises(TypeError, match=r"Unknown dtype 'half'. Choose one of: float16, bfloat16"):
        nd.zeros((1,), dtype="half")


def test_random_values_repeat_with_the_seed():
    mx.random.seed(7)
    first = nd.random.uniform(-1, 1, shape=(2, 100))
    mx.random.seed(7)
    assert torch.equal(first, nd.random.uniform(-1, 1, shape=(2, 100)))
    assert -1 <= first.min().asscalar() < 0 < first.max().asscalar() < 1


def test_random_values_have_shape_and_dtype():
    assert nd.random.normal(5, 0.1, shape=(3,), dtype="float64").dtype == np.float64
    assert nd.random.normal(5, 1e-3, shape=3).mean().asscalar() == pytest.approx(5, abs=0.1)
    integers = nd.random.randint(2, 5, shape=(100,))
    assert integers.dtype == np.int32
    assert set(integers.asnumpy().tolist()) == {2, 3, 4}
    assert nd.random.randn(2, 3).shape == (2, 3)
    assert nd.random.uniform().shape == (1,)
    assert sorted(nd.random.shuffle(nd.arange(4)).asnumpy().tolist()) == [0, 1, 2, 3]
    assert nd.random.multinomial(nd.array([0, 1])).asscalar() == 1


def test_operators_take_arrays_and_tensors():
    array = nd.array([[-1, 2]])
    assert isinstance(nd.relu(array), NDArray)
    assert type(nd.relu(torch.ones(1))) is torch.Tensor
    assert nd.concat(array, array).shape == (1, 4)
    assert nd.concat(array, array, dim=0).shape == (2, 2)
    assert nd.stack(array, array, axis=0).shape == (2, 1, 2)
    assert nd.dot(array, array, transpose_b=True).asscalar() == 5.0
    assert nd.dot(nd.ones((2,)), nd.ones((2,))).shape == (1,)
    assert nd.batch_dot(nd.ones((2, 1, 3)), nd.ones((2, 1, 3)), transpose_b=True).shape == (2, 1, 1)
    assert nd.sum(array).asscalar() == 1.0
    assert nd.where(array > 0, array, nd.zeros_like(array)).asnumpy().tolist() == [[0, 2]]
    assert nd.softmax(nd.zeros((1, 4))).asnumpy().tolist() == [[0.25] * 4]
    assert nd.broadcast_add(array, nd.ones((2, 1))).shape == (2, 2)
    assert nd.cast(array, "float16").dtype == np.float16
    assert nd.add_n(array, array).asnumpy().tolist() == [[-2, 4]]
    assert nd.norm(nd.array([3, 4])).asnumpy().tolist() == [5.0]
    assert nd.argsort(nd.array([3, 1, 2]), is_ascend=False).asnumpy().tolist() == [0, 2, 1]


def test_layers_as_operators():
    data = nd.ones((2, 3, 4, 4))
    assert nd.FullyConnected(data, nd.ones((5, 48)), no_bias=True, num_hidden=5).shape == (2, 5)
    kernel = nd.ones((6, 3, 3, 3))
    out = nd.Convolution(data, kernel, no_bias=True, kernel=(3, 3), pad=(1, 1), stride=(2, 2))
    assert out.shape == (2, 6, 2, 2)
    assert nd.Activation(nd.array([-1, 1]), act_type="relu").asnumpy().tolist() == [0, 1]
    assert nd.LeakyReLU(nd.array([-4]), slope=0.5).asscalar() == -2.0
    assert nd.smooth_l1(nd.array([0.5, 2])).asnumpy().tolist() == [0.125, 1.5]
    for function, kwargs in ((nd.Activation, {"act_type": "x"}), (nd.LeakyReLU, {"act_type": "x"})):
        with pytest.raises(ValueError, match=r"Unknown act_type 'x'. Choose one of"):
            function(data, **kwargs)


def test_dropout_drops_in_training_mode_only():
    data = nd.ones((1000,))
    assert nd.Dropout(data).min().asscalar() == 1.0
    with autograd.record():
        assert nd.Dropout(data).min().asscalar() == 0.0


def test_waiting_for_everything_needs_no_gpu():
    assert mx.waitall() is nd.waitall() is None


def test_missing_operators_name_the_one_of_torch():
    with pytest.raises(AttributeError, match=r"nd has no topk. Use torch.topk"):
        _ = nd.topk
    with pytest.raises(AttributeError, match=r"has no np. Use torch, or numpy"):
        _ = mx.np
