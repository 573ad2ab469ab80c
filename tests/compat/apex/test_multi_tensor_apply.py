"""Apex's kernels are asked for, and say that they are not there."""

import pytest

from mezzo import UnsupportedError
from mezzo.compat.apex.multi_tensor_apply import multi_tensor_applier


def test_the_kernels_say_that_they_are_not_there():
    assert not multi_tensor_applier.available
    assert multi_tensor_applier.chunk_size == 2048 * 32
    with pytest.raises(
        UnsupportedError, match=r"not available here\. Use torch's _foreach functions"
    ):
        multi_tensor_applier(None, None, [[]])
