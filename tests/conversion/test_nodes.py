import torch
import torch.nn.functional as F
from support.graphs import HALF, graph, node
from torch import nn

from mezzo.conversion.nodes import Role, bound, deciding, op_name, reads, role_of, stated_dtype

X = torch.randn(2, 4, 4)


def test_arguments_come_with_their_names_and_defaults():
    module = graph(lambda x: F.gelu(x), X)
    assert dict(bound(node(module, "gelu")))["approximate"] == "none"


def test_ops_have_the_names_that_policies_use():
    module = graph(lambda x: torch.special.expit(x.clone())[:, 1:] + 1, X)
    assert [op_name(one) for one in module.graph.nodes if one.op == "call_function"] == [
        "clone",
        "sigmoid",
        "slice",
        "add",
    ]


def test_roles_are_told_apart():
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
    assert found["add_1"] is Role.SILENT
    assert found["output"] is Role.OUTPUT


def test_an_op_that_is_half_already_is_fixed():
    module = graph(lambda x: F.relu(x), X.to(HALF))
    assert role_of(node(module, "relu"), HALF) is Role.FIXED


def test_a_dtype_in_the_call_is_read():
    module = graph(lambda x: (F.softmax(x, -1, dtype=torch.float32), F.softmax(x, -1)), X)
    assert stated_dtype(node(module, "softmax")) is torch.float32
    assert stated_dtype(node(module, "softmax_1")) is None


def test_norm_parameters_and_single_numbers_do_not_decide():
    norm = graph(nn.BatchNorm1d(4), X)
    found = node(norm, "batch_norm")
    assert len(reads(found)) == 5
    assert [read.argument for read in deciding(found)] == ["input"]
    scaled = graph(lambda x, s: x * s, X, torch.tensor(2.0))
    assert [read.node.name for read in deciding(node(scaled, "mul"))] == ["args_0"]
