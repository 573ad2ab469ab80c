"""Ops that do not check their arguments are not called with invalid sizes."""

import pytest
import torch
import torch.nn.functional as F
from support.graphs import Calls
from support.saved_programs import edited
from torch import nn

import mezzo
from mezzo.conversion.checked_ops import (
    CHECKED,
    embedding_bag,
    lstm,
    scaled_dot_product_attention,
    weight_norm,
    with_checks,
)
from mezzo.conversion.nodes import copied_graph

GRAPH = "programs/0/graph.json"


def recurrent(**options):
    layer = nn.LSTM(3, 4, **options)
    states = [
        torch.zeros(layer.num_layers * (1 + layer.bidirectional), 2, layer.proj_size or 4),
        torch.zeros(layer.num_layers * (1 + layer.bidirectional), 2, 4),
    ]
    named = (layer.bias, layer.num_layers, 0.0, False, layer.bidirectional, layer.batch_first)
    return layer, states, [one.detach() for one in layer._flat_weights], named


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_layers": 2, "bidirectional": True},
        {"batch_first": True},
        {"proj_size": 2},
        {"proj_size": 2, "num_layers": 2, "bidirectional": True},
    ],
    ids=str,
)
# torch warns that the CPU has no fused kernel for projections.
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_an_lstm_with_valid_sizes_runs(options):
    layer, states, weights, named = recurrent(**options)
    x = torch.randn(2, 5, 3) if layer.batch_first else torch.randn(5, 2, 3)
    with torch.no_grad():
        assert torch.equal(lstm(x, states, weights, *named)[0], layer(x)[0])


def wide_input(x, states, weights):
    return torch.randn(5, 2, 4), states, weights


def flat_input(x, states, weights):
    return x[0], states, weights


def small_states(x, states, weights):
    return x, [one[:, :1] for one in states], weights


def one_state(x, states, weights):
    return x, states[:1], weights


def narrow_states(x, states, weights):
    return x, [one[..., :1] for one in states], weights


def no_hidden(x, states, weights):
    return (
        x,
        [one[..., :0] for one in states],
        [weights[0][:0], weights[1][:0, :0], weights[2][:0], weights[3][:0]],
    )


def small_weight(x, states, weights):
    return x, states, [weights[0], weights[1][:1], *weights[2:]]


def few_weights(x, states, weights):
    return x, states, weights[:2]


@pytest.mark.parametrize(
    "change",
    [
        wide_input,
        flat_input,
        small_states,
        one_state,
        narrow_states,
        no_hidden,
        small_weight,
        few_weights,
    ],
    ids=lambda change: change.__name__,
)
def test_an_lstm_with_invalid_sizes_is_not_called(change):
    _, states, weights, named = recurrent()
    x, states, weights = change(torch.randn(5, 2, 3), states, weights)
    with pytest.raises(
        mezzo.CheckpointError, match=r"calls lstm with tensors that do not fit each other: \["
    ):
        lstm(x, states, weights, *named)


def test_an_lstm_with_noncontiguous_weights_computes_the_same():
    layer, states, weights, named = recurrent()
    gaps = [torch.stack([one, one], -1)[..., 0] for one in weights]
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        assert torch.equal(lstm(x, states, gaps, *named)[0], layer(x)[0])


def test_weight_norm_needs_one_length_per_row():
    v = torch.randn(4, 3, 2)
    assert torch.equal(
        weight_norm(v, torch.ones(4, 1, 1)), torch._weight_norm(v, torch.ones(4, 1, 1), 0)
    )
    assert torch.equal(
        weight_norm(v, torch.ones(1, 1, 2), 2), torch._weight_norm(v, torch.ones(1, 1, 2), 2)
    )
    for wrong, dim in [((3, 1, 1), 0), ((0,), 0), ((1, 1, 3), 2)]:
        with pytest.raises(mezzo.CheckpointError, match="_weight_norm"):
            weight_norm(v, torch.ones(wrong), dim)
    with pytest.raises(mezzo.CheckpointError, match="_weight_norm"):
        weight_norm(torch.ones(0, 3), torch.ones(0, 1))


def bags(indices, offsets, *, last=False):
    return embedding_bag(
        torch.ones(5, 3),
        torch.tensor(indices),
        torch.tensor(offsets, dtype=torch.int64),
        False,
        0,
        False,
        None,
        last,
        None,
    )[0]


def test_embedding_bag_offsets_and_indices_must_be_in_range():
    assert torch.equal(bags([1, 2, 4], [0, 2]), torch.tensor([[2.0] * 3, [1.0] * 3]))
    for indices, offsets in [
        ([1, 5], [0]),
        ([-1], [0]),
        ([1, 2], [0, 3]),
        ([1, 2], [0, -1]),
        ([1, 2, 3], [0, 2, 1]),
    ]:
        with pytest.raises(
            RuntimeError, match="indices outside of its table, or with offsets outside"
        ):
            bags(indices, offsets)
    assert torch.equal(bags([1, 2, 4], [0, 2, 3], last=True), bags([1, 2, 4], [0, 2]))
    with pytest.raises(RuntimeError, match="with offsets outside"):
        bags([1, 2], [0], last=True)
    for indices, offsets in [([1], []), ([[1]], [0]), ([1], [[0]])]:
        with pytest.raises(mezzo.CheckpointError, match="embedding_bag"):
            bags(indices, offsets)


SMALLEST = torch.iinfo(torch.int64).min


@pytest.mark.parametrize("op", ["div", "div_"])
def test_an_overflowing_integer_division_is_not_computed(op):
    packet, numbers = getattr(torch.ops.aten, op), torch.tensor([7, SMALLEST])
    for overload, other in [(packet.Tensor_mode, torch.tensor([-1, -1])), (packet.Scalar_mode, -1)]:
        with pytest.raises(RuntimeError, match="whose quotient no integer holds"):
            CHECKED[overload](numbers.clone(), other, rounding_mode="trunc")
        assert CHECKED[overload](
            torch.tensor([7, -9]), 2 * other, rounding_mode="trunc"
        ).tolist() == [-3, 4]
        assert CHECKED[overload](
            torch.tensor([7.0, 1.0]), other, rounding_mode="floor"
        ).tolist() == [-7.0, -1.0]


def test_a_division_is_checked_in_a_converted_program():
    converted = mezzo.convert(
        Calls(lambda self, x: torch.div(x, -1, rounding_mode="trunc")),
        (torch.tensor([7, 8]),),
        dtype="bfloat16",
    )
    assert converted(torch.tensor([7, -9])).tolist() == [-7, 9]
    assert torch.compile(converted.module, backend="eager", fullgraph=True)(
        torch.tensor([7, -9])
    ).tolist() == [-7, 9]
    with pytest.raises(RuntimeError, match="whose quotient no integer holds"):
        converted(torch.tensor([7, SMALLEST]))


def test_attention_needs_one_value_per_key():
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    assert torch.equal(
        scaled_dot_product_attention(q, k, v, scale=0.5),
        F.scaled_dot_product_attention(q, k, v, scale=0.5),
    )
    with pytest.raises(mezzo.CheckpointError, match="scaled_dot_product_attention"):
        scaled_dot_product_attention(q, k[:, :, :2], v)
    with pytest.raises(mezzo.CheckpointError, match="scaled_dot_product_attention"):
        scaled_dot_product_attention(q, k[:, :0], v[:, :0], enable_gqa=True)


def _attend(self, q, k, v, short):
    return F.scaled_dot_product_attention(q, k, v) + short.sum()


@pytest.fixture
def attention(tmp_path):
    """Return a saved program and inputs for it; the last is a key that is too short."""
    inputs = (
        torch.randn(1, 2, 8, 8),
        torch.randn(1, 2, 8, 8),
        torch.randn(1, 2, 8, 8),
        torch.randn(1, 2, 1, 8),
    )
    path = tmp_path / "model"
    # In float32, so that there are no casts between the inputs and the op.
    mezzo.convert(
        Calls(_attend), inputs, dtype="bfloat16", full=["scaled_dot_product_attention"]
    ).save(path)
    return path, inputs


def _use_the_short_key(graph):
    [node] = [
        one
        for one in graph["graph_module"]["graph"]["nodes"]
        if "scaled_dot_product" in one["target"]
    ]
    node["inputs"][1]["arg"]["as_tensor"]["name"] = "args_3"


def test_a_crafted_program_raises_before_the_kernel_runs(attention):
    path, inputs = attention
    loaded = mezzo.Converted.load(edited(path, GRAPH, _use_the_short_key))
    with pytest.raises(
        mezzo.CheckpointError,
        match="calls scaled_dot_product_attention with tensors that do not fit",
    ):
        loaded(*inputs)
    with pytest.raises(
        mezzo.CheckpointError,
        match="calls scaled_dot_product_attention with tensors that do not fit",
    ):
        loaded.module(*inputs)
    with pytest.raises(
        mezzo.CheckpointError,
        match="calls scaled_dot_product_attention with tensors that do not fit",
    ):
        loaded.compare(*inputs, against=Calls(_attend))


def test_a_program_with_checks_can_be_saved_compiled_and_compared(attention, tmp_path):
    path, inputs = attention
    loaded = mezzo.Converted.load(path)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert torch.equal(torch.compile(loaded.module, backend="eager")(*inputs), loaded(*inputs))
    assert [error.op for error in loaded.compare(*inputs, against=Calls(_attend)).outputs] == [""]


def test_a_program_without_unchecked_ops_is_returned_itself():
    exported = torch.export.export(nn.Linear(3, 2), (torch.ones(1, 3),))
    assert with_checks(exported) is exported


def test_ops_inside_branches_are_checked_and_the_program_is_not_changed(attention):
    def forward(self, q):
        return torch.cond(
            q.sum() > 0, lambda q: F.scaled_dot_product_attention(q, q, q), lambda q: q.sin(), (q,)
        )

    with torch.no_grad():
        exported = torch.export.export(Calls(forward), (torch.randn(1, 2, 4, 8),))
    before = copied_graph(exported.graph_module)
    targets = [
        node.target
        for one in with_checks(exported).graph_module.modules()
        if hasattr(one, "graph")
        for node in one.graph.nodes
    ]
    assert scaled_dot_product_attention in targets
    assert not CHECKED.keys() & set(targets)
    assert before.true_graph_0.code == exported.graph_module.true_graph_0.code
