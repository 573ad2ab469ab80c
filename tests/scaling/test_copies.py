"""Copies to the host that are looked at when they have arrived."""

from __future__ import annotations

import torch

from mezzo.scaling.copies import Copy, waits


def test_only_a_cpu_is_read_without_waiting():
    assert not waits(torch.device("cpu"))
    assert waits(torch.device("cuda", 1))
    assert waits(torch.device("mps"))


def test_a_copy_holds_what_the_source_held_when_it_was_started():
    source = torch.tensor([1.0, 2.0])
    copy = Copy(source)
    source.zero_()
    assert copy.arrived()
    assert copy.values() == [1.0, 2.0]
