"""Stand-ins for example inputs have their sizes and structure, and no memory."""

import torch
from support.saved_programs import everything, export
from torch import nn

from mezzo.conversion.signature import zeros_like_inputs


def test_zeros_have_the_sizes_and_structure_of_the_examples():
    (ids,), keywords = zeros_like_inputs(everything())
    assert (ids.shape, ids.dtype) == ((6,), torch.int64)
    assert keywords.keys() == {"extra", "gain"}
    assert keywords["extra"]["bias"].shape == (1, 4)
    assert keywords["gain"] == 3


def test_zeros_of_large_inputs_take_no_memory():
    class Large(nn.Module):
        def forward(self, x):
            return x[0, 0] + 1

    exported = export(Large(), (torch.zeros(1, 1).expand(2**20, 2**20),))
    [[zeros], _] = zeros_like_inputs(exported)
    assert (zeros.shape, zeros.untyped_storage().nbytes()) == ((2**20, 2**20), 4)


def test_a_program_without_inputs_has_none():
    class Constant(nn.Module):
        def forward(self):
            return torch.ones(2)

    assert zeros_like_inputs(export(Constant(), ())) == ((), {})


def test_inputs_whose_size_nobody_knows_have_no_stand_in():
    class Sparse(nn.Module):
        def forward(self, x):
            return x.nonzero() + 1

    exported = export(Sparse(), (torch.ones(3),))
    nodes = {node.name: node for node in exported.graph.nodes}
    nodes["x"].meta["val"] = nodes["nonzero"].meta["val"]
    assert zeros_like_inputs(exported) is None
