"""The real thing: torch ops under mezzo's Paddle preset give the dtypes that PaddlePaddle gave, on every usable recorded row."""

from __future__ import annotations

import pytest
from support.paddle_cases import CASES, DTYPES, NO_COUNTERPART, Case, inputs_of, is_usable, letter

import mezzo
from mezzo.policy.presets import paddle


def policy_of(variant: str, listed: tuple[str, ...]) -> mezzo.Policy:
    level, *words = variant.split("_")
    custom = {"white": "half", "black": "full"}
    lists = {custom[word]: set(listed) for word in words if word in custom}
    # Elsewhere Paddle ignores use_promote.
    default_rule = "half" if level == "O2" and "nopromote" in words else None
    return mezzo.Policy(level, preset="paddle", default_rule=default_rule, **lists)


def run(case: Case, row, variant: str) -> str:
    half, inputs = DTYPES[row.half], inputs_of(case, row)
    if variant in ("none", "O0"):
        return letter(case.call(*inputs).dtype, half)
    listed = paddle.NAMES.known[row.listed] if case.listed is None else case.listed
    with mezzo.autocast("cpu", dtype=half, policy=policy_of(variant, listed)):
        return letter(case.call(*inputs).dtype, half)


@pytest.mark.parametrize("op", CASES)
def test_the_output_has_the_dtype_paddle_gave_it(op, paddle_rows):
    wrong = [
        (row.half, row.inputs, variant, expected, got)
        for row in paddle_rows
        if row.op == op
        for variant, (expected, _) in row.results.items()
        if is_usable(row, variant) and (got := run(CASES[op], row, variant)) != expected
    ]
    assert not wrong


def test_few_rows_are_unusable(paddle_rows):
    unusable = [
        (row.op, variant)
        for row in paddle_rows
        for variant in row.results
        if row.op in CASES and not is_usable(row, variant)
    ]
    usable = sum(len(row.results) for row in paddle_rows if row.op in CASES)
    assert len(unusable) < usable / 50


def test_every_recorded_op_is_run_or_said_to_have_no_counterpart(paddle_rows):
    assert {row.op for row in paddle_rows} == CASES.keys() | NO_COUNTERPART.keys()
    assert CASES.keys() & NO_COUNTERPART.keys() == set()
