import torch
from support.graphs import HALF, graph, node

from mezzo.conversion.dtype_propagation import dtypes_of, fake_mode, infer, propagate, set_dtypes

X = torch.randn(2, 4)


def test_an_op_is_run_without_data():
    module = graph(lambda x: x.sum(-1), X)
    found = infer(node(module, "sum_1"), fake_mode(module))
    assert (tuple(found.shape), found.dtype) == ((2,), torch.float32)


def test_a_new_dtype_keeps_size_and_stride():
    module = graph(lambda x: x.t(), X)
    found = node(module, "t")
    before = found.meta["val"]
    set_dtypes(found, [HALF], fake_mode(module))
    assert (found.meta["val"].shape, found.meta["val"].stride(), found.meta["val"].dtype) == (
        before.shape,
        before.stride(),
        HALF,
    )


def test_dtypes_run_through_the_graph():
    module = graph(lambda x: (x + 1).float().chunk(2), X)
    set_dtypes(node(module, "args_0"), [HALF], fake_mode(module))
    propagate(module)
    assert dtypes_of(node(module, "add").meta["val"]) == [HALF]
    assert dtypes_of(node(module, "chunk").meta["val"]) == [torch.float32, torch.float32]


def test_an_op_whose_size_depends_on_numbers_keeps_its_symbols():
    module = graph(lambda x: x[x > 0] * 2, X)
    before = str(node(module, "mul").meta["val"].shape)
    set_dtypes(node(module, "args_0"), [HALF], fake_mode(module))
    propagate(module)
    assert node(module, "mul").meta["val"].dtype is HALF
    assert str(node(module, "mul").meta["val"].shape) == before


def test_a_graph_without_tensors_has_no_mode():
    assert fake_mode(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())) is None
