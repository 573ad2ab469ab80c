from __future__ import annotations

import pytest
import torch

from mezzo.policy.policy import Policy
from mezzo.policy.presets import apex
from mezzo.policy.presets._tables import WIDEST
from mezzo.policy.types import Level, Rule

LISTS = apex.lists(Level.O1, torch.float16)
BY_LIST = {
    "FP16_FUNCS": Rule.HALF,
    "_bmms": Rule.HALF,
    "rnn_compat": Rule.HALF,
    "FP32_FUNCS": Rule.FULL,
    "CASTS": Rule.PROMOTE,
    "SEQUENCE_CASTS": Rule.PROMOTE,
    "BANNED_FUNCS": Rule.REFUSE,
}


def test_every_patched_function_is_translated_and_has_the_rule_of_its_list(system_lists):
    for key, names in system_lists["apex"].items():
        for foreign in names.split():
            if foreign not in apex.NAMES.unknown:
                assert {LISTS.entries[ours].rule for ours in apex.NAMES.known[foreign]} == {
                    BY_LIST[key.rpartition(".")[2]]
                }


def test_nothing_else_is_listed(system_lists):
    listed = {
        ours
        for names in system_lists["apex"].values()
        for foreign in names.split()
        for ours in apex.NAMES.known.get(foreign, ())
    }
    assert {op for op, entry in LISTS.entries.items() if entry is not WIDEST} == listed


def test_moving_to_the_cpu_has_no_counterpart():
    assert apex.NAMES.unknown.keys() == {"cpu"}


def test_binary_cross_entropy_is_refused_and_the_reason_names_the_remedy():
    entry = LISTS.entries["binary_cross_entropy"]
    assert entry.rule is Rule.REFUSE
    assert "use binary_cross_entropy_with_logits" in entry.reason


@pytest.mark.parametrize("level", [Level.O2, Level.O3])
def test_levels_that_cast_the_model_patch_nothing(level):
    lists = apex.lists(level, torch.float16)
    assert not lists.entries
    assert lists.default_rule.rule is Rule.KEEP


def test_binary_cross_entropy_is_refused_only_with_16_bit_inputs():
    policy = Policy(preset="apex", dtype="float16")
    assert (
        policy.explain("binary_cross_entropy", "float16", "float32", device="cpu").rule
        is Rule.REFUSE
    )
    assert (
        policy.explain("binary_cross_entropy", "float32", "float32", device="cpu").dtype
        is torch.float32
    )
    assert policy.explain("binary_cross_entropy", device="cpu").rule is Rule.REFUSE
    strict = Policy(preset="apex", dtype="float16", refuse={"binary_cross_entropy"})
    assert strict.explain("binary_cross_entropy", "float32", device="cpu").rule is Rule.REFUSE
