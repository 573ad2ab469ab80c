"""`shadow`: the error of each op and module against exact values."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 16), torch.randn(8, 4)


@pytest.mark.parametrize(("dtype", "eps"), [("float16", 2**-10), ("bfloat16", 2**-7)])
def test_errors_are_those_of_the_dtype(dtype, eps):
    errors = mezzo.shadow(model(), batch(), F.mse_loss, dtype=dtype)
    for direction in ("forward", "backward"):
        by_module = errors.modules(direction)
        assert {"0", "1", "2", ""} <= set(by_module)
        assert all(0.02 * eps < by_module[name] < 4 * eps for name in "012")


def test_float32_has_errors_of_float32():
    errors = mezzo.shadow(model(), batch(), F.mse_loss, "O0")
    assert max(row.error for row in errors.rows) < 1e-6
    assert {row.dtype for row in errors.rows} == {"float32"}


def test_the_error_of_the_output_is_that_of_a_float64_model():
    x, y = batch()
    errors = mezzo.shadow(model(), (x, y), F.mse_loss, dtype="float16")
    with torch.no_grad(), mezzo.autocast("cpu", dtype="float16"):
        rounded = model()(x)
    exact = model().double()(x.double()).detach()
    expected = float((rounded.double() - exact).norm() / exact.norm())
    (row,) = [row for row in errors.of("2") if row.direction == "forward"]
    assert row.op == "linear"
    assert row.error == pytest.approx(expected, rel=0.05)


def test_a_result_that_overflows_has_an_infinite_error_and_the_run_goes_on():
    large = model()
    nn.init.constant_(large[2].bias, 1e5)
    errors = mezzo.shadow(large, batch(), F.mse_loss, dtype="float16")
    assert errors.worst(1)[0].error == float("inf")
    assert "mse_loss" in {row.op for row in errors.rows}


def test_a_gradient_that_is_zero_but_for_rounding_has_no_large_error():
    normed = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    errors = mezzo.shadow(normed, batch(), F.mse_loss, "O2", dtype="bfloat16")
    assert errors.modules("backward")["0"] < 0.1


def test_integers_and_complex_numbers_are_written_in_place_once():
    class Buckets(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 4)

        def forward(self, x):
            bucket = torch.zeros(2, dtype=torch.long)
            bucket += torch.tensor([1, 2])
            wave = torch.polar(x[:, :4], x[:, :4])
            wave *= 2.0
            return self.table(bucket).sum() + wave.real.sum()

    x, y = batch()
    found = mezzo.trace_overflow(Buckets(), (x, y), lambda loss, _: loss, dtype="bfloat16")
    assert not found
    errors = mezzo.shadow(Buckets(), (x, y), lambda loss, _: loss, dtype="bfloat16")
    assert max(errors.modules().values()) < 0.1


def test_the_table_has_a_line_for_each_op():
    errors = mezzo.shadow(model(), batch(), F.mse_loss, dtype="float16")
    lines = str(errors).splitlines()
    assert lines[0].split() == "module op pass dtype calls error inputs line".split()
    assert len(lines) == len(errors.rows) + 1
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["0", "linear"],
        ["1", "gelu"],
        ["2", "linear"],
    ]
