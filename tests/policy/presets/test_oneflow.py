from __future__ import annotations

import pytest
import torch

from mezzo.policy.presets import oneflow
from mezzo.policy.types import Level, Rule

LISTS = oneflow.lists(Level.O1, torch.float16)


def translated(names):
    return {ours for foreign in names.split() for ours in oneflow.NAMES.known.get(foreign, ())}


def under(which):
    return {op for op, entry in LISTS.entries.items() if entry.rule is which}


def test_every_listed_name_is_translated_or_has_no_counterpart(system_lists):
    listed = {
        name
        for key, names in system_lists["oneflow"].items()
        if key != "no_cast_args"
        for name in names.split()
    }
    assert listed == oneflow.NAMES.known.keys() | oneflow.NAMES.unknown.keys()


def test_white_is_half_gray_and_clear_promote_and_the_black_list_is_empty_here(system_lists):
    facts = system_lists["oneflow"]
    assert under(Rule.HALF) == translated(facts["white_list"])
    assert under(Rule.PROMOTE) == translated(facts["gray_list"]) | translated(facts["clear_list"])
    assert under(Rule.FULL) == translated(facts["black_list"]) == set()


def test_unlisted_ops_run_in_float32():
    assert LISTS.default_rule.rule is Rule.FULL
    assert "conv3d" not in LISTS.entries


def test_the_exceptions_keep_the_parameters_and_statistics_of_batch_norm(system_lists):
    kept = {
        argument.split(".")[1]
        for argument in system_lists["oneflow"]["no_cast_args"]
        if argument.startswith("normalization.")
    }
    spelled = {
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
        "gamma": "weight",
        "beta": "bias",
    }
    assert set(LISTS.exempt_args["batch_norm"]) == {spelled[name] for name in kept}


def test_every_other_exception_is_for_an_op_without_a_counterpart(system_lists):
    others = {argument.split(".")[0] for argument in system_lists["oneflow"]["no_cast_args"]} - {
        "normalization"
    }
    assert others <= oneflow.NAMES.unknown.keys()


@pytest.mark.parametrize(
    ("op", "argument", "value"),
    [("interpolate", "mode", "bilinear"), ("binary_cross_entropy_with_logits", "reduction", "sum")],
)
def test_only_some_values_of_an_argument_are_in_a_list(op, argument, value):
    assert any(
        condition.op == op and condition.argument == argument and value in condition.values
        for condition in LISTS.conditional
    )
