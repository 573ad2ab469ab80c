"""bfloat16 losses are told from their graph, and told once."""

from __future__ import annotations

import warnings

import pytest
import torch

from mezzo import _events
from mezzo.scaling.diagnostics import half_dtypes, warn_if_not_needed


def loss(*dtypes: torch.dtype) -> torch.Tensor:
    value = torch.ones(3, requires_grad=True)
    for dtype in dtypes:
        value = (value.to(dtype) * 2).float()
    return value.sum()


@pytest.mark.parametrize(
    "dtypes", [(), (torch.bfloat16,), (torch.float16,), (torch.bfloat16, torch.float16)]
)
def test_the_16_bit_dtypes_of_a_loss_are_those_in_its_graph(dtypes):
    assert half_dtypes(loss(*dtypes)) == set(dtypes)


def test_a_long_history_is_looked_at_only_so_far():
    value = torch.ones(1, requires_grad=True).bfloat16().float()
    for _ in range(2000):
        value = value + 1
    assert half_dtypes(value) == set()


def test_it_is_said_once_a_process_and_emitted():
    with _events.listen() as heard, pytest.warns(UserWarning, match="bfloat16"):
        warn_if_not_needed(loss(torch.bfloat16))
    assert [type(event) for event in heard] == [_events.ScalingNotNeeded]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_not_needed(loss(torch.bfloat16))


@pytest.mark.parametrize("dtypes", [(), (torch.float16,), (torch.float16, torch.bfloat16)])
def test_float16_anywhere_makes_scaling_worth_its_while(dtypes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_not_needed(loss(*dtypes))
