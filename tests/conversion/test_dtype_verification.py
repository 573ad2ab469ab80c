import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, graph, node
from torch import nn

import mezzo
from mezzo.conversion.dtype_propagation import (
    dtypes_of,
    fake_mode,
    infer,
    mixed,
    note_mixed,
    set_dtypes,
    verify,
)

X = torch.randn(2, 4)


def _lowered(module, name):
    set_dtypes(node(module, name), [HALF], fake_mode(module))
    return module


def test_a_product_of_two_dtypes_is_refused_though_torch_lets_it_pass():
    module = _lowered(graph(nn.Linear(4, 4), X), "input")
    with pytest.raises(
        mezzo.UnsupportedError,
        match=(
            r"linear \(aten.linear.default\) reads bfloat16 and float32, which its kernel does not"
            r" take together"
        ),
    ):
        verify(module)


def test_a_promoting_kernel_may_read_two_dtypes():
    verify(_lowered(graph(lambda x, y: x + y, X, X), "args_0"))


def test_a_norms_parameters_may_be_float32_beside_16_bits():
    module = graph(nn.BatchNorm1d(4).eval(), X)
    for name in ("input", "batch_norm"):
        _lowered(module, name)
    verify(module)


def test_a_result_of_another_dtype_than_planned_is_refused():
    module = _lowered(graph(F.relu, X), "relu")
    with pytest.raises(
        mezzo.UnsupportedError, match=r"relu .* gives float32 where the plan says bfloat16"
    ):
        verify(module)


def test_bodies_are_checked_too():
    module = graph(
        Calls(
            lambda self, x: torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: y * 2, (x,)),
            left=nn.Linear(4, 4),
        ),
        X,
    )
    verify(module)
    body = module.true_graph_0
    _lowered(body, next(one.name for one in body.graph.nodes if one.op == "placeholder"))
    with pytest.raises(mezzo.UnsupportedError, match="linear"):
        verify(module)


def test_what_the_model_itself_mixes_is_its_own_affair():
    module = _lowered(graph(nn.Linear(4, 4), X), "input")
    linear = node(module, "linear")
    assert mixed(linear) == [HALF, torch.float32]
    note_mixed(module)
    set_dtypes(linear, dtypes_of(infer(linear, fake_mode(module))), fake_mode(module))
    verify(module)
    _lowered(module, "p_weight")
    set_dtypes(node(module, "p_bias"), [torch.float64], fake_mode(module))
    with pytest.raises(mezzo.UnsupportedError, match="does not take together"):
        verify(module)


def test_a_copy_converts_what_it_writes():
    def function(x, y):
        made = torch.zeros(2, 4)
        made[0] = y[0]
        return made + x

    module = _lowered(graph(function, X, X), "args_1")
    _lowered(module, "select")
    verify(module)
