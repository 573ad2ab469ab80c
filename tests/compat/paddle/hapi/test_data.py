"""Data sets, loaders and batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mezzo.compat.paddle.hapi._training_loop import Shuffled, inputs_taken, loader_of, placed

DATA = TensorDataset(torch.arange(10.0))


def test_a_data_set_is_loaded_in_batches():
    assert [len(batch[0]) for batch in loader_of(DATA, batch_size=4)] == [4, 4, 2]
    assert [len(batch[0]) for batch in loader_of(DATA, batch_size=4, drop_last=True)] == [4, 4]


def test_shuffling_follows_torchs_seed():
    def order():
        torch.manual_seed(3)
        return [
            value.item()
            for batch in loader_of(DATA, batch_size=5, shuffle=True)
            for value in batch[0]
        ]

    assert order() == order()
    assert order() != sorted(order())
    assert sorted(Shuffled(4)) == [0, 1, 2, 3]


def test_loaders_and_lists_of_batches_are_taken_as_they_are():
    loader, batches = DataLoader(DATA), [(torch.ones(1),)]
    assert loader_of(loader, batch_size=4) is loader
    assert loader_of(batches, batch_size=4) is batches


def test_what_cannot_be_gone_through_is_refused():
    with pytest.raises(
        TypeError,
        match="The data should be a torch Dataset or DataLoader, or batches to go through, got int",
    ):
        loader_of(3, batch_size=1)


def test_as_many_values_go_in_as_forward_needs():
    class Two(nn.Module):
        def forward(self, one, other, mask=None):
            return one + other

    assert inputs_taken(Two().forward) == 2
    assert inputs_taken(lambda *values: values) == 1


def test_numbers_become_tensors():
    assert [one.tolist() for one in placed([1, [2.0]], torch.device("cpu"))] == [1, [2.0]]
