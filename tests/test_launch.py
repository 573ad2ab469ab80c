"""Devices, asynchronous copies and memory layouts of kernel launches."""

import pytest
import torch

from mezzo import _launch
from mezzo._launch import AsyncCopy, needs_sync


def test_only_reading_from_a_cpu_does_not_synchronize():
    assert not needs_sync(torch.device("cpu"))
    assert needs_sync(torch.device("cuda", 1))
    assert needs_sync(torch.device("mps"))


def test_a_copy_has_the_values_at_the_time_it_was_started():
    source = torch.tensor([1.0, 2.0])
    copy = AsyncCopy(source)
    source.zero_()
    assert copy.arrived()
    assert copy.values() == [1.0, 2.0]


def test_a_cuda_device_without_triton_has_no_kernels(monkeypatch):
    monkeypatch.setattr(_launch, "find_spec", lambda _: None)
    _launch._is_triton_installed.cache_clear()
    assert not _launch.has_triton(torch.device("cuda"))
    _launch._is_triton_installed.cache_clear()


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(()), True),
        (torch.ones(3, 0), True),
        (torch.ones(3, 4).T, True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(4, 1, 6).transpose(0, 2), True),
        (torch.ones(10)[3:7], True),
        (torch.ones(10)[::2], False),
        (torch.ones(4, 4)[:, :2], False),
        (torch.ones(4, 4)[:2].T, True),
        (torch.ones(1).expand(5), False),
        (torch.ones(3, 1).expand(3, 3), False),
        (torch.ones(5).as_strided((3, 3), (1, 1)), False),
    ],
)
def test_a_dense_tensor_fills_its_memory_without_gaps_or_overlap(tensor, dense):
    assert _launch.is_dense(tensor) is dense
