import torch
from support.graphs import Calls, planned
from torch import nn

from mezzo.graph.budget import excess, room

TOKENS = torch.randint(0, 8, (2, 4))


def _planned(rows=8, **modules):
    named = {"table": nn.Embedding(rows, 64), "linear": nn.Linear(64, 1000)} | modules
    return planned(Calls(lambda self, i: self.linear(self.table(i).sin()).sum() + sum(one.sum() for one in self.buffers()), **named), TOKENS)[1].choice


def test_half_the_size_leaves_room_and_float32_tables_take_it():
    small, larger = _planned(8), _planned(64)
    assert excess(small) < excess(larger) < 0
    assert room(small) > room(larger) > 0


def test_a_weight_counts_in_the_dtypes_that_it_is_stored_in():
    rounded = _planned(5000)
    assert rounded.squeezed
    full = 4 * (5000 * 64 + 65000)
    assert excess(rounded) == full / 2 - 0.54 * full


def test_what_is_no_weight_counts_as_it_is():
    held = nn.Module()
    held.register_buffer("places", torch.arange(1000))
    assert excess(_planned(held=held)) - excess(_planned()) == 8000 - 0.54 * 8000


def test_a_graph_of_many_nodes_leaves_less_room():
    def deep(self, i):
        x = self.table(i)
        for _ in range(40):
            x = x + 1
        return self.linear(x)

    modules = {"table": nn.Embedding(8, 64), "linear": nn.Linear(64, 1000)}
    shallow, deeper = (planned(Calls(one, **modules), TOKENS)[1].choice for one in (lambda self, i: self.linear(self.table(i) + 1), deep))
    assert excess(shallow) == excess(deeper)
    assert room(shallow) - room(deeper) > 40 * 50
