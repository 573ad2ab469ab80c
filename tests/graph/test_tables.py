"""Tables of embeddings in 16-bit fixed point, where float32 ones would make the file too large."""

import pytest
import torch
from support.graphs import HALF, Calls, names, relative_error
from support.zoo import GPT
from torch import nn

import mezzo

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=["float16", "bfloat16"])
TOKENS = torch.randint(0, 500, (2, 4))


def _residual(rows=500, **modules):
    """The rows themselves run to the end: what they lose is seen there."""
    return Calls(
        lambda self, i: (x := self.table(i)) + self.down(self.up(x)).mul(1e-4),
        **{"table": nn.Embedding(rows, 64), "up": nn.Linear(64, 64), "down": nn.Linear(64, 64)} | modules,
    )


def _errors(model, dtype, **words):
    converted = mezzo.convert(model, (TOKENS,), dtype=dtype, **words)
    with torch.no_grad():
        expected = model(TOKENS)
    return converted, relative_error(converted(TOKENS), expected)


@DTYPES
def test_rows_lose_far_less_than_in_a_16_bit_float(dtype):
    model = _residual()
    _, error = _errors(model, dtype)
    rounded = relative_error(model.table.weight.to(dtype), model.table.weight)
    assert error < rounded / 4


def test_the_file_is_half_as_large_and_gives_the_same(tmp_path):
    model = _residual(5000)
    converted, _ = _errors(model, HALF)
    converted.save(tmp_path / "model")
    assert (tmp_path / "model").stat().st_size < 0.55 * sum(one.nbytes for one in model.parameters())
    assert torch.equal(mezzo.Converted.load(tmp_path / "model")(TOKENS), converted(TOKENS))


def test_reading_rows_casts_nothing_and_the_plan_tells_how_they_are_stored():
    converted, _ = _errors(Calls(lambda self, i: self.table(i), table=nn.Embedding(500, 64)), HALF)
    assert converted.casts.after.count == 0
    assert (converted.plan.row("p_table_weight").dtype, converted.plan.row("embedding").op) == ("int16", "embedding")


def test_a_small_table_stays_float32():
    model = _residual(8, up=nn.Linear(64, 512), down=nn.Linear(512, 64))
    converted = mezzo.convert(model, (TOKENS % 8,), dtype=HALF)
    assert converted.plan.row("p_table_weight").dtype == "float32"


def _tied(layers):
    return GPT(layers=layers, vocabulary=500, tied=True).eval()


def _packed(converted):
    """How many numbers have what 16 bits lose of them in one byte."""
    [packed] = [one for name, one in converted.artefact.programs[0].exported.state_dict.items() if name.endswith("_rest")]
    return round(64 / packed.shape[1])


@pytest.mark.parametrize(("width", "count", "levels"), [(64, 5, 3), (150, 4, 4), (400, 3, 6), (1000, 2, 16), (2000, 1, 256)])
def test_the_more_room_the_other_weights_leave_the_more_exact_is_a_table(width, count, levels):
    converted, error = _errors(_residual(up=nn.Linear(64, width), down=nn.Linear(width, 64)), torch.float16)
    assert _packed(converted) == count
    assert error < 3e-5 / levels + 1e-6
    assert _stored(converted) < 0.55 * 4 * (500 * 64 + 2 * 64 * width + width + 64)


@DTYPES
@pytest.mark.parametrize(("layers", "left"), [(1, 0.4), (2, 0.15), (4, 0.1)])
def test_rows_of_a_tied_table_are_closer_than_the_head_reads_it(layers, left, dtype):
    model = _tied(layers)
    converted = mezzo.convert(model, (TOKENS,), dtype=dtype)
    assert _row_error(converted) < left * relative_error(model.head.weight.to(dtype), model.head.weight)
    assert converted.artefact.programs[0].exported.state_dict["head.weight"].dtype is dtype


def _row_error(converted):
    return next(one for one in converted.compare(TOKENS).nodes if one.name == "embedding").relative


def _stored(converted):
    return sum(one.nbytes for one in converted.artefact.programs[0].exported.state_dict.values())


def test_a_tied_head_that_is_transposed_by_hand_reads_16_bits():
    model = Calls(lambda self, i: self.up(self.table(i).sin()) @ self.table.weight.T, table=nn.Embedding(500, 64), up=nn.Linear(64, 64))
    converted, error = _errors(model, HALF)
    assert error < 0.01
    assert converted.casts.after.count == 2
    assert _stored(converted) < 0.55 * 4 * (500 * 64 + 65 * 64)


@DTYPES
@pytest.mark.parametrize("model", [_residual, lambda: _tied(2)], ids=["alone", "tied"])
def test_a_table_in_parts_is_the_same_from_a_file_and_compiled(model, dtype, tmp_path):
    converted = mezzo.convert(model(), (TOKENS,), dtype=dtype)
    converted.save(tmp_path / "model")
    loaded = mezzo.Converted.load(tmp_path / "model")
    assert torch.equal(loaded(TOKENS), converted(TOKENS))
    compiled = torch.compile(loaded.artefact.programs[0].exported.module(), fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(TOKENS), converted(TOKENS)) < 1e-3


@pytest.mark.usefixtures("one_registry")
@DTYPES
@pytest.mark.parametrize("model", [_residual, lambda: _tied(2)], ids=["alone", "tied"])
def test_a_table_in_parts_is_the_same_in_onnx(model, dtype, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    converted = mezzo.convert(model(), (TOKENS,), dtype=dtype)
    converted.export_onnx(tmp_path / "model.onnx")
    if dtype is torch.float16:
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        [found] = session.run(None, {session.get_inputs()[0].name: TOKENS.numpy()})
        assert relative_error(torch.from_numpy(found), converted(TOKENS)) < 1e-3


def test_a_table_in_parts_serves_sizes_that_change():
    sizes = {0: torch.export.Dim("batch", min=2, max=8)}
    converted = mezzo.convert(_tied(2), (TOKENS,), dtype=HALF, dynamic_shapes=(sizes,))
    assert torch.allclose(converted(TOKENS.repeat(3, 1))[2:4], converted(TOKENS), atol=1e-2)


def test_what_embeddings_say_for_training_changes_nothing():
    torch.manual_seed(0)
    plain, said = (_residual(table=nn.Embedding(500, 64, **words)) for words in ({}, {"padding_idx": 3, "scale_grad_by_freq": True}))
    said.load_state_dict(plain.state_dict())
    assert torch.equal(_errors(plain, HALF)[0](TOKENS), _errors(said, HALF)[0](TOKENS))


def test_weights_that_are_kept_have_no_parts():
    converted = mezzo.convert(_residual(), (TOKENS,), dtype=HALF, cast_params=False)
    assert converted.plan.row("p_table_weight").dtype == "float32"
    assert not [row for row in converted.plan if "rest" in row.node]


def test_other_tables_are_not_rounded_for_the_bits_of_the_largest():
    model = Calls(lambda self, i: self.up(self.table(i) + self.places(i % 32)), table=nn.Embedding(2000, 64), places=nn.Embedding(32, 64), up=nn.Linear(64, 64))
    converted, _ = _errors(model, HALF)
    assert (converted.plan.row("p_table_weight").dtype, converted.plan.row("p_places_weight").dtype) == ("int16", "float32")


def test_a_width_that_fills_no_bytes_is_as_exact():
    converted, error = _errors(_residual(table=nn.Embedding(500, 33), up=nn.Linear(33, 400), down=nn.Linear(400, 33)), torch.float16)
    assert [row for row in converted.plan if "rest" in row.node]
    assert error < 1e-5


def test_a_tied_table_is_stored_once_for_both_who_read_it():
    converted = mezzo.convert(GPT(layers=1, vocabulary=2000, tied=True).eval(), (TOKENS,), dtype=HALF)
    assert {row.dtype for row in converted.plan if row.op == "weight" and row.module == "head.weight"} == {"bfloat16"}


def test_a_table_with_infinite_numbers_is_left_as_it_was():
    model = _residual()
    with torch.no_grad():
        model.table.weight[7, 3] = float("inf")
    converted, _ = _errors(model, HALF)
    assert converted.plan.row("p_table_weight").dtype == "bfloat16"


def test_a_narrow_table_is_left_since_its_scales_would_make_the_file_too_large():
    converted, _ = _errors(Calls(lambda self, i: self.table(i), table=nn.Embedding(500, 8)), HALF)
    assert converted.plan.row("p_table_weight").dtype == "bfloat16"


def test_programs_of_several_sizes_share_their_table():
    converted = mezzo.convert(_residual(), [(TOKENS,), (TOKENS[:1],)], dtype=HALF)
    first, second = ({id(one) for one in program.exported.state_dict.values()} for program in converted.artefact.programs)
    assert first == second


def test_a_node_is_compared_under_its_own_name():
    converted, _ = _errors(_residual(), HALF)
    assert next(one for one in converted.compare(TOKENS).nodes if one.name == "embedding").relative < 1e-4


def test_two_readers_of_one_table_each_get_their_rows():
    model = Calls(lambda self, i: (self.table(i) + self.table(i.flip(0)), self.up(self.table(i))), table=nn.Embedding(500, 64), up=nn.Linear(64, 4))
    converted, error = _errors(model, HALF)
    assert error < 0.01
    assert "aten.to.dtype" in names(converted.artefact.programs[0].exported.graph_module)


def test_a_table_moves_to_another_device():
    converted, _ = _errors(_residual(), HALF)
    assert torch.equal(converted.to("cpu")(TOKENS), converted(TOKENS))


def test_programs_of_graphs_that_differ_agree_on_how_exact_a_table_is():
    def function(self, i):
        x = self.table(i)
        for _ in range(100 * len(i) - 99):
            x = x + 1e-9
        return self.down(self.up(x))

    # Room for 16 levels beside the shorter graph, and for fewer beside the longer.
    model = Calls(function, table=nn.Embedding(500, 64), up=nn.Linear(64, 620), down=nn.Linear(620, 64))
    alone = [mezzo.convert(model, (TOKENS[:size],), dtype=HALF) for size in (1, 2)]
    assert list(map(_packed, alone)) == [2, 3]
    together = mezzo.convert(model, [(TOKENS[:1],), (TOKENS,)], dtype=HALF)
    first, second = ({id(one) for one in program.exported.state_dict.values()} for program in together.artefact.programs)
    assert first == second
