from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.graphs import Calls, graph, node, words
from torch import nn

import mezzo
from mezzo.conversion.constraints import RECURRENT, UNDECIDED, constraint_of
from mezzo.conversion.nodes import Role
from mezzo.policy.types import Conditional

X = torch.randn(2, 4)


def _pin(function, name, said, role=Role.OP):
    return constraint_of(node(graph(function, X), name), name, role, said, {})


def test_an_exclusion_beats_the_calls_lists():
    said = words(half=frozenset({"softmax"}), exclude=("soft*",))
    assert _pin(lambda x: F.softmax(x, -1), "softmax", said).half is False


def test_the_calls_conditions_beat_its_lists_and_those_beat_the_policy():
    policy = mezzo.Policy("O1", "bfloat16", full={"gelu"})
    listed = words(policy, half=frozenset({"gelu"}))
    conditional = words(
        policy,
        half=frozenset({"gelu"}),
        conditional=(Conditional("gelu", "approximate", ("none",)),),
    )
    assert _pin(F.gelu, "gelu", listed).half is True
    assert _pin(F.gelu, "gelu", conditional).half is False
    assert _pin(F.gelu, "gelu", words(policy)).half is False


def test_a_policys_condition_beats_its_lists():
    policy = mezzo.Policy(
        "O1", "bfloat16", half={"gelu"}, conditional=[("gelu", "approximate", ["none"])]
    )
    assert _pin(F.gelu, "gelu", words(policy)).half is False
    assert _pin(lambda x: F.gelu(x, approximate="tanh"), "gelu", words(policy)).half is True


def test_what_no_list_names_is_left_to_the_cut_unless_it_is_delicate():
    assert _pin(F.relu, "relu", words()) is UNDECIDED
    assert _pin(lambda x: F.softmax(x, -1), "softmax", words()).half is False
    assert (
        _pin(
            lambda x: F.softmax(x, -1),
            "softmax",
            words(mezzo.Policy("O1", "bfloat16", keep={"softmax"})),
        )
        is UNDECIDED
    )


def test_an_op_made_of_others_follows_them():
    found = _pin(lambda x: torch.einsum("ij,kj->ik", x, x), "einsum", words())
    assert found.half is True
    assert found.reason.startswith("computed by bmm")


def test_a_layer_that_carries_a_state_does_so_in_float32_on_a_cpu_unless_it_is_listed():
    model = Calls(lambda self, x: self.layer(x)[0], layer=nn.GRU(4, 4))
    found = node(graph(model, X), "gru")
    policy = mezzo.Policy("O1", "bfloat16", half={"gru"})
    pins = [
        constraint_of(found, "gru", Role.OP, said, {})
        for said in (
            words(),
            words(half=frozenset({"gru"})),
            words(policy),
            replace(words(), device="cuda"),
        )
    ]
    assert pins[0] is RECURRENT
    assert [one.half for one in pins[1:]] == [True, True, True]


def test_an_op_without_a_kernel_stays_float32_whoever_lists_it():
    found = _pin(lambda x: torch.linalg.qr(x)[0], "linalg_qr", words(half=frozenset({"linalg_qr"})))
    assert found.half is False
    assert "no bfloat16 kernel on cpu" in found.reason


def test_a_dtype_in_the_call_stands():
    assert (
        _pin(
            lambda x: F.softmax(x, -1, dtype=torch.float32),
            "softmax",
            words(half=frozenset({"softmax"})),
        ).reason
        == "the call says dtype=float32"
    )


def test_nothing_is_lowered_where_nothing_is_to_be():
    assert _pin(F.relu, "relu", words(nothing_to_cast="level O0")).reason == "level O0"
    assert _pin(F.relu, "relu", words(), Role.FIXED) is UNDECIDED


def test_an_op_that_the_policy_refuses_is_refused_and_one_that_only_torch_refuses_runs_in_float32():
    with pytest.raises(
        mezzo.RefusedOpError, match="The policy refuses gelu, which the graph calls at gelu"
    ):
        _pin(F.gelu, "gelu", words(mezzo.Policy("O1", "bfloat16", refuse={"gelu"})))
    policy = mezzo.Policy("O1", "bfloat16", preset="torch-cuda")
    assert (
        _pin(
            lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
            "binary_cross_entropy",
            words(policy),
        ).half
        is False
    )
