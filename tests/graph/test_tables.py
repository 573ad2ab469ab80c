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
    converted, _ = _errors(Calls(lambda self, i: self.table(i), table=nn.Embedding(500, 16)), HALF)
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
