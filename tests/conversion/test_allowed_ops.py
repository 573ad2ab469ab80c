"""The list of aten ops that a saved program may call."""

from collections import Counter

import pytest
import torch

from mezzo.conversion import allowed_ops
from mezzo.conversion.allowed_ops import ALLOWED, is_allowed
from mezzo.conversion.checked_ops import CHECKED
from mezzo.policy.op_names import is_removed


def test_no_name_is_listed_twice():
    groups = [
        value
        for name, value in vars(allowed_ops).items()
        if isinstance(value, str) and name.strip("_").isupper()
    ]
    assert [name for name, count in Counter(" ".join(groups).split()).items() if count > 1] == []


def test_every_name_is_an_op():
    """Of this version of torch: a word that is misspelt allows nothing."""
    known = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    unknown = {
        name for name in ALLOWED if name.partition(".")[0] not in known and not is_removed(name)
    }
    assert unknown == set()


@pytest.mark.parametrize(
    "name",
    [
        "as_strided_",
        "resize_",
        "set_",
        "copy_backward",
        "native_batch_norm",
        "_unsafe_index",
        "embedding_dense_backward",
    ],
)
def test_ops_that_trust_their_callers_are_not_on_it(name):
    assert not is_allowed(name, "default")


def test_backward_and_sparse_ops_are_not_on_it():
    assert not [
        name
        for name in ALLOWED
        if "backward" in name or "sparse" in name or "mkldnn" in name or "cudnn" in name
    ]


def test_ops_that_are_checked_by_us_are_on_it():
    assert all(
        is_allowed(op._schema.name.removeprefix("aten::"), op._overloadname) for op in CHECKED
    )
