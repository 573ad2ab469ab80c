import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, names, relative_error
from support.zoo import LSTMTagger
from torch import nn

import mezzo
from mezzo.conversion.assignment import WeightPool
from mezzo.conversion.converted import Converted, ConvertedPrograms
from mezzo.conversion.export import export
from mezzo.conversion.nodes import copied_graph
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.pipeline import convert_program
from mezzo.conversion.rewrites import fold_constants

X = torch.randn(2, 4)


def _folded(function, *args, **modules):
    exported = export(Calls(function, **modules), args or (X,), {}, None)
    module = copied_graph(exported.graph_module)
    return exported, fold_constants(exported, module), module


def test_weight_norm_is_stored_as_one_folded_weight():
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


def test_a_chain_of_computations_is_folded_into_one_tensor():
    _, folded, module = _folded(
        lambda self, x: x * (self.linear.weight.exp() + 1).log().sum(0),
        linear=nn.Linear(4, 4, bias=False),
    )
    assert names(module) == ["aten.mul.Tensor"]
    assert list(folded.constants) == ["folded_sum_1"]
    assert not folded.state_dict


def test_a_weight_with_other_readers_is_kept():
    _, folded, _ = _folded(
        lambda self, x: F.linear(x, self.linear.weight) * self.linear.weight.exp().sum(),
        linear=nn.Linear(4, 4, bias=False),
    )
    assert list(folded.state_dict) == ["linear.weight"]


def test_folding_does_not_change_the_exported_program():
    exported, folded, _ = _folded(
        lambda self, x: x + self.linear.bias.exp(), linear=nn.Linear(4, 4)
    )
    assert folded is not exported
    assert "aten.exp.default" in names(exported.graph_module)
    assert set(exported.state_dict) == {"linear.weight", "linear.bias"}


def test_views_and_random_numbers_are_not_folded():
    for function in (
        lambda self, x: x + self.linear.weight.t(),
        lambda self, x: x + torch.rand_like(self.linear.bias),
    ):
        _, folded, _ = _folded(function, torch.randn(4, 4), linear=nn.Linear(4, 4))
        assert not folded.constants


def test_values_larger_than_their_weights_are_not_folded():
    _, folded, _ = _folded(
        lambda self, x: x + torch.outer(self.linear.bias, self.linear.bias),
        torch.randn(4, 4),
        linear=nn.Linear(4, 4),
    )
    assert not folded.constants


def test_a_program_without_constants_is_returned_itself():
    exported, folded, _ = _folded(lambda self, x: self.linear(x), linear=nn.Linear(4, 4))
    assert folded is exported


class Positions(nn.Module):
    def __init__(self, kept=False):
        super().__init__()
        self.tokens, self.positions, self.kept = nn.Embedding(20, 8), nn.Embedding(64, 8), kept
        self.register_buffer("places", torch.arange(64)[None])

    def forward(self, tokens):
        rows = self.tokens(tokens) + self.positions(self.places[:, : tokens.shape[1]])
        return rows @ self.positions.weight.t() if self.kept else rows


def test_only_the_rows_that_are_read_are_stored_of_a_table():
    exported = export(Positions(), (torch.randint(0, 20, (2, 5)),), {}, None)
    module = copied_graph(exported.graph_module)
    folded = fold_constants(exported, module)
    assert list(folded.state_dict) == ["tokens.weight"]
    assert [tuple(one.shape) for one in folded.constants.values()] == [(1, 5, 8)]


def test_rows_selected_by_arange_are_folded_too():
    _, folded, _ = _folded(
        lambda self, x: x + self.table(torch.arange(2)), table=nn.Embedding(64, 4)
    )
    assert ([tuple(one.shape) for one in folded.constants.values()], list(folded.state_dict)) == (
        [(2, 4)],
        [],
    )


def test_rows_of_a_table_with_other_readers_are_not_stored_twice():
    exported = export(Positions(kept=True), (torch.randint(0, 20, (2, 5)),), {}, None)
    folded = fold_constants(exported, copied_graph(exported.graph_module))
    assert "positions.weight" in folded.state_dict
    assert not folded.constants


def test_rows_that_depend_on_a_dynamic_size_are_not_folded():
    exported = export(
        Positions(), (torch.randint(0, 20, (2, 5)),), {}, ({1: torch.export.Dim("length", max=64)},)
    )
    assert (
        "positions.weight"
        in fold_constants(exported, copied_graph(exported.graph_module)).state_dict
    )


def test_slices_of_one_weight_are_not_folded():
    _, folded, _ = _folded(
        lambda self, x: sum(F.linear(x, one) for one in self.linear.weight.chunk(4)),
        linear=nn.Linear(4, 16, bias=False),
    )
    assert (list(folded.state_dict), list(folded.constants)) == (["linear.weight"], [])


def test_a_mutated_buffer_is_not_a_constant():
    _, folded, module = _folded(
        lambda self, x: x + self.norm.running_mean.add_(1).exp(), norm=nn.BatchNorm1d(4)
    )
    assert "aten.exp.default" in names(module)
    assert "norm.running_mean" in folded.state_dict


def test_cast_params_false_disables_folding():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)).eval()
    state = (
        mezzo.convert(model, (X,), dtype=HALF, cast_params=False)
        ._converted.programs[0]
        .exported.state_dict
    )
    assert len(state) == 3


def test_a_folded_constant_gets_an_unused_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.exp = torch.randn(4)
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x + self.exp + self.bias.exp()

    model = Named()
    assert torch.equal(mezzo.convert(model, (X,), dtype=HALF)(X), model(X))


def test_a_tied_weight_is_stored_only_under_the_name_that_is_read():
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
    [name] = fold_constants(exported, module).state_dict
    assert [node.name for node in module.graph.find_nodes(op="placeholder") if node.users] == [
        f"p_{name.replace('.', '_')}",
        "x",
    ]


def test_an_unread_buffer_is_kept_if_the_model_saves_it():
    class Unread(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("saved", torch.zeros(4))
            self.register_buffer("unsaved", torch.zeros(4), persistent=False)

        def forward(self, x):
            return x + 1

    exported = export(Unread(), (X,), {}, None)
    folded = fold_constants(exported, copied_graph(exported.graph_module))
    assert (list(folded.state_dict), list(folded.constants)) == (["saved"], [])


def test_a_weight_read_transposed_is_stored_once():
    for transposed in (
        lambda weight: weight.T,
        lambda weight: weight.mT,
        lambda weight: weight.t(),
        lambda weight: weight.mH,
    ):
        _, folded, _ = _folded(
            lambda self, x, transposed=transposed: self.linear(x) @ transposed(self.linear.weight),
            linear=nn.Linear(4, 4, bias=False),
        )
        assert (list(folded.state_dict), list(folded.constants)) == (["linear.weight"], [])


def test_a_tensor_transposed_by_an_attribute_stays_16_bit():
    model = Calls(lambda self, x: self.linear(self.linear(x).mT), linear=nn.Linear(4, 4))
    converted = mezzo.convert(model, (torch.randn(2, 4, 4),), dtype=HALF)
    assert converted.casts.after.count == 2


# Recurrent layers in float16 on CUDA


SEQUENCES = torch.randn(2, 12, 64)


def _converted(model, *args, device="cuda", dtype=HALF, **options):
    exported = export(model, args, {}, None)
    program = convert_program(
        exported,
        ConvertOptions(mezzo.Policy("O1"), dtype, device, **options),
        dict(model.named_modules()),
        WeightPool(),
    )
    return Converted(ConvertedPrograms((program,), {}, (exported,)))


def _errors(converted, model):
    with torch.no_grad():
        return [
            relative_error(found, expected)
            for found, expected in zip(converted(SEQUENCES), model(SEQUENCES), strict=True)
        ]


def test_a_recurrent_layer_of_a_bfloat16_program_runs_in_float16():
    model = LSTMTagger().eval()
    converted = _converted(model, SEQUENCES)
    assert (converted.plan.row("lstm").dtype, converted.plan.row("linear").dtype) == (
        "float16",
        "bfloat16",
    )
    assert "torch.autocast" in converted.plan.row("lstm").reason
    logits, last = _errors(converted, model)
    assert last < 0.3 * _errors(_converted(model, SEQUENCES, device="cpu"), model)[1]
    assert logits < 3.5e-3


def test_a_float16_layer_has_few_casts_and_16_bit_weights():
    model = LSTMTagger().eval()
    converted = _converted(model, SEQUENCES)
    assert (converted.casts.before.count, converted.casts.after.count) == (13, 5)
    assert {
        one.element_size() for one in converted._converted.programs[0].exported.state_dict.values()
    } == {2}
    row = next(one for one in converted.plan if one.module == "lstm.weight_ih_l0")
    assert (row.op, row.dtype) == ("weight", "float16")
    assert "torch.autocast" in row.reason


def test_passed_states_and_excluded_tables_are_not_rounded_to_bfloat16():
    def function(self, tokens, state):
        out, last = self.gru(self.table(tokens), state)
        return self.head(out), last

    model = Calls(
        function,
        table=nn.Embedding(50, 64),
        gru=nn.GRU(64, 64, batch_first=True),
        head=nn.Linear(64, 4),
    ).eval()
    args = torch.randint(0, 50, (2, 7)), torch.randn(1, 2, 64)
    converted = _converted(model, *args, exclude=("table",))
    with torch.no_grad():
        assert relative_error(converted(*args)[1], model(*args)[1]) < 1e-3
    assert converted.plan.row("gru").dtype == "float16"


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"half": frozenset({"lstm"})}, "bfloat16"),
        ({"full": frozenset({"lstm"})}, "float32"),
        ({"exclude": ("lstm",)}, "float32"),
    ],
)
def test_lists_and_exclusions_of_the_call_apply_to_recurrent_layers(options, dtype):
    assert _converted(LSTMTagger().eval(), SEQUENCES, **options).plan.row("lstm").dtype == dtype


def test_a_weight_beyond_the_range_of_float16_keeps_the_layer_in_bfloat16():
    model = LSTMTagger().eval()
    with torch.no_grad():
        model.lstm.weight_ih_l0[0, 0] = 1e6
    assert _converted(model, SEQUENCES).plan.row("lstm").dtype == "bfloat16"


def test_cast_params_false_casts_recurrent_weights_in_each_call():
    converted = _converted(LSTMTagger().eval(), SEQUENCES, cast_params=False)
    assert {one.dtype for one in converted._converted.programs[0].exported.state_dict.values()} == {
        torch.float32
    }
    assert converted.plan.row("lstm").dtype == "float16"


def test_a_float16_layer_can_be_saved_and_loaded(tmp_path):
    converted = _converted(LSTMTagger().eval(), SEQUENCES)
    converted.save(tmp_path / "model")
    assert all(
        map(torch.equal, mezzo.Converted.load(tmp_path / "model")(SEQUENCES), converted(SEQUENCES))
    )


def test_on_a_cpu_and_in_float16_nothing_is_rewritten():
    model = LSTMTagger().eval()
    assert _converted(model, SEQUENCES, device="cpu").plan.row("lstm").dtype == "bfloat16"
    assert {
        row.dtype
        for row in _converted(model, SEQUENCES, dtype=torch.float16).plan
        if row.op in ("lstm", "linear")
    } == {"float16"}
