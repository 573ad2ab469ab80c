"""Counts of ops by output dtype."""

import pytest
import torch
from torch import nn

from mezzo.observing.count_dtypes import DtypeCount, count_dtypes


def test_a_product_is_counted_under_the_dtype_of_its_output():
    with count_dtypes() as counts:
        torch.ones(2, 2).bfloat16() @ torch.ones(2, 2).bfloat16()
    assert counts.of("mm") == {"bfloat16": 1}


def test_the_casts_of_autocast_are_counted():
    layer = nn.Linear(4, 4)
    with count_dtypes() as counts, torch.autocast("cpu", torch.bfloat16):
        torch.nn.functional.cross_entropy(layer(torch.ones(2, 4)), torch.tensor([0, 1]))
    assert counts.of("addmm") == {"bfloat16": 1}
    assert counts.of("_log_softmax") == {"float32": 1}
    assert counts.of("_to_copy") == {"bfloat16": 3, "float32": 1}


def test_the_backward_pass_is_counted_too():
    x = torch.ones(2, 2, requires_grad=True)
    with count_dtypes() as counts:
        (x @ x).sum().backward()
    assert counts.of("mm") == {"float32": 3}


def test_views_and_integer_results_are_not_counted():
    x = torch.ones(2, 3)
    with count_dtypes() as counts:
        x.t().reshape(-1).detach()
        x.argmax()
        x.gt(0)
    assert "t" not in {row.op for row in counts.rows()}
    assert counts.of("detach") == counts.of("argmax") == counts.of("gt") == {}


def test_an_op_is_counted_under_its_first_floating_point_output():
    x = torch.ones(2, 3, 4, 4).bfloat16()
    with count_dtypes() as counts:
        nn.functional.batch_norm(x, None, None, training=True)
        x.max(dim=0)
    assert counts.of("native_batch_norm") == {"bfloat16": 1}
    assert counts.of("max") == {"bfloat16": 1}


def test_in_place_ops_are_counted_under_their_name():
    with count_dtypes() as counts:
        torch.zeros(2).add_(1)
    assert counts.of("add_") == {"float32": 1}


def test_rows_are_sorted_and_add_up_by_dtype():
    x = torch.ones(2)
    with count_dtypes() as counts:
        x.exp()
        x.exp()
        x.double().exp()
    assert counts.rows() == (
        DtypeCount("_to_copy", "float64", 1),
        DtypeCount("exp", "float32", 2),
        DtypeCount("exp", "float64", 1),
    )
    assert counts.by_dtype() == {"float64": 2, "float32": 2}


def test_nothing_is_counted_after_the_block_even_if_it_raised():
    with pytest.raises(RuntimeError, match="stop"), count_dtypes() as counts:
        raise RuntimeError("stop")
    torch.ones(2).exp()
    assert counts.rows() == ()


def test_nested_regions_both_count():
    with count_dtypes() as outer, count_dtypes() as inner:
        torch.ones(2).exp()
    assert outer.of("exp") == inner.of("exp") == {"float32": 1}


def test_counting_does_not_change_results():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(3, 4)
    plain = model(x)
    with count_dtypes():
        counted = model(x)
    assert torch.equal(plain, counted)
