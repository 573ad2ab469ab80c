"""`gluon.utils`: slices of a batch and gradient clipping."""

import numpy as np
import pytest
import torch

import mezzo.compat.mxnet as mx
from mezzo.compat.mxnet import nd
from mezzo.compat.mxnet._ndarray import NDArray
from mezzo.compat.mxnet.gluon import utils


def test_a_batch_is_split_for_each_context():
    slices = utils.split_and_load(nd.arange(4), ctx_list=[mx.cpu(0), mx.cpu(1)], batch_axis=0)
    assert [part.asnumpy().tolist() for part in slices] == [[0, 1], [2, 3]]
    assert utils.split_and_load(np.ones((2, 3)), [mx.cpu()])[0].dtype == np.float32
    assert isinstance(utils.split_and_load(torch.ones(2), [mx.cpu()])[0], NDArray)
    assert utils.split_data(nd.ones((2, 4)), 2, batch_axis=1)[1].shape == (2, 2)


def test_uneven_batches_say_what_to_do():
    with pytest.raises(
        ValueError, match=r"shape \(3,\) cannot be .* multiple of 2, or set even_split"
    ):
        utils.split_data(nd.ones((3,)), 2)
    with pytest.raises(ValueError, match="use a larger batch"):
        utils.split_data(nd.ones((1,)), 2, even_split=False)
    with pytest.raises(TypeError, match=r"got cpu\(0\). Pass \[cpu\(0\)\]"):
        utils.split_and_load(nd.ones((1,)), mx.cpu())


def test_gradients_are_clipped_by_their_global_norm():
    arrays = [nd.array([3]), nd.array([4])]
    assert utils.clip_global_norm(arrays, 10.0) == pytest.approx(5.0)
    assert arrays[0].asscalar() == 3.0
    assert utils.clip_global_norm(arrays, 1.0) == pytest.approx(5.0)
    assert [array.asscalar() for array in arrays] == pytest.approx([0.6, 0.8])
    assert isinstance(utils.clip_global_norm(arrays, 1.0, check_isfinite=False), NDArray)
    with pytest.warns(UserWarning, match="nan or inf is detected"):
        utils.clip_global_norm([nd.array([float("inf")])], 1.0)
    with pytest.raises(ValueError, match="empty list"):
        utils.clip_global_norm([], 1.0)
