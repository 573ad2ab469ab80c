"""`gluon.data`: data sets and the batches of a loader."""

import numpy as np
import pytest

import mezzo.compat.mxnet as mx
from mezzo.compat.mxnet import gluon
from mezzo.compat.mxnet.gluon import data


def test_batches_are_arrays_of_the_columns():
    dataset = data.ArrayDataset(np.arange(6.0).reshape(3, 2), mx.nd.array([0, 1, 2]))
    (first, labels), (second, _) = data.DataLoader(dataset, batch_size=2)
    assert (first.asnumpy().tolist(), first.dtype) == ([[0.0, 1.0], [2.0, 3.0]], np.float32)
    assert labels.asnumpy().tolist() == [0, 1]
    assert second.shape == (1, 2)
    assert gluon.utils.split_and_load(first, [mx.cpu()])[0].shape == (2, 2)


@pytest.mark.parametrize(
    ("last_batch", "sizes", "length"),
    [("keep", [2, 2, 1], 3), ("discard", [2, 2], 2), ("rollover", [2, 2], 2)],
)
def test_the_last_batch_is_kept_discarded_or_rolled_over(last_batch, sizes, length):
    loader = data.DataLoader(data.SimpleDataset([1, 2, 3, 4, 5]), 2, last_batch=last_batch)
    assert len(loader) == length
    assert [len(batch) for batch in loader] == sizes
    again = [batch.asnumpy().tolist() for batch in loader]
    assert again[0] == ([5, 1] if last_batch == "rollover" else [1, 2])
    assert len(again) == (3 if last_batch == "rollover" else length)


def test_a_loader_shuffles_and_takes_samplers():
    dataset = data.SimpleDataset(list(range(20)))
    (batch,) = data.DataLoader(dataset, 20, shuffle=True)
    assert batch.asnumpy().tolist() != list(range(20))
    assert sorted(batch.asnumpy().tolist()) == list(range(20))
    loader = data.DataLoader(dataset, batch_sampler=[[3, 1], [2]])
    assert [batch.asnumpy().tolist() for batch in loader] == [[3, 1], [2]]
    (batch,) = data.DataLoader(dataset, 2, sampler=[7, 8], batchify_fn=tuple)
    assert batch == (7, 8)


@pytest.mark.parametrize("lazy", [True, False])
def test_samples_are_transformed(lazy):
    dataset = data.ArrayDataset([1, 2], [3, 4])
    assert dataset.transform(lambda x, y: x + y, lazy)[1] == 6
    assert dataset.transform_first(lambda x: x * 10, lazy)[1] == (20, 4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: data.DataLoader([1]), ValueError, "batch_size must be specified unless"),
        (lambda: data.DataLoader([1], 1, last_batch="x"), ValueError, "last_batch must be one of"),
        (lambda: data.ArrayDataset([1], [1, 2]), AssertionError, "must have the same length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_arguments_raise_as_in_mxnet(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_batch_norm_takes_one_value_per_channel_in_training():
    layer = gluon.nn.BatchNorm(in_channels=2)
    layer.initialize()
    with mx.autograd.record():
        output = layer(mx.nd.ones((1, 2, 1, 1)))
    assert output.asnumpy().ravel().tolist() == [0.0, 0.0]
