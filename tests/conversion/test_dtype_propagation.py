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
    mixed_dtypes,
    propagate,
    record_mixed_dtypes,
    set_dtypes,
    verify,
)

X = torch.randn(2, 4)


def test_infer_runs_an_op_on_fake_tensors():
    module = graph(lambda x: x.sum(-1), X)
    found = infer(node(module, "sum_1"), fake_mode(module))
    assert (tuple(found.shape), found.dtype) == ((2,), torch.float32)


def test_set_dtypes_keeps_size_and_stride():
    module = graph(lambda x: x.t(), X)
    found = node(module, "t")
    before = found.meta["val"]
    set_dtypes(found, [HALF], fake_mode(module))
    assert (found.meta["val"].shape, found.meta["val"].stride(), found.meta["val"].dtype) == (
        before.shape,
        before.stride(),
        HALF,
    )


def test_propagate_updates_dtypes_through_the_graph():
    module = graph(lambda x: (x + 1).float().chunk(2), X)
    set_dtypes(node(module, "args_0"), [HALF], fake_mode(module))
    propagate(module)
    assert dtypes_of(node(module, "add").meta["val"]) == [HALF]
    assert dtypes_of(node(module, "chunk").meta["val"]) == [torch.float32, torch.float32]


def test_propagate_keeps_the_symbols_of_data_dependent_sizes():
    module = graph(lambda x: x[x > 0] * 2, X)
    before = str(node(module, "mul").meta["val"].shape)
    set_dtypes(node(module, "args_0"), [HALF], fake_mode(module))
    propagate(module)
    assert node(module, "mul").meta["val"].dtype is HALF
    assert str(node(module, "mul").meta["val"].shape) == before


def test_a_graph_without_tensors_has_no_fake_mode():
    assert fake_mode(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())) is None


# Verification


def _lowered(module, name):
    set_dtypes(node(module, name), [HALF], fake_mode(module))
    return module


def test_a_product_of_two_dtypes_raises_although_fake_tensors_allow_it():
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


def test_norm_parameters_may_be_float32_with_a_16_bit_input():
    module = graph(nn.BatchNorm1d(4).eval(), X)
    for name in ("input", "batch_norm"):
        _lowered(module, name)
    verify(module)


def test_a_result_of_another_dtype_than_planned_raises():
    module = _lowered(graph(F.relu, X), "relu")
    with pytest.raises(
        mezzo.UnsupportedError, match=r"relu .* returns float32, and bfloat16 was planned"
    ):
        verify(module)


def test_subgraphs_are_verified_too():
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


def test_dtypes_that_the_model_itself_mixes_are_accepted():
    module = _lowered(graph(nn.Linear(4, 4), X), "input")
    linear = node(module, "linear")
    assert mixed_dtypes(linear) == [HALF, torch.float32]
    record_mixed_dtypes(module)
    set_dtypes(linear, dtypes_of(infer(linear, fake_mode(module))), fake_mode(module))
    verify(module)
    _lowered(module, "p_weight")
    set_dtypes(node(module, "p_bias"), [torch.float64], fake_mode(module))
    with pytest.raises(mezzo.UnsupportedError, match="does not take together"):
        verify(module)


def test_an_in_place_copy_may_read_another_dtype():
    def function(x, y):
        buffer = torch.zeros(2, 4)
        buffer[0] = y[0]
        return buffer + x

    module = _lowered(graph(function, X, X), "args_1")
    _lowered(module, "select")
    verify(module)
