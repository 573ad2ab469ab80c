"""`paddle.io`: data sets, samplers and the loader."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mezzo.compat import paddle
from mezzo.compat.paddle import io


class Pairs(io.Dataset):
    def __init__(self, count=10):
        self.count = count

    def __getitem__(self, index):
        return np.full(3, index, "float32"), np.array([index % 2])

    def __len__(self):
        return self.count


class Stream(io.IterableDataset):
    def __iter__(self):
        yield from (np.float32(value) for value in range(5))


def test_batches_are_tensors_of_paddle():
    loader = paddle.io.DataLoader(Pairs(), batch_size=4, shuffle=False, drop_last=True)
    batches = list(loader)
    assert len(batches) == len(loader) == 2
    data, label = batches[1]
    assert (type(data), data.shape, data.dtype) == (paddle.Tensor, [4, 3], torch.float32)
    assert (type(label), label.shape, label.dtype) == (paddle.Tensor, [4, 1], torch.int64)
    assert data[:, 0].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert data.place == paddle.zeros([1]).place


def test_a_loader_can_be_called_for_an_iterator():
    loader = io.DataLoader(Pairs(), batch_size=4)
    assert [len(data) for _, (data, _) in enumerate(loader())] == [4, 4, 2]
    assert len(next(loader())[0]) == 4


def test_workers_load_the_same_batches():
    options = {"batch_size": 5, "places": paddle.CPUPlace()}
    in_workers = list(io.DataLoader(Pairs(), num_workers=1, **options))
    for (data, _), (expected, _) in zip(in_workers, io.DataLoader(Pairs(), **options), strict=True):
        assert type(data) is paddle.Tensor
        assert torch.equal(data, expected)


def test_shuffling_follows_the_seed():
    def order():
        paddle.seed(3)
        return [int(row[0]) for data, _ in io.DataLoader(Pairs(), shuffle=True) for row in data]

    assert order() == order() != sorted(order())
    assert sorted(order()) == list(range(10))


def test_samples_may_be_numbers_dicts_tensors_and_streams():
    assert [batch.tolist() for batch in io.DataLoader(Stream(), batch_size=3)] == [
        [0.0, 1.0, 2.0],
        [3.0, 4.0],
    ]
    (batch,) = io.DataLoader([{"x": 1, "y": np.ones(2)}] * 2, batch_size=2)
    assert {name: value.shape for name, value in batch.items()} == {"x": [2], "y": [2, 2]}
    tensors = io.TensorDataset([paddle.rand([4, 2]), paddle.arange(4)])
    assert [part.shape for part in next(iter(io.DataLoader(tensors, batch_size=3)))] == [
        [3, 2],
        [3],
    ]
    (name,) = io.DataLoader(["a", "b"], batch_size=2)
    assert name == ["a", "b"]


def test_a_collate_function_may_return_arrays():
    loader = io.DataLoader(
        Pairs(), batch_size=2, collate_fn=lambda batch: np.stack([a for a, _ in batch])
    )
    assert type(next(iter(loader))) is paddle.Tensor
    single = io.DataLoader(Pairs(2), batch_size=None)
    assert [data.shape for data, _ in single] == [[3], [3]]


def test_samplers_choose_the_samples():
    sampler = io.BatchSampler(sampler=io.SequenceSampler(Pairs(5)), batch_size=2, drop_last=True)
    assert list(sampler) == [[0, 1], [2, 3]]
    assert len(sampler) == 2 == len(io.DataLoader(Pairs(5), batch_sampler=sampler))
    assert sorted(
        index for batch in io.BatchSampler(Pairs(5), shuffle=True, batch_size=2) for index in batch
    ) == [0, 1, 2, 3, 4]
    assert len(list(io.RandomSampler(Pairs(), replacement=True, num_samples=25))) == 25
    with pytest.raises(ValueError, match="either dataset= or sampler="):
        io.BatchSampler()


def test_a_data_set_is_split_at_random():
    first, second = io.random_split(Pairs(5), [2, 3])
    assert (len(first), len(second)) == (2, 3)
    assert sorted(int(data[0]) for part in (first, second) for data, _ in part) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="add up to 4, and the dataset has 5"):
        io.random_split(Pairs(5), [2, 2])


def test_what_is_not_supported_says_what_to_do():
    with pytest.raises(ValueError, match=r"pass feed=\{name: batch\[0\]\}"):
        io.DataLoader(Pairs(), return_list=False)
    with pytest.raises(ValueError, match="same first size"):
        io.TensorDataset([torch.ones(2), torch.ones(3)])

    class Unfinished(io.Dataset):
        pass

    with pytest.raises(NotImplementedError, match="'__len__' not implement in class Unfinished"):
        len(Unfinished())
