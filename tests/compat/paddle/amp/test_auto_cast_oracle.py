"""Run every usable recorded row of PaddlePaddle through `auto_cast`.

A row has the output dtype of one op for a level, a custom list, a 16-bit dtype and `use_promote`.
"""

from __future__ import annotations

import pytest
from support.paddle_cases import CASES, DTYPES, Case, dtype_code, inputs_of, is_usable

from mezzo.compat import paddle
from mezzo.compat.paddle.amp import _auto_cast

DIFFERENT = {
    "add_scalar": (
        "Paddle adds a number with its op 'scale', which torch does not have: the name in a list"
        " has no effect here and is logged"
    ),
}
"""Ops whose custom lists have another effect here → reason."""


def output_dtype(case: Case, row, variant: str) -> str:
    level, *options = variant.split("_")
    inputs = inputs_of(case, row)
    if level == "none":
        return dtype_code(case.call(*inputs).dtype, DTYPES[row.half])
    lists = {
        f"custom_{color}_list": {row.listed} for color in ("white", "black") if color in options
    }
    with paddle.amp.auto_cast(
        level=level,
        dtype=str(DTYPES[row.half]).removeprefix("torch."),
        use_promote="nopromote" not in options,
        **lists,
    ):
        return dtype_code(case.call(*inputs).dtype, DTYPES[row.half])


@pytest.mark.thinned(6)
@pytest.mark.parametrize("op", CASES)
def test_the_output_dtype_is_paddles(op, paddle_rows):
    mismatches = [
        (row.half, row.inputs, variant, expected, actual)
        for row in paddle_rows
        if row.op == op
        for variant, (expected, _) in row.results.items()
        if is_usable(row, variant)
        and not (op in DIFFERENT and variant.endswith(("white", "black")))
        and (actual := output_dtype(CASES[op], row, variant)) != expected
    ]
    assert not mismatches


def test_scale_in_a_custom_list_has_no_effect_on_adding_a_number(paddle_rows, monkeypatch, caplog):
    monkeypatch.setattr(_auto_cast, "_logged_names", set())
    row = next(row for row in paddle_rows if row.op == "add_scalar" and row.inputs == "f")
    assert row.results["O1_white"][0] == "h"
    assert output_dtype(CASES["add_scalar"], row, "O1_white") == "f"
    assert (
        "'scale' in a custom list has no effect: Paddle's scale is a multiplication and an addition"
        " of numbers" in caplog.text
    )
