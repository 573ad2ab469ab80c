"""torch's own lists of autocast test cases: every entry has the dtype and the bits that torch's rule says, on torch's path and on ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.torch_cases import CANNOT_RUN, Case, check, cpu_cases, cuda_cases, identify
from torch.testing._internal.autocast_test_lists import AutocastTestLists

import mezzo


def runnable(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=identify(case)) for case in cases if case[0] not in CANNOT_RUN]


@pytest.mark.filterwarnings(
    "ignore:torch.chain_matmul is deprecated", "ignore:Using torch.cross without"
)
@pytest.mark.parametrize("case", runnable(cuda_cases()))
def test_the_cuda_preset_on_a_cpu_runs_every_entry_as_cuda_does(case: Case) -> None:
    check(case, mezzo.autocast("cpu", dtype=torch.float16, preset="torch-cuda"))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", ["torch", "versioned", "off"])
def test_every_cpu_entry_runs_as_torch_says_whatever_the_cache(
    half: torch.dtype, cache: str
) -> None:
    for case in cpu_cases(half):
        if case[0] not in CANNOT_RUN:
            check(case, mezzo.autocast("cpu", dtype=half, cache=cache))


def test_binary_cross_entropy_is_refused_by_the_cuda_preset_with_the_remedy() -> None:
    (_op, args, _module), *_ = AutocastTestLists("cpu").banned
    with (
        mezzo.autocast("cpu", dtype=torch.float16, preset="torch-cuda"),
        pytest.raises(mezzo.RefusedOpError, match="binary_cross_entropy_with_logits"),
    ):
        torch.nn.functional.binary_cross_entropy(*args)
