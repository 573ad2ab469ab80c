"""What a policy comes to: the functions that are steered, and those that are left to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mezzo
from mezzo.autocasting.dynamo import operators
from mezzo.autocasting.op_table import CastAction, Table, make_table
from mezzo.policy import missing_kernels
from mezzo.policy.policy import Policy
from mezzo.policy.presets.torch_amp import torch_entries
from mezzo.policy.types import Rule

HALF = torch.bfloat16


def table(*, versioned: bool = False, alone: bool = False, **words: Any) -> Table:
    return make_table(
        Policy(**({"dtype": HALF} | words)), HALF, "cpu", versioned=versioned, alone=alone
    )


def test_torchs_own_policy_steers_only_what_torchs_kernels_miss() -> None:
    # Ops without a 16-bit kernel, and listed ones of which some overload has no autocast kernel.
    steered = {
        action.op: action.rule
        for action in table().values()
        if action.rule is not Rule.KEEP and action.op not in set(operators().values())
    }
    assert {
        op
        for op, rule in steered.items()
        if not missing_kernels.lacks_kernel(op, HALF, "cpu")
        and torch_entries("cpu")[op].rule is not rule
    } == set()


def test_only_what_differs_from_torchs_lists_is_steered() -> None:
    steered = {
        action.op
        for action in table(half={"linear", "add"}, full={"mse_loss"}).values()
        if not action.is_composite and action.rule is not Rule.KEEP
    }
    assert "add" in steered
    assert not steered & {"linear", "mse_loss"}


def test_every_spelling_of_a_listed_op_is_in_the_table() -> None:
    found = table(half={"softmax"})
    assert {torch.softmax, F.softmax, torch.Tensor.softmax} <= {
        function for function, action in found.items() if action.op == "softmax"
    }


def test_writing_in_place_is_not_in_the_table_unless_it_is_refused() -> None:
    assert torch.Tensor.add_ not in table(half={"add"})
    assert torch.Tensor.__iadd__ not in table(half={"add"})
    assert table(refuse={"add"})[torch.Tensor.add_].rule is Rule.REFUSE


def test_an_action_says_which_op_which_rule_and_why() -> None:
    action = table(full={"linear"})[F.linear]
    assert (action.op, action.rule, action.reason) == (
        "linear",
        Rule.FULL,
        "listed full by the user",
    )
    assert action.disables_torch_autocast


def test_an_op_that_torch_would_cast_again_runs_with_torchs_autocast_off_and_others_do_not() -> (
    None
):
    found = table(full={"mm"}, half={"add"})
    assert found[torch.mm].disables_torch_autocast
    assert not found[torch.add].disables_torch_autocast


def test_exemptions_and_conditions_are_laid_out_by_position_and_name() -> None:
    found = table(
        exempt_args={"batch_norm": ["running_mean"]},
        half={"batch_norm"},
        conditional=[("softmax", "dim", [-1, 3])],
    )
    assert found[F.batch_norm].exempt_args == ((1, "running_mean"),)
    assert found[torch.softmax].conditions == ((1, "dim", (-1, 3), False),)


@pytest.mark.parametrize(("device", "widens"), [("cpu", False), ("cuda", True), ("xpu", True)])
def test_norms_that_are_told_not_to_cast_their_parameters_widen_where_the_kernel_takes_no_mix(
    device: str, widens: bool
) -> None:
    policy = Policy(preset="paddle", level="O2", dtype="float16")
    found = make_table(policy, torch.float16, device, versioned=False)
    assert found[F.layer_norm].computes_in_float32 is widens
    assert not found[F.batch_norm].computes_in_float32


def test_recurrent_layers_are_torchs_own_on_cuda_where_they_are_float16() -> None:
    half, full = (
        Policy(preset="apex", dtype="float16"),
        Policy(preset="apex", dtype="float16", full={"lstm"}),
    )
    assert torch.lstm in make_table(half, torch.float16, "cpu", versioned=True)
    assert torch.lstm not in make_table(half, torch.float16, "cuda", versioned=True)
    assert torch.lstm in make_table(half, torch.float16, "cuda", versioned=False, alone=True)
    assert torch.lstm in make_table(
        Policy(preset="apex", dtype="bfloat16"), torch.bfloat16, "cuda", versioned=True
    )
    assert make_table(full, torch.float16, "cuda", versioned=True)[torch.lstm].rule is Rule.FULL


def test_a_condition_knows_whether_an_arguments_default_fulfils_it() -> None:
    found = table(conditional=[("gelu", "approximate", ["none"]), ("layer_norm", "eps", [1e-5])])
    assert found[F.gelu].conditions[0][-1]
    assert found[F.layer_norm].conditions[0][-1]
    assert not table(conditional=[("gelu", "approximate", ["tanh"])])[F.gelu].conditions[0][-1]


def test_the_versioned_cache_takes_the_weights_of_torchs_own_16_bit_ops() -> None:
    action = table(versioned=True, cache="versioned")[F.linear]
    assert (action.weights, action.cached, action.disables_torch_autocast) == (True, True, False)


def test_alone_nothing_is_left_to_torch() -> None:
    found = table(alone=True)
    assert found[F.linear].rule is Rule.HALF
    assert found[F.mse_loss].rule is Rule.FULL
    assert all(
        action.disables_torch_autocast
        for action in found.values()
        if action.op in ("linear", "mse_loss")
    )


def test_a_composite_without_a_rule_is_opened_and_a_wrapper_around_one_op_is_not() -> None:
    assert table(half={"softmax"})[F.gumbel_softmax].is_composite
    assert table(half={"atan2"})[F.gumbel_softmax].is_composite
    assert F.relu not in table(half={"atan2"})
    assert not table(half={"softmax"}, full={"gumbel_softmax"})[F.gumbel_softmax].is_composite


def test_backward_is_left_in_forwards_precision_where_anything_is_steered() -> None:
    found = table(half={"add"})
    assert {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad} <= set(found)


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        ({}, True),
        ({"takes_dtype": True}, False),
        ({"in_place": (1, "inplace")}, False),
        ({"conditions": ((1, "dim", (0,), False),)}, False),
    ],
    ids=str,
)
def test_an_action_is_plain_when_no_argument_can_change_it(
    words: dict[str, Any], plain: bool
) -> None:
    assert CastAction("add", Rule.HALF, "why", **words).plain is plain


@pytest.mark.parametrize("level", ["O2", "O3", "OD"])
def test_explain_says_what_eager_does_at_every_level(level: str) -> None:
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
