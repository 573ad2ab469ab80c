"""Recurrent layers on CUDA: never less exact than under torch.autocast, which runs them in float16 whatever it was asked for. Programs for a GPU run here on a CPU."""

import pytest
import torch
from support.graphs import HALF, Calls, relative_error
from support.zoo import LSTMTagger
from torch import nn

import mezzo
from mezzo.conversion.assignment import WeightPool
from mezzo.conversion.converted import Converted, ConvertedPrograms
from mezzo.conversion.export import export
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.pipeline import assemble

X = torch.randn(2, 12, 64)


def _converted(model, *args, device="cuda", dtype=HALF, **said):
    exported = export(model, args, {}, None)
    program = assemble(
        exported,
        ConvertOptions(mezzo.Policy("O1"), dtype, device, **said),
        dict(model.named_modules()),
        WeightPool(),
    )
    return Converted(ConvertedPrograms((program,), {}, (exported,)))


def _errors(converted, model):
    with torch.no_grad():
        return [
            relative_error(found, expected)
            for found, expected in zip(converted(X), model(X), strict=True)
        ]


def test_a_layer_of_a_bfloat16_program_runs_in_float16():
    model = LSTMTagger().eval()
    converted = _converted(model, X)
    assert (converted.plan.row("lstm").dtype, converted.plan.row("linear").dtype) == (
        "float16",
        "bfloat16",
    )
    assert "torch.autocast" in converted.plan.row("lstm").reason
    logits, last = _errors(converted, model)
    assert last < 0.3 * _errors(_converted(model, X, device="cpu"), model)[1]
    assert logits < 3.5e-3


def test_it_has_few_casts_and_weights_of_half_the_size():
    model = LSTMTagger().eval()
    converted = _converted(model, X)
    assert (converted.casts.before.count, converted.casts.after.count) == (13, 5)
    assert {
        one.element_size() for one in converted._converted.programs[0].exported.state_dict.values()
    } == {2}
    row = next(one for one in converted.plan if one.module == "lstm.weight_ih_l0")
    assert (row.op, row.dtype) == ("weight", "float16")
    assert "torch.autocast" in row.reason


def test_states_that_are_passed_and_tables_that_are_excluded_are_not_rounded_to_bfloat16():
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
    ("words", "dtype"),
    [
        ({"half": frozenset({"lstm"})}, "bfloat16"),
        ({"full": frozenset({"lstm"})}, "float32"),
        ({"exclude": ("lstm",)}, "float32"),
    ],
)
def test_what_the_call_says_of_it_stands(words, dtype):
    assert _converted(LSTMTagger().eval(), X, **words).plan.row("lstm").dtype == dtype


def test_a_weight_beyond_float16_leaves_the_layer_in_bfloat16():
    model = LSTMTagger().eval()
    with torch.no_grad():
        model.lstm.weight_ih_l0[0, 0] = 1e6
    assert _converted(model, X).plan.row("lstm").dtype == "bfloat16"


def test_weights_that_are_kept_are_cast_at_each_call():
    converted = _converted(LSTMTagger().eval(), X, cast_params=False)
    assert {one.dtype for one in converted._converted.programs[0].exported.state_dict.values()} == {
        torch.float32
    }
    assert converted.plan.row("lstm").dtype == "float16"


def test_it_comes_back_from_a_file(tmp_path):
    converted = _converted(LSTMTagger().eval(), X)
    converted.save(tmp_path / "model")
    assert all(map(torch.equal, mezzo.Converted.load(tmp_path / "model")(X), converted(X)))


def test_on_a_cpu_and_in_float16_nothing_is_rewritten():
    model = LSTMTagger().eval()
    assert _converted(model, X, device="cpu").plan.row("lstm").dtype == "bfloat16"
    assert {
        row.dtype
        for row in _converted(model, X, dtype=torch.float16).plan
        if row.op in ("lstm", "linear")
    } == {"float16"}
