"""Ops under presets have the dtypes of torch's test cases and of PaddlePaddle's recording."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from support.paddle_cases import CASES, DTYPES, NO_COUNTERPART, dtype_code, inputs_of, is_usable
from support.torch_cases import CANNOT_RUN, Case, check, cpu_cases, cuda_cases, identify
from torch.testing._internal.autocast_test_lists import AutocastTestLists

import mezzo
from mezzo.policy.presets import paddle


@cache
def policy_of(variant: str, listed: tuple[str, ...]) -> mezzo.Policy:
    level, *options = variant.split("_")
    custom = {"white": "half", "black": "full"}
    lists = {custom[option]: set(listed) for option in options if option in custom}
    # Paddle ignores use_promote at other levels.
    default_rule = "half" if level == "O2" and "nopromote" in options else None
    return mezzo.Policy(level, preset="paddle", default_rule=default_rule, **lists)


def run(case, row, variant: str) -> str:
    half, inputs = DTYPES[row.half], inputs_of(case, row)
    if variant in ("none", "O0"):
        return dtype_code(case.call(*inputs).dtype, half)
    listed = paddle.NAMES.known[row.listed] if case.listed is None else case.listed
    with mezzo.autocast("cpu", dtype=half, policy=policy_of(variant, listed)):
        return dtype_code(case.call(*inputs).dtype, half)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("half", DTYPES)
@pytest.mark.parametrize("op", CASES)
def test_the_output_has_the_dtype_recorded_from_paddle(op, half, paddle_rows):
    wrong = [
        (row.inputs, variant, expected, got)
        for row in paddle_rows
        if (row.op, row.half) == (op, half)
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


def test_every_recorded_op_runs_or_has_no_counterpart(paddle_rows):
    assert {row.op for row in paddle_rows} == CASES.keys() | NO_COUNTERPART.keys()
    assert CASES.keys() & NO_COUNTERPART.keys() == set()


def runnable(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=identify(case)) for case in cases if case[0] not in CANNOT_RUN]


@pytest.mark.filterwarnings(
    "ignore:torch.chain_matmul is deprecated", "ignore:Using torch.cross without"
)
@pytest.mark.parametrize("case", runnable(cuda_cases()))
def test_the_cuda_preset_on_a_cpu_casts_every_entry_as_cuda_does(case: Case) -> None:
    check(case, mezzo.autocast("cpu", dtype=torch.float16, preset="torch-cuda"))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", ["torch", "versioned", "off"])
def test_every_cpu_entry_is_cast_as_in_torch_with_every_cache(
    half: torch.dtype, cache: str
) -> None:
    for case in cpu_cases(half):
        if case[0] not in CANNOT_RUN:
            check(case, mezzo.autocast("cpu", dtype=half, cache=cache))


def test_binary_cross_entropy_raises_under_the_cuda_preset_with_the_remedy() -> None:
    (_op, args, _module), *_ = AutocastTestLists("cpu").banned
    with (
        mezzo.autocast("cpu", dtype=torch.float16, preset="torch-cuda"),
        pytest.raises(mezzo.RefusedOpError, match="binary_cross_entropy_with_logits"),
    ):
        torch.nn.functional.binary_cross_entropy(*args)
