"""`megengine.tensor`."""

import numpy as np
import pytest
import torch

import mezzo.compat.megengine as mge


@pytest.mark.parametrize(
    ("data", "dtype", "expected"),
    [
        (np.zeros(2), None, torch.float32),
        (np.zeros(2), "int32", torch.int32),
        (np.zeros(2, dtype="int64"), None, torch.int64),
        (np.zeros(2), np.float64, torch.float64),
        (np.zeros(2), np.dtype("float16"), torch.float16),
        ([1, 2], torch.bfloat16, torch.bfloat16),
        (16.0, None, torch.float32),
    ],
    ids=["float64", "int32", "int64", "explicit", "numpy", "torch", "number"],
)
def test_dtypes_are_those_of_megengine(data, dtype, expected):
    assert mge.tensor(data, dtype=dtype).dtype is expected


def test_the_data_are_copied():
    data = np.ones(1, dtype="float32")
    tensor = mge.tensor(data)
    data[0] = 5.0
    assert tensor.item() == 1.0


def test_an_unknown_dtype_is_rejected_with_a_suggestion():
    with pytest.raises(ValueError, match=r"Unknown dtype 'flaot32'.*Did you mean 'float32'"):
        mge.tensor([1.0], dtype="flaot32")
