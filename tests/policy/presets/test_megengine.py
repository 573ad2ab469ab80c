from __future__ import annotations

import torch

from mezzo.policy.presets import megengine
from mezzo.policy.types import Level, Rule

LISTS = megengine.lists(Level.O1, torch.float16)


def translated(names):
    return {ours for foreign in names.split() for ours in megengine.NAMES.known.get(foreign, ())}


def under(which):
    return {op for op, entry in LISTS.entries.items() if entry.rule is which}


def test_every_listed_name_is_translated_or_has_no_counterpart(system_lists):
    listed = {name for names in system_lists["megengine"].values() for name in names.split()}
    assert listed <= megengine.NAMES.known.keys() | megengine.NAMES.unknown.keys()


def test_products_convolutions_and_batch_norm_are_half(system_lists):
    assert under(Rule.HALF) == translated(system_lists["megengine"]["low"])
    assert LISTS.exempt_args == {"batch_norm": ("running_mean", "running_var", "weight", "bias")}


def test_the_other_norms_the_mean_and_22_elementwise_modes_are_full(system_lists):
    facts = system_lists["megengine"]
    assert len(facts["high_elementwise"].split()) == 22
    assert under(Rule.FULL) == translated(facts["high"]) | translated(facts["high_elementwise"])


def test_three_dimensional_convolutions_only_promote(system_lists):
    assert translated(system_lists["megengine"]["widest"]) <= under(Rule.PROMOTE)
    assert LISTS.entries["conv3d"].rule is Rule.PROMOTE


def test_ops_without_a_rule_are_not_cast():
    assert LISTS.default_rule.rule is Rule.KEEP
    assert "max_pool2d" not in LISTS.entries
