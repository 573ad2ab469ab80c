"""Tables of cast actions: the functions that a policy overrides, and those left to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mezzo
from mezzo.autocasting.dynamo import higher_order_operators
from mezzo.autocasting.op_table import Argument, CastAction, Condition, Table, make_table
from mezzo.policy import missing_kernels
from mezzo.policy.policy import Policy
from mezzo.policy.presets.torch_amp import torch_entries
from mezzo.policy.types import Rule

HALF = torch.bfloat16


def table(*, versioned: bool = False, without_torch_autocast: bool = False, **fields: Any) -> Table:
    return make_table(
        Policy(**({"dtype": HALF} | fields)),
        HALF,
        "cpu",
        versioned=versioned,
        without_torch_autocast=without_torch_autocast,
    )


def test_the_table_for_torchs_lists_has_only_functions_without_a_torch_kernel() -> None:
    # Ops without a 16-bit kernel, and listed ones of which some overload has no autocast kernel.
    overridden = {
        action.op: action.rule
        for action in table().values()
        if action.rule is not Rule.KEEP and action.op not in set(higher_order_operators().values())
    }
    assert {
        op
        for op, rule in overridden.items()
        if not missing_kernels.lacks_kernel(op, HALF, "cpu")
        and torch_entries("cpu")[op].rule is not rule
    } == set()


def test_the_table_has_only_what_differs_from_torchs_lists() -> None:
    overridden = {
        action.op
        for action in table(half={"linear", "add"}, full={"mse_loss"}).values()
        if not action.is_composite and action.rule is not Rule.KEEP
    }
    assert "add" in overridden
    assert not overridden & {"linear", "mse_loss"}


def test_every_spelling_of_a_listed_op_is_in_the_table() -> None:
    found = table(half={"softmax"})
    assert {torch.softmax, F.softmax, torch.Tensor.softmax} <= {
        function for function, action in found.items() if action.op == "softmax"
    }


def test_writing_in_place_is_not_in_the_table_unless_it_is_refused() -> None:
    assert torch.Tensor.add_ not in table(half={"add"})
    assert torch.Tensor.__iadd__ not in table(half={"add"})
    assert table(refuse={"add"})[torch.Tensor.add_].rule is Rule.REFUSE


def test_an_action_has_op_rule_and_reason() -> None:
    action = table(full={"linear"})[F.linear]
    assert (action.op, action.rule, action.reason) == (
        "linear",
        Rule.FULL,
        "listed full by the user",
    )
    assert action.disables_torch_autocast


def test_torchs_autocast_is_disabled_only_for_ops_it_would_cast_again() -> None:
    found = table(full={"mm"}, half={"add"})
    assert found[torch.mm].disables_torch_autocast
    assert not found[torch.add].disables_torch_autocast


def test_exemptions_and_conditions_have_position_and_name() -> None:
    found = table(
        exempt_args={"batch_norm": ["running_mean"]},
        half={"batch_norm"},
        conditional=[("softmax", "dim", [-1, 3])],
    )
    assert found[F.batch_norm].exempt_args == ((1, "running_mean"),)
    assert found[torch.softmax].conditions == ((1, "dim", (-1, 3), False),)


@pytest.mark.parametrize(("device", "in_float32"), [("cpu", False), ("cuda", True), ("xpu", True)])
def test_norms_with_exempt_parameters_compute_in_float32_if_the_kernel_needs_one_dtype(
    device: str, in_float32: bool
) -> None:
    policy = Policy(preset="paddle", level="O2", dtype="float16")
    found = make_table(policy, torch.float16, device, versioned=False)
    assert found[F.layer_norm].computes_in_float32 is in_float32
    assert not found[F.batch_norm].computes_in_float32


def test_float16_recurrent_layers_on_cuda_are_left_to_torch() -> None:
    half, full = (
        Policy(preset="apex", dtype="float16"),
        Policy(preset="apex", dtype="float16", full={"lstm"}),
    )
    assert torch.lstm in make_table(half, torch.float16, "cpu", versioned=True)
    assert torch.lstm not in make_table(half, torch.float16, "cuda", versioned=True)
    assert torch.lstm in make_table(
        half, torch.float16, "cuda", versioned=False, without_torch_autocast=True
    )
    assert torch.lstm in make_table(
        Policy(preset="apex", dtype="bfloat16"), torch.bfloat16, "cuda", versioned=True
    )
    assert make_table(full, torch.float16, "cuda", versioned=True)[torch.lstm].rule is Rule.FULL


def test_a_condition_records_whether_the_default_meets_it() -> None:
    found = table(conditional=[("gelu", "approximate", ["none"]), ("layer_norm", "eps", [1e-5])])
    assert found[F.gelu].conditions[0].is_met_by_default
    assert found[F.layer_norm].conditions[0].is_met_by_default
    assert (
        not table(conditional=[("gelu", "approximate", ["tanh"])])[F.gelu]
        .conditions[0]
        .is_met_by_default
    )


def test_the_versioned_cache_casts_the_weights_of_torchs_16_bit_ops() -> None:
    action = table(versioned=True, cache="versioned")[F.linear]
    assert (action.casts_only_weights, action.cached, action.disables_torch_autocast) == (
        True,
        True,
        False,
    )


def test_without_torch_autocast_nothing_is_left_to_torch() -> None:
    found = table(without_torch_autocast=True)
    assert found[F.linear].rule is Rule.HALF
    assert found[F.mse_loss].rule is Rule.FULL
    assert all(
        action.disables_torch_autocast
        for action in found.values()
        if action.op in ("linear", "mse_loss")
    )


def test_a_composite_without_a_rule_is_decomposed_and_a_wrapper_is_not() -> None:
    assert table(half={"softmax"})[F.gumbel_softmax].is_composite
    assert table(half={"atan2"})[F.gumbel_softmax].is_composite
    assert F.relu not in table(half={"atan2"})
    assert not table(half={"softmax"}, full={"gumbel_softmax"})[F.gumbel_softmax].is_composite


def test_backward_keeps_the_forward_precision_in_every_table() -> None:
    found = table(half={"add"})
    assert {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad} <= set(found)


@pytest.mark.parametrize(
    ("fields", "fixed"),
    [
        ({}, True),
        ({"takes_dtype": True}, False),
        ({"in_place": Argument(1, "inplace")}, False),
        ({"conditions": (Condition(1, "dim", (0,), False),)}, False),
    ],
    ids=str,
)
def test_an_action_has_a_fixed_rule_if_no_argument_can_change_it(
    fields: dict[str, Any], fixed: bool
) -> None:
    assert CastAction("add", Rule.HALF, "why", **fields).has_fixed_rule is fixed


@pytest.mark.parametrize("level", ["O2", "O3", "OD"])
def test_explain_agrees_with_eager_mode_at_every_level(level: str) -> None:
    policy = mezzo.Policy(level, HALF)
    with mezzo.autocast(policy, device_type="cpu"):
        for name, call in (
            ("add", torch.add),
            ("mul", torch.mul),
            ("atan2", torch.atan2),
            ("mm", torch.mm),
            ("maximum", torch.maximum),
        ):
            x = torch.ones(2, 2)
            assert (
                call(x, x).dtype
                is policy.explain(name, torch.float32, torch.float32, device="cpu").dtype
            ), name
