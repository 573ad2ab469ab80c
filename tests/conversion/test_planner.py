import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, node, planned, words
from torch import nn

X = torch.randn(2, 4)


def _halves(model, *args, said=None):
    module, plan = planned(model, *args, said=said)
    return lambda name: plan.choice.halves[node(module, name)]


def test_an_open_op_between_16_bit_ops_joins_them():
    halves = _halves(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), X)
    assert halves("tanh")


def test_a_cast_comes_where_the_tensor_is_smallest():
    # Pooled numbers are fewer than those before: the cast to float32 comes after the pool. Repeated
    # ones are more: it comes before.
    pooled = _halves(
        Calls(
            lambda self, x: F.softmax(F.max_pool1d(torch.tanh(self.conv(x)), 4), -1),
            conv=nn.Conv1d(4, 4, 1),
        ),
        torch.randn(2, 4, 8),
    )
    repeated = _halves(
        Calls(
            lambda self, x: F.softmax(torch.tanh(self.conv(x)).repeat(1, 1, 4), -1),
            conv=nn.Conv1d(4, 4, 1),
        ),
        torch.randn(2, 4, 8),
    )
    assert (pooled("tanh"), pooled("max_pool1d")) == (True, True)
    assert repeated("repeat") is False


def test_a_replaced_cost_moves_the_cut():
    def model():
        return Calls(
            lambda self, x: F.softmax(torch.tanh(self.linear(x)).repeat(1, 2), -1),
            linear=nn.Linear(4, 4),
        )

    asked = []

    def cost(count, source, target):
        asked.append((count, source, target))
        return 1.0

    assert _halves(model(), X)("repeat") is False
    # At one price for any cast, ties go to 16 bits.
    assert _halves(model(), X, said=words(cast_cost=cost))("repeat") is True
    assert (8 * 6, HALF, torch.float32) in asked


def test_inputs_may_be_16_bit_where_the_caller_lets_them():
    kept, free = (
        _halves(nn.Linear(4, 4), X),
        _halves(nn.Linear(4, 4), X, said=words(keep_io_dtypes=False)),
    )
    assert kept("input") is False
    assert free("input") is True


def test_a_tensor_of_one_number_is_made_in_the_dtype_that_it_is_read_in():
    halves = _halves(
        Calls(
            lambda self, x: (self.linear(torch.zeros(2, 4)), torch.ones(2, 4) + x),
            linear=nn.Linear(4, 4),
        ),
        X,
    )
    assert halves("zeros") is True
    assert halves("ones") is False


def test_matrices_of_a_layer_that_carries_its_state_in_float32_are_rounded_and_vectors_are_not():
    module, plan = planned(
        Calls(lambda self, x: self.layer(x)[0], layer=nn.GRU(16, 64)), torch.randn(2, 16)
    )
    stored = {
        len(one.meta["val"].shape): plan.choice.stored(one)
        for one in module.graph.find_nodes(op="placeholder")
        if "layer" in one.name
    }
    assert stored == {2: (HALF,), 1: (torch.float32,)}


def test_a_layer_that_carries_a_state_and_is_excluded_keeps_its_weights():
    module, plan = planned(
        Calls(lambda self, x: self.layer(x)[0], layer=nn.GRU(16, 64)),
        torch.randn(2, 16),
        said=words(exclude=("layer",)),
    )
    assert {
        plan.choice.stored(one)
        for one in module.graph.find_nodes(op="placeholder")
        if "layer" in one.name
    } == {(torch.float32,)}


def test_a_norm_s_parameters_that_are_only_added_and_multiplied_stay_float32():
    module, plan = planned(
        Calls(lambda self, x: x * self.norm.weight + self.norm.bias, norm=nn.LayerNorm(8)),
        torch.randn(2, 8),
    )
    assert {
        plan.choice.stored(one)
        for one in module.graph.find_nodes(op="placeholder")
        if "norm" in one.name
    } == {(torch.float32,)}
