"""Outputs have names that tell where they stand."""

from collections import OrderedDict

import pytest

from mezzo.conversion.signature import named_leaves


@pytest.mark.parametrize(
    ("nested", "names"),
    [
        (1, ["output"]),
        ((1,), ["output_0"]),
        ([1, (2, 3)], ["output_0", "output_1_0", "output_1_1"]),
        ({"logits": 1, "a b": {"c-d": 2}}, ["logits", "a_b_c_d"]),
        (OrderedDict(x=None), ["x"]),
        ({3: 1}, ["output_3"]),
        ((), []),
    ],
    ids=["alone", "tuple", "nested", "words", "none", "number", "nothing"],
)
def test_names_tell_where_outputs_stand(nested, names):
    assert [name for name, _ in named_leaves(nested)] == names
