from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, convert_options, graph, node, planned
from support.zoo import ZOO
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.conversion.constraints import (
    AS_AUTOCAST,
    RECURRENT,
    UNDECIDED,
    autocast_dtypes,
    cast_bytes,
    constraint_of,
)
from mezzo.conversion.nodes import Role
from mezzo.conversion.plan import CastBytes
from mezzo.policy.types import Conditional

X = torch.randn(2, 4)


def _constraint(function, name, options, role=Role.OP):
    return constraint_of(node(graph(function, X), name), name, role, options, {})


def test_exclude_overrides_the_lists_of_the_call():
    options = convert_options(half=frozenset({"softmax"}), exclude=("soft*",))
    assert _constraint(lambda x: F.softmax(x, -1), "softmax", options).half is False


def test_conditions_of_the_call_override_its_lists_and_those_override_the_policy():
    policy = mezzo.Policy("O1", "bfloat16", full={"gelu"})
    listed = convert_options(policy, half=frozenset({"gelu"}))
    conditional = convert_options(
        policy,
        half=frozenset({"gelu"}),
        conditional=(Conditional("gelu", "approximate", ("none",)),),
    )
    assert _constraint(F.gelu, "gelu", listed).half is True
    assert _constraint(F.gelu, "gelu", conditional).half is False
    assert _constraint(F.gelu, "gelu", convert_options(policy)).half is False


def test_conditions_of_the_policy_override_its_lists():
    policy = mezzo.Policy(
        "O1", "bfloat16", half={"gelu"}, conditional=[("gelu", "approximate", ["none"])]
    )
    assert _constraint(F.gelu, "gelu", convert_options(policy)).half is False
    assert (
        _constraint(lambda x: F.gelu(x, approximate="tanh"), "gelu", convert_options(policy)).half
        is True
    )


def test_an_unlisted_op_is_undecided_unless_autocast_keeps_it_in_float32():
    assert _constraint(F.relu, "relu", convert_options()) is UNDECIDED
    assert _constraint(lambda x: F.softmax(x, -1), "softmax", convert_options()).half is False
    assert (
        _constraint(
            lambda x: F.softmax(x, -1),
            "softmax",
            convert_options(mezzo.Policy("O1", "bfloat16", keep={"softmax"})),
        )
        is UNDECIDED
    )


def test_a_composite_op_has_the_rule_of_its_parts():
    found = _constraint(lambda x: torch.einsum("ij,kj->ik", x, x), "einsum", convert_options())
    assert found.half is True
    assert found.reason.startswith("computed by bmm")


def test_a_recurrent_layer_keeps_a_float32_state_on_a_cpu_unless_it_is_listed():
    model = Calls(lambda self, x: self.layer(x)[0], layer=nn.GRU(4, 4))
    found = node(graph(model, X), "gru")
    policy = mezzo.Policy("O1", "bfloat16", half={"gru"})
    constraints = [
        constraint_of(found, "gru", Role.OP, options, {})
        for options in (
            convert_options(),
            convert_options(half=frozenset({"gru"})),
            convert_options(policy),
            replace(convert_options(), device="cuda"),
        )
    ]
    assert constraints[0] is RECURRENT
    assert [one.half for one in constraints[1:]] == [True, True, True]


def test_an_op_without_a_16_bit_kernel_stays_float32_although_listed():
    found = _constraint(
        lambda x: torch.linalg.qr(x)[0], "linalg_qr", convert_options(half=frozenset({"linalg_qr"}))
    )
    assert found.half is False
    assert "no bfloat16 kernel on cpu" in found.reason


def test_a_dtype_argument_overrides_the_lists():
    assert (
        _constraint(
            lambda x: F.softmax(x, -1, dtype=torch.float32),
            "softmax",
            convert_options(half=frozenset({"softmax"})),
        ).reason
        == "the call has dtype=float32"
    )


def test_level_o0_constrains_every_op_to_float32():
    assert (
        _constraint(F.relu, "relu", convert_options(nothing_to_cast="level O0")).reason
        == "level O0"
    )
    assert _constraint(F.relu, "relu", convert_options(), Role.FIXED) is UNDECIDED


def test_an_op_that_the_policy_refuses_raises_and_one_that_torch_refuses_runs_in_float32():
    with pytest.raises(
        mezzo.RefusedOpError, match="The policy refuses gelu, which the graph calls at gelu"
    ):
        _constraint(
            F.gelu, "gelu", convert_options(mezzo.Policy("O1", "bfloat16", refuse={"gelu"}))
        )
    policy = mezzo.Policy("O1", "bfloat16", preset="torch-cuda")
    assert (
        _constraint(
            lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
            "binary_cross_entropy",
            convert_options(policy),
        ).half
        is False
    )


# Constraints that follow from the graph


def _facts(function, *args, options=None, **modules):
    module, plan = planned(Calls(function, **modules), *(args or (X,)), options=options)
    return plan, lambda name: node(module, name)


def test_no_op_is_less_precise_than_under_autocast():
    # autocast adds float32 and 16-bit values in float32; a cut over bytes alone would round it.
    plan, named = _facts(
        lambda self, x: self.second(x + self.first(x)),
        first=nn.Linear(4, 4),
        second=nn.Linear(4, 4),
    )
    assert plan.constraints[named("add")] is AS_AUTOCAST
    assert plan.constraints[named("linear")].half is True


def test_a_value_preserving_op_is_undecided_if_all_readers_round_its_result():
    plan, named = _facts(
        lambda self, x: self.first(F.relu(x.t())), torch.randn(4, 2), first=nn.Linear(4, 4)
    )
    assert plan.constraints[named("relu")] is UNDECIDED
    assert plan.constraints[named("t")] is UNDECIDED


def test_a_value_preserving_op_stays_float32_if_one_reader_does_not_round():
    plan, named = _facts(
        lambda self, x: (self.first(F.relu(x)), F.relu(x).sum()), first=nn.Linear(4, 4)
    )
    assert plan.constraints[named("relu")] is UNDECIDED
    assert plan.constraints[named("relu_1")] is AS_AUTOCAST


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["float64", "float16"])
def test_a_cast_of_the_model_to_another_dtype_does_not_round(dtype):
    plan, named = _facts(
        lambda self, x: (self.first(y := F.relu(x)), y.to(dtype)), first=nn.Linear(4, 4)
    )
    assert plan.constraints[named("relu")] is AS_AUTOCAST


def test_weights_inputs_and_mutated_buffers_have_different_roles():
    model = nn.BatchNorm1d(4).train()
    module, plan = planned(model, X)
    found = {one.name: role for one, role in plan.assignment.roles.items()}
    assert found["p_weight"] is Role.WEIGHT
    assert found["b_running_mean"] is Role.INPUT
    assert found["b_num_batches_tracked"] is Role.NO_FLOATS
    assert node(module, "b_running_mean") in plan.mutated


def test_a_tensor_mutated_through_a_view_keeps_its_dtype():
    def function(self, x):
        buffer = torch.zeros(2, 4)
        buffer[0] = self.first(x)[0]
        return self.first(buffer)

    plan, named = _facts(function, first=nn.Linear(4, 4))
    assert plan.assignment.roles[named("zeros")] is Role.FIXED
    assert "mutated in place" in plan.constraints[named("copy_")].reason


def test_weights_beyond_the_range_of_float16_keep_their_op_in_float32():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = 1e5
    module, plan = planned(
        model, X, options=convert_options(mezzo.Policy("O1", "float16"), dtype=torch.float16)
    )
    assert (
        plan.constraints[node(module, "linear")].reason
        == "'0.weight' holds numbers beyond the range of float16"
    )
    assert plan.constraints[node(module, "linear_1")].half is True


def test_an_op_in_another_dtype_is_fixed():
    plan, named = _facts(lambda _, x: x.double() + 1)
    assert plan.assignment.roles[named("add")] is Role.FIXED
    assert plan.constraints[named("add")].reason == "already float64: left alone"
    assert plan.constraints[named("to")].reason == "the model's own cast"


# What torch.autocast does


class _Casts(TorchDispatchMode):
    """Counts the casts that torch.autocast makes."""

    def __init__(self):
        super().__init__()
        self.seen = CastBytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and out.dtype is not args[0].dtype
            and out.is_floating_point()
            and args[0].is_floating_point()
        ):
            self.seen += CastBytes(1, args[0].nbytes + out.nbytes)
        return out


@pytest.mark.parametrize("name", ["mlp", "resnet50", "mobilenet", "gpt-tied", "vit"])
def test_counted_autocast_casts_equal_those_that_torch_makes(name):
    import mezzo

    animal = ZOO[name]()
    # autocast caches a weight only if it requires a gradient.
    with _Casts() as casts, torch.autocast("cpu", dtype=HALF):
        animal.model(*animal.args)
    assert mezzo.convert(animal.model, animal.args, dtype=HALF).casts.before == casts.seen


def test_autocast_dtypes_follow_the_lists_and_the_inputs():
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.ReLU())
    _, plan = planned(model, torch.randn(2, 4))
    listed = {"linear": True, "layer_norm": False}
    found = autocast_dtypes(plan.assignment.roles, lambda node: listed.get(node.name), HALF)
    assert {
        node.name: half for node, half in found.items() if plan.assignment.roles[node] is Role.OP
    } == {
        "relu": False,
        "linear": True,
        "relu_1": True,
        "layer_norm": False,
        "relu_2": False,
    }


def test_cast_bytes_are_those_read_and_written():
    assert cast_bytes(torch.empty(3, 5), torch.float32, HALF) == 15 * 6


def test_counts_add_up_and_print():
    assert CastBytes(1, 10) + CastBytes(2, 5) == CastBytes(3, 15)
    assert str(CastBytes(3, 1_500_000)) == "3 casts, 1.5 MB"
    assert Counter([CastBytes(), CastBytes()]) == {CastBytes(0, 0): 2}
