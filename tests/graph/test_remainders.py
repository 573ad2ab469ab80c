import pytest
import torch
from support.graphs import HALF, relative_error

from mezzo.graph.remainders import LARGEST, PER_BYTE, factors, fixed_point, grid, pack

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=["float16", "bfloat16"])
TABLE = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * 0.02


def _level(packed, levels, width):
    return torch.cat([packed.int() // levels**place % levels for place in range(PER_BYTE[levels])], 1)[:, :width]


def _fixed(table, dtype, levels):
    numbers, scale, *packed = fixed_point(table, dtype, levels)
    return (numbers + (_level(packed[0], levels, table.shape[1]) / levels if packed else 0.0)) / LARGEST * scale


def _factored(table, dtype, levels):
    rounded, (step, start) = table.to(dtype), grid(dtype, levels)
    return rounded * (_level(factors(table, rounded, levels), levels, table.shape[1]) * step + start)


@pytest.mark.parametrize("width", [15, 16, 17])
@pytest.mark.parametrize("levels", PER_BYTE)
def test_levels_come_back_from_their_bytes_whatever_the_width(levels, width):
    level = torch.randint(0, levels, (3, width))
    packed = pack(level, levels)
    assert packed.dtype is torch.uint8
    assert packed.shape == (3, -(-width // PER_BYTE[levels]))
    assert torch.equal(_level(packed, levels, width), level)


@pytest.mark.parametrize("levels", PER_BYTE)
def test_as_many_parts_are_in_a_byte_as_fit(levels):
    assert levels ** PER_BYTE[levels] <= 256 < (levels + 1) ** PER_BYTE[levels]


@DTYPES
@pytest.mark.parametrize("levels", [2, 3, 4, 6, 16])
def test_fixed_point_loses_as_much_less_as_there_are_levels(levels, dtype):
    error = relative_error(_fixed(TABLE, dtype, levels), TABLE) / relative_error(_fixed(TABLE, dtype, 1), TABLE)
    assert error == pytest.approx(1 / levels, rel=0.05)


@DTYPES
def test_with_a_byte_fixed_point_is_float32_but_for_its_last_bits(dtype):
    assert relative_error(_fixed(TABLE, dtype, 256), TABLE) < 3e-7


@DTYPES
@pytest.mark.parametrize(("levels", "left"), [(2, 0.55), (3, 0.4), (4, 0.3), (6, 0.22), (16, 0.1), (256, 0.06)])
def test_factors_bring_back_most_of_what_rounding_lost(levels, left, dtype):
    assert relative_error(_factored(TABLE, dtype, levels), TABLE) < left * relative_error(TABLE.to(dtype), TABLE)


@DTYPES
@pytest.mark.parametrize("levels", PER_BYTE)
def test_no_number_is_further_than_it_was_by_rounding_alone_and_half_a_step(levels, dtype):
    lost = (_factored(TABLE, dtype, levels) - TABLE).abs()
    assert (lost <= (TABLE.to(dtype) - TABLE).abs() + grid(dtype, levels)[0] * TABLE.abs()).all()


@pytest.mark.parametrize("levels", PER_BYTE)
def test_zeros_infinities_and_what_a_dtype_has_no_number_for_stay_as_rounding_left_them(levels):
    table = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-9, 1.0, 2.0]])
    assert torch.equal(_factored(table, torch.float16, levels)[:, :4], table[:, :4])
    assert _factored(table, torch.float16, levels)[0, 4].isnan()
    assert _factored(table, torch.float16, levels)[0, 5] == 0


@pytest.mark.parametrize("levels", [1, *PER_BYTE])
def test_rows_of_zeros_and_the_largest_number_come_back(levels):
    table = torch.tensor([[0.0], [3e38], [1e-30]]).expand(3, 8) * torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 0.5, -0.5])
    assert torch.allclose(_fixed(table, HALF, levels), table, rtol=1e-4, atol=0)


def test_rows_that_float16_barely_holds_do_not_overflow():
    table = torch.tensor([[65504.0, -65504.0], [9e-8, -9e-8], [1e-30, 0.0]])
    assert torch.allclose(_fixed(table, torch.float16, 1), table, rtol=1e-4, atol=1e-12)
