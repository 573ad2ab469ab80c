from __future__ import annotations

import itertools

import pytest
import torch

from mezzo._errors import PolicyError
from mezzo.policy.presets import PRESETS
from mezzo.policy.registry import registry
from mezzo.policy.types import Level, Rule

HALVES = (torch.float16, torch.bfloat16)
EVERY_LIST = [
    (system, level, dtype)
    for system, preset in PRESETS.items()
    for level in preset.LEVELS
    for dtype in HALVES
]


@pytest.mark.parametrize("system", PRESETS)
def test_every_translated_name_is_an_op_here(system):
    named = set(itertools.chain.from_iterable(PRESETS[system].NAMES.known.values()))
    assert named - registry().names == set()


@pytest.mark.parametrize("system", PRESETS)
def test_a_name_is_either_translated_or_said_to_have_no_counterpart(system):
    names = PRESETS[system].NAMES
    assert names.known.keys() & names.unknown.keys() == set()
    assert all(names.known.values())
    assert all(names.unknown.values())


@pytest.mark.parametrize(("system", "level", "dtype"), EVERY_LIST)
def test_every_entry_exemption_and_condition_names_an_op_and_has_a_reason(system, level, dtype):
    lists = PRESETS[system].lists(level, dtype)
    named = (
        lists.entries.keys()
        | lists.exempt_args.keys()
        | {condition.op for condition in lists.conditional}
    )
    assert named - registry().names == set()
    assert all(
        entry.reason for entry in (*lists.entries.values(), lists.default_rule, *lists.conditional)
    )


@pytest.mark.parametrize("system", PRESETS)
def test_lists_are_made_once(system):
    preset = PRESETS[system]
    assert preset.lists(preset.LEVELS[0], torch.float16) is preset.lists(
        preset.LEVELS[0], torch.float16
    )


@pytest.mark.parametrize("system", PRESETS)
def test_a_level_the_system_does_not_have_is_refused_with_those_it_has(system):
    missing = next(level for level in Level if level not in PRESETS[system].LEVELS)
    with pytest.raises(
        PolicyError,
        match=(
            rf"{system}.* has no level {missing.value}\. Choose one of:"
            rf" {PRESETS[system].LEVELS[0].value}"
        ),
    ):
        PRESETS[system].lists(missing, torch.float16)


@pytest.mark.parametrize(
    ("system", "op", "rule"),
    [
        ("paddle", "matmul", Rule.HALF),
        ("oneflow", "matmul", Rule.HALF),
        ("megengine", "matmul", Rule.HALF),
        ("mxnet", "matmul", Rule.HALF),
        ("apex", "matmul", Rule.HALF),
        ("paddle", "softmax", Rule.FULL),
        ("oneflow", "softmax", Rule.PROMOTE),
        ("megengine", "softmax", Rule.KEEP),
        ("mxnet", "softmax", Rule.FULL),
        ("apex", "softmax", Rule.FULL),
        ("paddle", "abs", Rule.PROMOTE),
        ("oneflow", "abs", Rule.FULL),
        ("megengine", "abs", Rule.KEEP),
        ("mxnet", "abs", Rule.KEEP),
        ("apex", "abs", Rule.KEEP),
    ],
)
def test_the_systems_differ_where_their_documents_say(system, op, rule):
    lists = PRESETS[system].lists(Level.O1, torch.float16)
    assert lists.entries.get(op, lists.default_rule).rule is rule
