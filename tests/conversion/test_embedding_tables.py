"""Tables whose rows are selected by index are stored in 16 bits, with the error in the plan."""

import re

import pytest
import torch
from support.graphs import HALF, Calls, names, relative_error
from support.zoo import GPT
from torch import nn

import mezzo

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=["float16", "bfloat16"])
TOKENS = torch.randint(0, 500, (2, 4))


def _residual(rows=500, **modules):
    """Return a model that returns its rows almost unchanged, with their error."""
    return Calls(
        lambda self, i: (x := self.table(i)) + self.down(self.up(x)).mul(1e-4),
        **{"table": nn.Embedding(rows, 64), "up": nn.Linear(64, 64), "down": nn.Linear(64, 64)}
        | modules,
    ).eval()


def _tied(layers=2):
    return GPT(layers=layers, vocabulary=500, tied=True).eval()


def _state(converted):
    return converted._converted.programs[0].exported.state_dict


def _stated_error(row):
    return float(re.search(r"relative error of a row (\S+);", row.reason)[1])


@DTYPES
@pytest.mark.parametrize("rows", [8, 5000])
def test_a_table_is_stored_in_16_bits_whatever_its_size(rows, dtype):
    model = _residual(rows)
    converted = mezzo.convert(model, (TOKENS % rows,), dtype=dtype)
    assert torch.equal(_state(converted)["table.weight"], model.table.weight.to(dtype))
    assert converted.plan.row("p_table_weight").dtype == str(dtype).removeprefix("torch.")


@DTYPES
def test_the_plan_states_the_largest_relative_error_of_a_row(dtype):
    model = _residual()
    with torch.no_grad():
        model.table.weight[7] = 1.0 + 0.49 * torch.finfo(dtype).eps
    converted = mezzo.convert(model, (TOKENS,), dtype=dtype)
    row = converted.plan.row("p_table_weight")
    assert row.reason.startswith("stored in 16 bits")
    assert _stated_error(row) == pytest.approx(0.49 * torch.finfo(dtype).eps, rel=0.05)


@DTYPES
def test_no_row_has_a_larger_error_than_the_plan_states(dtype):
    model = _residual()
    converted = mezzo.convert(model, (TOKENS,), dtype=dtype)
    stated = _stated_error(converted.plan.row("p_table_weight"))
    every = torch.arange(500).view(-1, 1)
    with torch.no_grad():
        errors = [
            relative_error(found, expected)
            for found, expected in zip(
                model.table.weight[every].to(dtype), model.table.weight[every], strict=True
            )
        ]
    assert max(errors) == pytest.approx(stated, rel=0.05)
    assert (
        next(one for one in converted.compare(TOKENS).nodes if one.name == "embedding").relative
        <= 1.05 * stated
    )


def test_excluding_the_node_that_the_plan_names_keeps_float32():
    model = _residual()
    reason = mezzo.convert(model, (TOKENS,), dtype=HALF).plan.row("p_table_weight").reason
    name = re.search(r"exclude='(\w+)' keeps float32", reason)[1]
    converted = mezzo.convert(model, (TOKENS,), dtype=HALF, exclude=name)
    assert torch.equal(_state(converted)["table.weight"], model.table.weight)


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": "table"},
        {"exclude": "embedding"},
        {"full": {"embedding"}},
        {"cast_params": False},
        {"policy": mezzo.Policy("O1", modules={nn.Embedding: "full"})},
        {"policy": "O0"},
    ],
    ids=["module", "node", "op", "weights", "policy", "O0"],
)
def test_an_excluded_table_stays_float32(options):
    model = _residual()
    converted = mezzo.convert(
        model, (TOKENS,), **{"dtype": HALF} | options if options.get("policy") != "O0" else options
    )
    assert converted.plan.row("p_table_weight").dtype == "float32"
    assert relative_error(converted(TOKENS), model(TOKENS)) < 1e-6


def test_rows_are_added_in_float32_after_one_cast():
    model = Calls(
        lambda self, i: self.table(i) + self.kinds(i % 2),
        table=nn.Embedding(500, 64),
        kinds=nn.Embedding(2, 64),
    ).eval()
    converted = mezzo.convert(model, (TOKENS,), dtype=HALF)
    assert {converted.plan.row(name).dtype for name in ("embedding", "embedding_1")} == {"bfloat16"}
    assert converted.plan.row("add").dtype == "float32"
    assert converted.casts.after.count == 1
    rounded = [table.weight.to(HALF).float() for table in (model.table, model.kinds)]
    assert torch.equal(converted(TOKENS), rounded[0][TOKENS] + rounded[1][TOKENS % 2])


@pytest.mark.parametrize(
    "pick",
    [
        lambda table, i: table.index_select(0, i.flatten()),
        lambda table, i: nn.functional.embedding(i, table),
    ],
    ids=["index_select", "embedding"],
)
def test_a_parameter_whose_rows_are_selected_is_a_table_too(pick):
    model = Calls(
        lambda self, i: pick(self.linear.weight, i), linear=nn.Linear(64, 500, bias=False)
    ).eval()
    converted = mezzo.convert(model, (TOKENS,), dtype=HALF)
    assert _state(converted)["linear.weight"].dtype is HALF
    assert torch.equal(converted(TOKENS), pick(model.linear.weight.to(HALF).float(), TOKENS))


@DTYPES
def test_a_tied_table_is_stored_once_for_the_rows_and_the_head(dtype):
    model = _tied()
    converted = mezzo.convert(model, (TOKENS,), dtype=dtype)
    assert [name for name in _state(converted) if "head" in name or "tokens" in name] == [
        "head.weight"
    ]
    assert torch.equal(_state(converted)["head.weight"], model.head.weight.to(dtype))
    assert _stated_error(converted.plan.row("p_head_weight")) < torch.finfo(dtype).eps


def test_an_excluded_tied_table_is_stored_twice():
    model = _tied()
    state = _state(mezzo.convert(model, (TOKENS,), dtype=HALF, exclude="tokens"))
    assert torch.equal(state["head.weight"], model.head.weight)
    assert torch.equal(state["head.weight_bfloat16"], model.head.weight.to(HALF))


def test_a_tied_head_with_an_explicit_transpose_reads_the_16_bit_table():
    model = Calls(
        lambda self, i: self.up(self.table(i).sin()) @ self.table.weight.T,
        table=nn.Embedding(500, 64),
        up=nn.Linear(64, 64),
    ).eval()
    converted = mezzo.convert(model, (TOKENS,), dtype=HALF)
    assert {name: one.dtype for name, one in _state(converted).items() if "table" in name} == {
        "table.weight": HALF
    }
    assert relative_error(converted(TOKENS), model(TOKENS)) < 0.01


def test_a_table_that_another_op_reads_in_float32_stays_float32():
    model = Calls(
        lambda self, i: (x := self.table(i), torch.cdist(x, self.table.weight)),
        table=nn.Embedding(500, 64),
    ).eval()
    converted = mezzo.convert(model, (TOKENS,), dtype=HALF)
    assert converted.plan.row("p_table_weight").dtype == "float32"


class Added(nn.Module):
    """Adds a learned vector per position: of all positions, or of those of a shorter input."""

    def __init__(self, *, sliced):
        super().__init__()
        self.places, self.linear, self.sliced = (
            nn.Parameter(torch.randn(1, 300, 32)),
            nn.Linear(32, 32),
            sliced,
        )

    def forward(self, x):
        x = x + (self.places[:, : x.shape[1]] if self.sliced else self.places)
        return x + self.linear(x) * 1e-4


@DTYPES
@pytest.mark.parametrize(("sliced", "length"), [(False, 300), (True, 200)])
def test_weights_that_are_only_added_stay_float32(sliced, length, dtype):
    model, x = Added(sliced=sliced).eval(), torch.randn(2, length, 32)
    lengths = (({1: torch.export.Dim("length", min=2, max=300)}),) if sliced else None
    converted = mezzo.convert(model, (x,), dtype=dtype, dynamic_shapes=lengths)
    assert converted.plan.row("p_places").dtype == "float32"
    assert relative_error(converted(x), model(x)) < 1e-6


def test_numbers_beyond_the_range_of_float16_keep_a_table_float32():
    model = _residual()
    with torch.no_grad():
        model.table.weight[7, 3] = 1e6
    row = mezzo.convert(model, (TOKENS,), dtype="float16").plan.row("p_table_weight")
    assert (
        row.dtype,
        mezzo.convert(model, (TOKENS,), dtype=HALF).plan.row("p_table_weight").dtype,
    ) == ("float32", "bfloat16")


def test_infinities_and_rows_of_zeros_do_not_count_as_errors():
    model = _residual(table=nn.Embedding(500, 64, padding_idx=0))
    with torch.no_grad():
        model.table.weight[7, 3] = float("inf")
    assert (
        1e-3
        < _stated_error(mezzo.convert(model, (TOKENS,), dtype=HALF).plan.row("p_table_weight"))
        < 4e-3
    )


def test_training_arguments_of_embeddings_have_no_effect():
    plain, trained = (
        _residual(table=nn.Embedding(500, 64, **options))
        for options in ({}, {"padding_idx": 3, "scale_grad_by_freq": True})
    )
    trained.load_state_dict(plain.state_dict())
    first, second = (mezzo.convert(one, (TOKENS,), dtype=HALF)(TOKENS) for one in (plain, trained))
    assert torch.equal(first, second)


@DTYPES
@pytest.mark.parametrize("model", [_residual, _tied], ids=["alone", "tied"])
def test_a_table_takes_half_the_size_and_computes_the_same_loaded_and_compiled(
    model, dtype, tmp_path
):
    original = model()
    converted = mezzo.convert(original, (TOKENS,), dtype=dtype)
    converted.save(tmp_path / "model")
    loaded = mezzo.Converted.load(tmp_path / "model")
    assert torch.equal(loaded(TOKENS), converted(TOKENS))
    assert sum(one.nbytes for one in _state(loaded).values()) < 0.51 * sum(
        one.nbytes for one in original.parameters()
    )
    compiled = torch.compile(
        loaded._converted.programs[0].exported.module(), fullgraph=True, backend="aot_eager"
    )
    assert relative_error(compiled(TOKENS), converted(TOKENS)) < 1e-3


@pytest.mark.usefixtures("one_registry")
@pytest.mark.parametrize("model", [_residual, _tied], ids=["alone", "tied"])
def test_a_table_computes_the_same_in_onnxruntime(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    converted = mezzo.convert(model(), (TOKENS,), dtype="float16")
    converted.export_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    [found] = session.run(None, {session.get_inputs()[0].name: TOKENS.numpy()})
    assert relative_error(torch.from_numpy(found), converted(TOKENS)) < 1e-3


def test_a_table_works_with_dynamic_sizes():
    sizes = {0: torch.export.Dim("batch", min=2, max=8)}
    converted = mezzo.convert(_tied(), (TOKENS,), dtype=HALF, dynamic_shapes=(sizes,))
    assert torch.allclose(converted(TOKENS.repeat(3, 1))[2:4], converted(TOKENS), atol=1e-2)


def test_programs_of_several_sizes_share_their_table():
    converted = mezzo.convert(_residual(), [(TOKENS,), (TOKENS[:1],)], dtype=HALF)
    first, second = (
        {id(one) for one in program.exported.state_dict.values()}
        for program in converted._converted.programs
    )
    assert first == second


def test_two_readers_of_one_table_read_the_same_rows_without_a_cast():
    model = Calls(
        lambda self, i: self.up(torch.cat([self.table(i), self.table(i.flip(0))])),
        table=nn.Embedding(500, 64),
        up=nn.Linear(64, 4),
    ).eval()
    converted = mezzo.convert(model, (TOKENS,), dtype=HALF)
    assert relative_error(converted(TOKENS), model(TOKENS)) < 0.01
    assert names(converted._converted.programs[0].exported.graph_module).count("aten.to.dtype") == 1
    assert _stated_error(converted.plan.row("p_table_weight")) < torch.finfo(HALF).eps


def test_a_table_whose_shape_is_read_is_stored_in_16_bits():
    model = Calls(
        lambda self, i: (self.table(i), i.sum().float().expand_as(self.table.weight)),
        table=nn.Embedding(500, 64),
    ).eval()
    assert (
        mezzo.convert(model, (TOKENS,), dtype=HALF).plan.row("p_table_weight").dtype == "bfloat16"
    )


def test_a_weight_read_only_for_its_shape_is_not_a_table():
    model = Calls(
        lambda self, i: i.sum().float().expand_as(self.table.weight), table=nn.Embedding(500, 64)
    ).eval()
    assert (
        "relative error"
        not in mezzo.convert(model, (TOKENS,), dtype=HALF).plan.row("p_table_weight").reason
    )
