import torch
from support.graphs import HALF, Calls, node, planned, words
from support.zoo import GPT
from torch import nn

TOKENS = torch.randint(0, 8, (2, 4))


def _table(rows, **said):
    model = Calls(lambda self, i: self.linear(self.norm(self.table(i))), table=nn.Embedding(rows, 8), norm=nn.LayerNorm(8), linear=nn.Linear(8, 8 * 64))
    module, plan = planned(model, TOKENS, said=words(**said))
    return plan.choice.stored(node(module, "p_table_weight"))


def test_a_small_table_that_autocast_reads_in_float32_stays_float32():
    assert _table(8) == (torch.float32,)


def test_a_table_that_would_make_the_file_too_large_is_stored_in_16_bits():
    assert _table(4096) == (HALF,)


def test_an_excluded_table_stays_float32_however_large():
    assert _table(4096, exclude=("table",)) == (torch.float32,)


def test_a_tied_table_is_stored_once_where_twice_would_be_too_large():
    module, plan = planned(GPT(layers=1, vocabulary=2000, tied=True), TOKENS)
    tied = next(one for one in module.graph.nodes if one.op == "placeholder" and len(one.users) == 2)
    assert plan.choice.stored(tied) == (HALF,)
    small, other = planned(GPT(layers=12, vocabulary=8, tied=True), TOKENS)
    tied = next(one for one in small.graph.nodes if one.op == "placeholder" and len(one.users) == 2)
    assert other.choice.stored(tied) == (torch.float32, HALF)


def test_weights_that_are_kept_are_not_squeezed():
    assert _table(4096, cast_params=False) == (torch.float32,)


def test_a_weight_that_is_only_added_is_not_rounded():
    module, plan = planned(Calls(lambda self, x: x + self.norm.weight + self.norm.bias, norm=nn.LayerNorm(8)), torch.randn(2, 8))
    assert plan.choice.stored(next(one for one in module.graph.nodes if one.name.endswith("bias"))) == (torch.float32,)


def test_matrices_of_a_layer_that_carries_its_state_in_float32_are_rounded_and_vectors_are_not():
    module, plan = planned(Calls(lambda self, x: self.layer(x)[0], layer=nn.GRU(16, 64)), torch.randn(2, 16))
    stored = {len(one.meta["val"].shape): plan.choice.stored(one) for one in module.graph.find_nodes(op="placeholder") if "layer" in one.name}
    assert stored == {2: (HALF,), 1: (torch.float32,)}
