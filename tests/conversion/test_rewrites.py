import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, names, relative_error
from torch import nn

import mezzo
from mezzo.conversion.export import export
from mezzo.conversion.nodes import copied_graph
from mezzo.conversion.rewrites import fold

X = torch.randn(2, 4)


def _folded(function, *args, **modules):
    exported = export(Calls(function, **modules), args or (X,), {}, None)
    module = copied_graph(exported.graph_module)
    return exported, fold(exported, module), module


def test_a_weight_norm_is_stored_as_its_product():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)).eval()
    converted = mezzo.convert(model, (X,), dtype=HALF)
    state = {
        **converted._converted.programs[0].exported.state_dict,
        **converted._converted.programs[0].exported.constants,
    }
    assert sorted((tuple(one.shape), one.dtype) for one in state.values()) == [
        ((8,), HALF),
        ((8, 4), HALF),
    ]
    assert converted.casts.after.count == 2
    assert relative_error(converted(X), model(X)) < 0.05


def test_a_chain_of_computations_is_one_tensor():
    _, folded, module = _folded(
        lambda self, x: x * (self.linear.weight.exp() + 1).log().sum(0),
        linear=nn.Linear(4, 4, bias=False),
    )
    assert names(module) == ["aten.mul.Tensor"]
    assert list(folded.constants) == ["folded_sum_1"]
    assert not folded.state_dict


def test_a_weight_that_is_read_elsewhere_stays():
    _, folded, _ = _folded(
        lambda self, x: F.linear(x, self.linear.weight) * self.linear.weight.exp().sum(),
        linear=nn.Linear(4, 4, bias=False),
    )
    assert list(folded.state_dict) == ["linear.weight"]


def test_the_export_itself_stays_as_it_is():
    exported, folded, _ = _folded(
        lambda self, x: x + self.linear.bias.exp(), linear=nn.Linear(4, 4)
    )
    assert folded is not exported
    assert "aten.exp.default" in names(exported.graph_module)
    assert set(exported.state_dict) == {"linear.weight", "linear.bias"}


def test_views_and_random_numbers_are_left():
    for function in (
        lambda self, x: x + self.linear.weight.t(),
        lambda self, x: x + torch.rand_like(self.linear.bias),
    ):
        _, folded, _ = _folded(function, torch.randn(4, 4), linear=nn.Linear(4, 4))
        assert not folded.constants


def test_what_would_grow_is_left():
    _, folded, _ = _folded(
        lambda self, x: x + torch.outer(self.linear.bias, self.linear.bias),
        torch.randn(4, 4),
        linear=nn.Linear(4, 4),
    )
    assert not folded.constants


def test_what_nothing_is_done_to_is_the_export_itself():
    exported, folded, _ = _folded(lambda self, x: self.linear(x), linear=nn.Linear(4, 4))
    assert folded is exported


class Positions(nn.Module):
    def __init__(self, kept=False):
        super().__init__()
        self.words, self.positions, self.kept = nn.Embedding(20, 8), nn.Embedding(64, 8), kept
        self.register_buffer("places", torch.arange(64)[None])

    def forward(self, tokens):
        rows = self.words(tokens) + self.positions(self.places[:, : tokens.shape[1]])
        return rows @ self.positions.weight.t() if self.kept else rows


def test_of_a_table_whose_rows_are_known_these_are_stored():
    exported = export(Positions(), (torch.randint(0, 20, (2, 5)),), {}, None)
    module = copied_graph(exported.graph_module)
    folded = fold(exported, module)
    assert list(folded.state_dict) == ["words.weight"]
    assert [tuple(one.shape) for one in folded.constants.values()] == [(1, 5, 8)]


def test_rows_at_places_that_are_counted_are_known_too():
    _, folded, _ = _folded(
        lambda self, x: x + self.table(torch.arange(2)), table=nn.Embedding(64, 4)
    )
    assert ([tuple(one.shape) for one in folded.constants.values()], list(folded.state_dict)) == (
        [(2, 4)],
        [],
    )


def test_rows_of_a_table_that_is_read_otherwise_too_are_not_stored_twice():
    exported = export(Positions(kept=True), (torch.randint(0, 20, (2, 5)),), {}, None)
    folded = fold(exported, copied_graph(exported.graph_module))
    assert "positions.weight" in folded.state_dict
    assert not folded.constants


def test_rows_that_depend_on_a_size_are_read():
    exported = export(
        Positions(), (torch.randint(0, 20, (2, 5)),), {}, ({1: torch.export.Dim("length", max=64)},)
    )
    assert "positions.weight" in fold(exported, copied_graph(exported.graph_module)).state_dict


def test_parts_that_are_cut_from_one_weight_are_left_in_it():
    _, folded, _ = _folded(
        lambda self, x: sum(F.linear(x, one) for one in self.linear.weight.chunk(4)),
        linear=nn.Linear(4, 16, bias=False),
    )
    assert (list(folded.state_dict), list(folded.constants)) == (["linear.weight"], [])


def test_a_buffer_that_the_graph_writes_is_no_constant():
    _, folded, module = _folded(
        lambda self, x: x + self.norm.running_mean.add_(1).exp(), norm=nn.BatchNorm1d(4)
    )
    assert "aten.exp.default" in names(module)
    assert "norm.running_mean" in folded.state_dict


def test_weights_that_are_kept_are_computed_with_at_each_call():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)).eval()
    state = (
        mezzo.convert(model, (X,), dtype=HALF, cast_params=False)
        ._converted.programs[0]
        .exported.state_dict
    )
    assert len(state) == 3


def test_a_name_that_is_taken_is_not_taken_twice():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.exp = torch.randn(4)
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x + self.exp + self.bias.exp()

    model = Named()
    assert torch.equal(mezzo.convert(model, (X,), dtype=HALF)(X), model(X))


def test_a_tied_weight_is_stored_under_the_name_that_is_read():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.linear = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.linear.weight = self.shared.weight

        def forward(self, x):
            return self.linear(x)

    exported = export(Tied(), (X,), {}, None)
    module = copied_graph(exported.graph_module)
    assert len(exported.state_dict) == 2
    [name] = fold(exported, module).state_dict
    assert [node.name for node in module.graph.find_nodes(op="placeholder") if node.users] == [
        f"p_{name.replace('.', '_')}",
        "x",
    ]


def test_what_nobody_reads_keeps_its_name_if_the_model_saves_it():
    class Unread(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("saved", torch.zeros(4))
            self.register_buffer("made", torch.zeros(4), persistent=False)

        def forward(self, x):
            return x + 1

    exported = export(Unread(), (X,), {}, None)
    folded = fold(exported, copied_graph(exported.graph_module))
    assert (list(folded.state_dict), list(folded.constants)) == (["saved"], [])


def test_a_weight_that_is_read_transposed_is_stored_once():
    for turned in (
        lambda weight: weight.T,
        lambda weight: weight.mT,
        lambda weight: weight.t(),
        lambda weight: weight.mH,
    ):
        _, folded, _ = _folded(
            lambda self, x, turned=turned: self.linear(x) @ turned(self.linear.weight),
            linear=nn.Linear(4, 4, bias=False),
        )
        assert (list(folded.state_dict), list(folded.constants)) == (["linear.weight"], [])


def test_what_is_transposed_by_an_attribute_stays_in_the_dtype_that_it_is_read_in():
    model = Calls(lambda self, x: self.linear(self.linear(x).mT), linear=nn.Linear(4, 4))
    converted = mezzo.convert(model, (torch.randn(2, 4, 4),), dtype=HALF)
    assert converted.casts.after.count == 2
