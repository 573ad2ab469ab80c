"""Rows are read as aligned lines."""

import pytest
import torch

from mezzo.prepare.plan_rows import PlanRow, size, table


def row(name, shape=(2, 3), after=torch.bfloat16):
    return PlanRow(name, "parameter", shape, torch.float32, after, master=True, reason="why not")


def test_a_row_knows_its_size_and_its_change():
    assert row("a").numel == 6
    assert row("a", shape=()).numel == 1
    assert row("a", shape=(0, 4)).numel == 0
    assert row("a").change == "float32 → bfloat16"
    assert row("a", after=torch.float32).change == "float32"


def test_columns_line_up_whatever_is_in_them():
    lines = table(
        (
            row("short"),
            row("a.much.longer.name", shape=(1024, 1024, 3, 3)),
            row("scalar", shape=(), after=torch.float32),
        )
    )
    assert len({line.index("why") for line in lines}) == 1
    assert "1024 × 1024 × 3 × 3" in lines[2]
    assert lines[3].split()[1] == "scalar"


def test_a_table_without_rows_is_its_heading():
    assert table(()) == ["name  shape  dtype  why"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (5 * 2**30, "5.0 GiB"),
    ],
)
def test_sizes_are_read_in_the_largest_unit(count, text):
    assert size(count) == text
