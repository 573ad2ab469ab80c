"""Every usable row that PaddlePaddle was recorded with, in its own words: level, op name in a custom list, half type and `use_promote`."""

from __future__ import annotations

import pytest
from support.paddle_cases import CASES, DTYPES, Case, inputs_of, is_usable, letter

from mezzo.compat import paddle
from mezzo.compat.paddle.amp import _auto_cast

DIFFERENT = {
    "add_scalar": (
        "Paddle adds a number by its op 'scale', which torch does not have: the name in a list"
        " reaches nothing here, and the log says so"
    ),
}
"""Ops whose custom lists do something else here, and why."""


def run(case: Case, row, variant: str) -> str:
    level, *words = variant.split("_")
    inputs = inputs_of(case, row)
    if level == "none":
        return letter(case.call(*inputs).dtype, DTYPES[row.half])
    lists = {f"custom_{word}_list": {row.listed} for word in words if word in ("white", "black")}
    with paddle.amp.auto_cast(
        level=level,
        dtype=str(DTYPES[row.half]).removeprefix("torch."),
        use_promote="nopromote" not in words,
        **lists,
    ):
        return letter(case.call(*inputs).dtype, DTYPES[row.half])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("op", CASES)
def test_the_output_has_the_dtype_paddle_gave_it(op, paddle_rows):
    wrong = [
        (row.half, row.inputs, variant, expected, got)
        for row in paddle_rows
        if row.op == op
        for variant, (expected, _) in row.results.items()
        if is_usable(row, variant)
        and not (op in DIFFERENT and variant.endswith(("white", "black")))
        and (got := run(CASES[op], row, variant)) != expected
    ]
    assert not wrong


def test_a_number_is_added_as_any_tensor_is_whatever_paddles_list_says_of_scale(
    paddle_rows, monkeypatch, caplog
):
    monkeypatch.setattr(_auto_cast, "_said", set())
    row = next(row for row in paddle_rows if row.op == "add_scalar" and row.inputs == "f")
    assert row.results["O1_white"][0] == "h"
    assert run(CASES["add_scalar"], row, "O1_white") == "f"
    assert (
        "'scale' in a custom list has no effect: Paddle's scale is a multiplication and an addition"
        " of numbers" in caplog.text
    )
