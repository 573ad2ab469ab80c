"""Conversion on CUDA: torch's lists for GPUs, kernels that take what the verifier lets pass, and programs that move."""

from __future__ import annotations

import copy

import pytest
import torch
from support.graphs import relative_error, tensors, with_rounded_tables
from support.zoo import BERT, GPT, ZOO, Animal

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"]
)


def _animal(name: str) -> Animal:
    torch.manual_seed(0)
    made = ZOO[name]()
    return Animal(made.model.cuda(), tuple(one.cuda() for one in made.args))


@DTYPES
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:RNN module weights")
def test_the_zoo_is_no_less_exact_than_autocast_on_the_same_tables_with_half_its_casts(
    name: str, dtype: torch.dtype
) -> None:
    animal = _animal(name)
    converted = mezzo.convert(animal.model, animal.args, dtype=dtype)
    assert 2 * converted.casts.after.count <= converted.casts.before.count
    with torch.no_grad():
        expected = copy.deepcopy(animal.model)(*animal.args)
        with torch.autocast("cuda", dtype=dtype):
            theirs = relative_error(
                with_rounded_tables(animal.model, converted, dtype)(*animal.args), expected
            )
    # cuDNN and cuBLAS choose their algorithms by shape and layout: the same precision, not the same
    # bits.
    assert relative_error(converted(*animal.args), expected) <= 1.1 * theirs


@DTYPES
def test_a_table_that_is_excluded_gives_rows_that_are_no_less_exact_than_autocast_s(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model, args = (
        BERT(vocabulary=4000).eval().cuda(),
        (
            torch.randint(0, 4000, (2, 16)).cuda(),
            torch.ones(2, 16, dtype=torch.long).cuda(),
        ),
    )
    assert mezzo.convert(model, args, dtype=dtype).plan.row("p_tokens_weight").dtype == str(
        dtype
    ).removeprefix("torch.")
    converted = mezzo.convert(model, args, dtype=dtype, exclude="embedding*")
    assert converted.plan.row("p_tokens_weight").dtype == "float32"
    with torch.no_grad():
        expected = model(*args)["hidden"]
        with torch.autocast("cuda", dtype=dtype):
            theirs = relative_error(model(*args)["hidden"], expected)
    # A tenth for cuBLAS, which chooses its algorithms by layout. The logits are six numbers, whose
    # error is chance.
    assert relative_error(converted(*args)["hidden"], expected) <= 1.1 * theirs


@DTYPES
def test_a_tied_table_is_stored_once_and_no_less_exact_than_autocast_on_the_same_table(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model, tokens = (
        GPT(layers=2, vocabulary=500, tied=True).eval().cuda(),
        torch.randint(0, 500, (2, 16)).cuda(),
    )
    converted = mezzo.convert(model, (tokens,), dtype=dtype)
    assert converted.plan.row("p_head_weight").dtype == str(dtype).removeprefix("torch.")
    with torch.no_grad():
        expected = model(tokens)
        with torch.autocast("cuda", dtype=dtype):
            theirs = relative_error(with_rounded_tables(model, converted, dtype)(tokens), expected)
    assert relative_error(converted(tokens), expected) <= 1.1 * theirs


@DTYPES
def test_a_recurrent_layer_runs_in_float16_as_under_autocast_on_weights_in_one_piece(
    dtype: torch.dtype, tmp_path
) -> None:
    # torch warns where it has to copy weights together, and here warnings are errors; autocast
    # casts for cuDNN to float16 whatever its region says.
    animal = _animal("lstm")
    converted = mezzo.convert(animal.model, animal.args, dtype=dtype)
    assert converted.plan.row("lstm").dtype == "float16"
    converted.save(tmp_path / "model.pt2")
    found = converted(*animal.args)
    for other in (mezzo.Converted.load(tmp_path / "model.pt2"), converted.to("cpu").to("cuda")):
        assert relative_error(other(*animal.args), found) < 1e-3


@DTYPES
def test_a_program_that_was_converted_on_a_cpu_moves_to_the_gpu_and_back(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    animal = ZOO["vit"]()
    converted = mezzo.convert(animal.model, animal.args, dtype=dtype)
    moved = converted.to("cuda")
    found = moved(*(one.cuda() for one in animal.args))
    assert found.is_cuda
    assert relative_error(found.cpu(), converted(*animal.args)) < 0.05
    assert torch.equal(moved.to("cpu")(*animal.args), converted(*animal.args))


def test_a_file_saved_from_the_gpu_is_loaded_there_and_on_a_cpu(tmp_path) -> None:
    animal = _animal("gpt")
    converted = mezzo.convert(animal.model, animal.args, dtype="float16")
    converted.save(tmp_path / "model.pt2")
    assert torch.equal(
        mezzo.Converted.load(tmp_path / "model.pt2")(*animal.args), converted(*animal.args)
    )
    on_cpu = mezzo.Converted.load(tmp_path / "model.pt2", device="cpu")
    assert {one.device.type for one in tensors(on_cpu(*(one.cpu() for one in animal.args)))} == {
        "cpu"
    }


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_converted_model_compiles_whole() -> None:
    animal = _animal("bert")
    converted = mezzo.convert(animal.model, animal.args, dtype="bfloat16")
    compiled = torch.compile(converted.module, fullgraph=True)
    with torch.no_grad():
        assert relative_error(compiled(*animal.args), converted(*animal.args)) < 0.05
