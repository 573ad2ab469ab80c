"""Tables and learnt positions in parts: who reads them reads what is computed of these."""

import pytest
import torch
from support.graphs import HALF, Calls, relative_error
from torch import nn

import mezzo

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=["float16", "bfloat16"])
X = torch.randn(2, 300, 32)


class Placed(nn.Module):
    """Adds a learnt vector to each of many places, some of which may be masked."""

    def __init__(self, masked=False):
        super().__init__()
        self.places, self.linear, self.masked = nn.Parameter(torch.randn(1, 300, 32)), nn.Linear(32, 32), masked
        self.register_buffer("mask", torch.zeros(300, 300).masked_fill_(torch.ones(300, 300).triu(1).bool(), -torch.inf) if masked else torch.zeros(1))

    def forward(self, x):
        x = x + self.places
        return (self.linear(x) @ x.mT).float() + self.mask if self.masked else x + self.linear(x) * 1e-4


@DTYPES
def test_what_is_only_added_is_in_fixed_point_too_where_it_is_large(dtype):
    model, x = Placed().eval(), torch.randn(2, 300, 32)
    converted = mezzo.convert(model, (x,), dtype=dtype)
    assert converted.plan.row("p_places").dtype == "int16"
    assert sum(one.nbytes for one in converted.artefact.programs[0].exported.state_dict.values()) < 0.55 * sum(one.nbytes for one in model.parameters())
    assert relative_error(converted(x), model(x)) < 3e-5


def test_what_is_sliced_and_added_is_in_fixed_point_and_dynamic_sizes_read_it():
    model = Calls(lambda self, x: x + self.table.weight[: x.shape[1]] + self.linear(x) * 1e-4, table=nn.Embedding(300, 32), linear=nn.Linear(32, 32)).eval()
    x = torch.randn(2, 200, 32)
    converted = mezzo.convert(model, (x,), dtype=HALF, dynamic_shapes=(({1: torch.export.Dim("length", max=300)},),))
    assert converted.plan.row("p_table_weight").dtype == "int16"
    assert all(relative_error(converted(one), model(one)) < 3e-5 for one in (x, x[:, :7]))


def test_infinities_that_are_added_stay_float32():
    model, x = Placed(masked=True).eval(), torch.randn(2, 300, 32)
    converted = mezzo.convert(model, (x,), dtype=HALF)
    assert converted.plan.row("b_mask").dtype == "float32"
    assert torch.equal(converted(x).isinf(), model(x).isinf())


def test_what_is_excluded_stays_exact():
    model = Placed().eval()
    for excluded in ("add", "add*"):
        assert mezzo.convert(model, (X,), dtype=HALF, exclude={excluded}).plan.row("p_places").dtype == "float32"


def test_positions_that_the_model_computes_stay_float32():
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("places", torch.randn(1, 300, 32), persistent=False)

        def forward(self, x):
            return x + self.places + self.linear(x) * 1e-4

    model = Computed().eval()
    assert relative_error(mezzo.convert(model, (X,), dtype=HALF)(X), model(X)) < 1e-6


def test_rows_that_are_known_stay_float32():
    model = Calls(lambda self, x: x + self.table(torch.arange(300)) + self.linear(x) * 1e-4, table=nn.Embedding(600, 32), linear=nn.Linear(32, 32)).eval()
    assert relative_error(mezzo.convert(model, (X,), dtype=HALF)(X), model(X)) < 1e-6
