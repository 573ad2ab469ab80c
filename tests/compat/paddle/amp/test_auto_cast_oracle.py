"""Every usable row that PaddlePaddle was recorded with, in its own words: level, op name in a custom list, half type and `use_promote`."""

from __future__ import annotations

import warnings

import pytest
from support.paddle_cases import CASES, DTYPES, Case, inputs_of, is_usable, letter

from mezzo.compat import paddle
from mezzo.policy.presets.paddle import NAMES

DIFFERENT = {
    "add_scalar": "Paddle adds a number by its op 'scale', which torch does not have: the name in a list reaches nothing here, and a warning says so",
}
"""Ops whose custom lists do something else here, and why."""


def run(case: Case, row, variant: str) -> str:
    level, *words = variant.split("_")
    inputs = inputs_of(case, row)
    if level == "none":
        return letter(case.call(*inputs).dtype, DTYPES[row.half])
    lists = {f"custom_{word}_list": {row.listed} for word in words if word in ("white", "black")}
    with paddle.amp.auto_cast(level=level, dtype=str(DTYPES[row.half]).removeprefix("torch."), use_promote="nopromote" not in words, **lists):
        return letter(case.call(*inputs).dtype, DTYPES[row.half])


@pytest.mark.parametrize("op", CASES)
def test_the_output_has_the_dtype_paddle_gave_it(op, paddle_rows):
    wrong = []
    for row in (row for row in paddle_rows if row.op == op):
        for variant, (expected, _) in row.results.items():
            listed = variant.endswith(("white", "black"))
            if not is_usable(row, variant) or (listed and op in DIFFERENT):
                continue
            with warnings.catch_warnings():
                if listed and row.listed not in NAMES.known:
                    warnings.filterwarnings("ignore", f"'{row.listed}' in a custom list has no effect")
                if (got := run(CASES[op], row, variant)) != expected:
                    wrong.append((row.half, row.inputs, variant, expected, got))
    assert not wrong


def test_a_number_is_added_as_any_tensor_is_whatever_paddles_list_says_of_scale(paddle_rows):
    row = next(row for row in paddle_rows if row.op == "add_scalar" and row.inputs == "f")
    assert row.results["O1_white"][0] == "h"
    with pytest.warns(UserWarning, match="'scale' in a custom list has no effect: Paddle's scale is a multiplication and an addition of numbers"):
        assert run(CASES["add_scalar"], row, "O1_white") == "f"
