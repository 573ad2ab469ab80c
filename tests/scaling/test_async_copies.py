"""Copies to the host that are looked at when they have arrived."""

from __future__ import annotations

import torch

from mezzo._launch import AsyncCopy, needs_sync


def test_only_a_cpu_is_read_without_waiting():
    assert not needs_sync(torch.device("cpu"))
    assert needs_sync(torch.device("cuda", 1))
    assert needs_sync(torch.device("mps"))


def test_a_copy_holds_what_the_source_held_when_it_was_started():
    source = torch.tensor([1.0, 2.0])
    copy = AsyncCopy(source)
    source.zero_()
    assert copy.arrived()
    assert copy.values() == [1.0, 2.0]
