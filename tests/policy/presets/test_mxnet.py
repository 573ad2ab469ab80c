from __future__ import annotations

import pytest
import torch

from mezzo.policy.presets import mxnet
from mezzo.policy.presets._tables import WIDEST
from mezzo.policy.types import Level, Rule

FLOAT16 = mxnet.lists(Level.O1, torch.float16)
BFLOAT16 = mxnet.lists(Level.O1, torch.bfloat16)

PLAIN = {
    "FP16_FUNCS": "half",
    "BF16_FUNCS": "half",
    "FP16_FP32_FUNCS": "keep",
    "BF16_FP32_FUNCS": "keep",
    "FP32_FUNCS": "full",
    "WIDEST_TYPE_CASTS": "promote",
}
BOTH = pytest.mark.parametrize(
    ("facts", "lists"), [("mxnet_fp16", FLOAT16), ("mxnet_bf16", BFLOAT16)]
)


def rules_of(facts):
    return {foreign: rule for key, rule in PLAIN.items() for foreign in facts.get(key, "").split()}


@BOTH
def test_every_listed_name_is_translated_or_has_no_counterpart(facts, lists, system_lists):
    conditional = {name for name, _, _ in system_lists[facts]["CONDITIONAL_FP32_FUNCS"]}
    losses = set(system_lists[facts]["LOSS_OUTPUT_FUNCTIONS"].split())
    parameters = system_lists[facts].get("BF16_USE_FP32_PARAMS", {}).keys()
    listed = rules_of(system_lists[facts]).keys() | conditional | losses | parameters
    assert listed <= mxnet.NAMES.known.keys() | mxnet.NAMES.unknown.keys()
    assert lists.entries


@BOTH
def test_every_entry_has_the_rule_of_one_of_its_mxnet_names(facts, lists, system_lists):
    rules = rules_of(system_lists[facts])
    conditional = {"softplus", "elu", "selu"}
    for op, entry in lists.entries.items():
        foreign = {
            rules[name] for name, ours in mxnet.NAMES.known.items() if op in ours and name in rules
        }
        assert (
            entry.rule.value in foreign
            or (op in conditional and entry.rule is Rule.FULL)
            or (entry is WIDEST and foreign <= {"keep"})
        )


@BOTH
def test_every_translated_op_in_a_list_of_mxnet_is_listed(facts, lists, system_lists):
    named = {
        ours
        for foreign in rules_of(system_lists[facts])
        for ours in mxnet.NAMES.known.get(foreign, ())
    }
    assert named <= lists.entries.keys()


def test_the_two_dtypes_differ():
    assert FLOAT16.entries["matmul"].rule is Rule.HALF
    assert BFLOAT16.entries["matmul"].rule is Rule.FULL
    assert FLOAT16.entries["layer_norm"].rule is Rule.FULL
    assert BFLOAT16.entries["layer_norm"].rule is Rule.KEEP


def test_of_several_mxnet_ops_the_first_listed_one_decides():
    assert FLOAT16.entries["eq"].rule is Rule.PROMOTE  # _equal_scalar by itself is not cast
    assert BFLOAT16.entries["relu"].rule is Rule.KEEP  # Activation, not the bare relu


def test_conditional_activations_are_separate_ops():
    assert {op: FLOAT16.entries[op].rule for op in ("softplus", "elu", "selu")} == dict.fromkeys(
        ("softplus", "elu", "selu"), Rule.FULL
    )
    assert BFLOAT16.entries["selu"].rule is Rule.FULL
    assert "elu" not in BFLOAT16.entries
    assert BFLOAT16.entries["softplus"].rule is Rule.KEEP


def test_batch_norm_parameters_are_exempt():
    assert set(BFLOAT16.exempt_args["batch_norm"]) == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
    }


def test_loss_outputs_have_no_counterpart_and_a_reason(system_lists):
    for name in system_lists["mxnet_fp16"]["LOSS_OUTPUT_FUNCTIONS"].split():
        assert "makes its own gradient" in mxnet.NAMES.unknown[name]


def test_unlisted_ops_are_not_cast():
    assert FLOAT16.default_rule.rule is BFLOAT16.default_rule.rule is Rule.KEEP
