"""Compare saved states bit by bit."""

from __future__ import annotations

from typing import Any

import torch


def assert_equal(one: Any, other: Any) -> None:
    """Assert that nested states are equal: dtypes and values of tensors, on any device."""
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype
        assert torch.equal(one.cpu(), other.cpu())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_equal(first, second)
    else:
        assert one == other
