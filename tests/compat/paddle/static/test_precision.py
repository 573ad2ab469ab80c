"""Paddle's static lists as a policy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mezzo
from mezzo.compat.paddle import static
from mezzo.compat.paddle.static._training import GRAY, Precision
from mezzo.policy.presets.paddle import NAMES


def dtypes(precision: Precision, **calls):
    with mezzo.autocast("cpu", policy=precision.policy):
        return {name: call().dtype for name, call in calls.items()}


def test_at_o1_ops_in_no_list_are_float32_and_gray_ones_follow_what_flows_into_them():
    half = torch.ones(2, 2, dtype=torch.float16)
    seen = dtypes(
        Precision("O1"),
        linear=lambda: F.linear(torch.ones(2, 2), torch.ones(2, 2)),
        relu=lambda: half.relu(),
        sin=lambda: half.sin(),
        exp=lambda: half.exp(),
    )
    assert seen == {
        "linear": torch.float16,
        "relu": torch.float16,
        "sin": torch.float32,
        "exp": torch.float32,
    }


def test_promotion_treats_ops_in_no_list_as_eager_mode_does():
    assert dtypes(
        Precision("O1", promote=True), sin=lambda: torch.ones(2, dtype=torch.float16).sin()
    ) == {"sin": torch.float16}


def test_at_o2_ops_in_no_list_are_16_bit_unless_they_promote():
    ones = torch.ones(2)
    assert dtypes(Precision("O2"), add=lambda: ones + ones, exp=lambda: ones.exp()) == {
        "add": torch.float16,
        "exp": torch.float16,
    }
    assert dtypes(Precision("O2", promote=True), add=lambda: ones + ones) == {"add": torch.float32}


def test_custom_lists_go_before_the_gray_list():
    ones = torch.ones(2)
    seen = dtypes(
        Precision("O1", half=frozenset({"add"}), full=frozenset({"relu"})),
        add=lambda: ones + ones,
        relu=lambda: ones.half().relu(),
    )
    assert seen == {"add": torch.float16, "relu": torch.float32}


def test_every_gray_name_has_a_counterpart():
    assert set(GRAY.split()) <= NAMES.known.keys()


@pytest.mark.parametrize(
    ("precision", "fed"),
    [
        (Precision(), None),
        (Precision("O1"), None),
        (Precision("O2"), torch.float16),
        (Precision("O2", guarded=True), None),
        (Precision("O2", "bfloat16"), torch.bfloat16),
    ],
    ids=["O0", "O1", "O2", "guarded", "bfloat16"],
)
def test_feeds_are_cast_where_all_is_16_bit(precision, fed):
    assert precision.fed is fed


def test_norms_black_ops_and_what_is_outside_the_guard_keep_float32_parameters(program):
    norm, table, linear, guarded = (
        nn.LayerNorm(4),
        nn.Embedding(3, 4),
        nn.Linear(4, 4),
        nn.Linear(4, 4),
    )
    x = linear(norm(table(static.data("x", [2], "int64"))))
    with static.amp.fp16_guard():
        guarded(x)
    kept = {id(one) for one in Precision("O2").stays_full(program.nodes)}
    assert kept == {id(one) for one in (*norm.parameters(), *table.parameters())}
    kept = {id(one) for one in Precision("O2", guarded=True).stays_full(program.nodes)}
    assert kept == {id(one) for module in (norm, table, linear) for one in module.parameters()}
