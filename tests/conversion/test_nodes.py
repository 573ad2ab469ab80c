import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, graph, node
from torch import nn

from mezzo.conversion import nodes
from mezzo.conversion.nodes import (
    Role,
    alias_sets,
    copied_graph,
    deciding_reads,
    dtype_argument,
    mutated_inputs,
    mutated_nodes,
    named_arguments,
    op_name,
    reads,
    role_of,
)
from mezzo.policy.registry import registry

X = torch.randn(2, 4, 4)


def test_named_arguments_include_defaults():
    module = graph(lambda x: F.gelu(x), X)
    assert dict(named_arguments(node(module, "gelu")))["approximate"] == "none"


def test_op_name_returns_the_names_that_policies_use():
    module = graph(lambda x: torch.special.expit(x.clone())[:, 1:] + 1, X)
    assert [op_name(one) for one in module.graph.nodes if one.op == "call_function"] == [
        "clone",
        "sigmoid",
        "slice",
        "add",
    ]


def test_each_kind_of_node_has_its_role():
    module = graph(
        lambda x, i: (x.split(2, 1)[0].float(), torch.zeros(3), x.double() + 1, i + 1, x.shape[0]),
        X,
        torch.arange(3),
    )
    found = {one.name: role_of(one, HALF) for one in module.graph.nodes}
    assert found["split"] is Role.OP
    assert found["getitem"] is Role.ELEMENT
    assert found["to"] is Role.CAST
    assert found["zeros"] is Role.FILL
    assert found["add"] is Role.FIXED
    assert found["add_1"] is Role.NO_FLOATS
    assert found["output"] is Role.OUTPUT


def test_an_op_that_is_16_bit_already_is_fixed():
    module = graph(lambda x: F.relu(x), X.to(HALF))
    assert role_of(node(module, "relu"), HALF) is Role.FIXED


def test_dtype_argument_returns_the_dtype_of_a_call():
    module = graph(lambda x: (F.softmax(x, -1, dtype=torch.float32), F.softmax(x, -1)), X)
    assert dtype_argument(node(module, "softmax")) is torch.float32
    assert dtype_argument(node(module, "softmax_1")) is None


def test_norm_parameters_and_scalars_do_not_decide_the_precision():
    norm = graph(nn.BatchNorm1d(4), X)
    found = node(norm, "batch_norm")
    assert len(reads(found)) == 5
    assert [read.argument for read in deciding_reads(found)] == ["input"]
    scaled = graph(lambda x, s: x * s, X, torch.tensor(2.0))
    assert [read.node.name for read in deciding_reads(node(scaled, "mul"))] == ["args_0"]


# Op properties


MATRIX, MATRIX16 = torch.randn(4, 4), torch.randn(4, 4).to(torch.float16)

_TWO = {"where": lambda x, y: torch.where(x > 0, x, y)} | {
    name: lambda x, y, name=name: getattr(torch, name)([x, y])
    for name in ("cat", "stack", "hstack", "vstack", "dstack")
}


@pytest.mark.parametrize("name", sorted(nodes.PROMOTING))
def test_a_promoting_kernel_takes_two_dtypes_and_computes_in_the_widest(name):
    function = _TWO.get(name) or getattr(torch, name)
    widest = function(MATRIX16.abs().float(), MATRIX.abs())
    for mixed in (function(MATRIX16.abs(), MATRIX.abs()), function(MATRIX.abs(), MATRIX16.abs())):
        assert mixed.dtype is widest.dtype
    assert torch.equal(function(MATRIX16.abs(), MATRIX.abs()), widest)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        torch.neg,
        torch.abs,
        lambda x: x.clamp(-0.3, 0.7),
        lambda x: torch.nn.functional.max_pool2d(x[None], 2),
        lambda x: x.amax(0),
        lambda x: x.t(),
    ],
    ids=["relu", "neg", "abs", "clamp", "max_pool2d", "amax", "t"],
)
def test_value_preserving_ops_give_the_same_values_rounded_before_or_after(function):
    assert torch.equal(function(MATRIX.to(torch.bfloat16)), function(MATRIX).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_batch_norm_takes_float32_parameters_with_16_bit_inputs(dtype):
    norm = nn.BatchNorm1d(4)
    assert norm(MATRIX.to(dtype)).dtype is dtype
    assert nodes.MIXED_PARAMETERS["batch_norm"] == {"weight", "bias", "running_mean", "running_var"}


def test_float32_ops_are_those_that_autocast_keeps_in_float32_on_gpus():
    assert {"softmax", "layer_norm", "exp", "sum"} <= set(nodes.float32_ops())
    assert not {"linear", "relu", "upsample_nearest2d"} & set(nodes.float32_ops())


def test_the_op_tables_name_ops_that_exist():
    known = registry().names | nodes.STRUCTURAL | {"to", "copy"}
    assert known >= nodes.PROMOTING
    assert {
        name
        for name in nodes.VALUE_PRESERVING - known
        if not hasattr(torch.ops.aten, name) and not hasattr(torch.ops.aten, f"_{name}")
    } == set()


# Aliasing and mutation


def _names(found):
    return {one.name for one in found}


def test_views_of_views_are_in_one_alias_set():
    module = graph(lambda x: x.view(4).unsqueeze(0) + 1, torch.ones(2, 2), normalized=False)
    assert _names(alias_sets(module.graph)[node(module, "view")]) == {"args_0", "view", "unsqueeze"}
    assert _names(alias_sets(module.graph)[node(module, "add")]) == {"add"}


def test_a_mutation_through_a_view_mutates_every_alias():
    def function(x):
        buffer = torch.zeros_like(x)
        buffer[0] = x[1]
        return buffer + 1

    module = graph(function, torch.ones(2, 2), normalized=False)
    assert _names(mutated_nodes(module.graph)) == {"zeros_like", "select_1", "copy_"}


def test_batch_norm_in_training_mutates_its_statistics_although_its_schema_does_not_declare_it():
    training, evaluating = (
        graph(nn.BatchNorm1d(2).train(), torch.ones(3, 2), normalized=False),
        graph(nn.BatchNorm1d(2).eval(), torch.ones(3, 2), normalized=False),
    )
    assert _names(mutated_inputs(node(training, "batch_norm"))) == {
        "b_running_mean",
        "b_running_var",
    }
    assert not mutated_inputs(node(evaluating, "batch_norm"))


def test_dropout_may_return_its_input():
    module = graph(nn.Dropout().eval(), torch.ones(2), normalized=False)
    assert len(alias_sets(module.graph)[node(module, "dropout")]) == 2


# Copies of graphs


def test_a_copy_keeps_node_names_that_are_python_builtins():
    module = graph(nn.Linear(4, 4), torch.randn(2, 4), normalized=False)
    assert "input" in [node.name for node in module.graph.nodes]
    copied = copied_graph(module)
    assert [node.name for node in copied.graph.nodes] == [node.name for node in module.graph.nodes]


def test_a_change_to_the_copy_leaves_the_original():
    module = graph(
        lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
        torch.randn(2, 4),
        normalized=False,
    )
    copied = copied_graph(module)
    copied.true_graph_0.graph.output_node().meta["changed"] = True
    assert "changed" not in module.true_graph_0.graph.output_node().meta
