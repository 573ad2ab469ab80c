"""Conversion on CUDA: accuracy with torch's lists for GPUs, and programs that change devices."""

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
    animal = ZOO[name]()
    return Animal(animal.model.cuda(), tuple(tensor.cuda() for tensor in animal.args))


@DTYPES
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:RNN module weights")
def test_errors_are_at_most_those_of_autocast_with_the_same_tables_and_half_its_casts(
    name: str, dtype: torch.dtype
) -> None:
    animal = _animal(name)
    converted = mezzo.convert(animal.model, animal.args, dtype=dtype)
    assert 2 * converted.casts.after.count <= converted.casts.before.count
    with torch.no_grad():
        expected = copy.deepcopy(animal.model)(*animal.args)
        with torch.autocast("cuda", dtype=dtype):
            autocast_error = relative_error(
                with_rounded_tables(animal.model, converted, dtype)(*animal.args), expected
            )
    # cuDNN and cuBLAS choose their algorithms by shape and layout: the precision is the same, the
    # bits are not.
    assert relative_error(converted(*animal.args), expected) <= 1.1 * autocast_error


@DTYPES
def test_the_error_with_an_excluded_table_is_at_most_that_of_autocast(
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
            autocast_error = relative_error(model(*args)["hidden"], expected)
    # 10 % more for cuBLAS, which chooses its algorithms by layout. The logits are not compared: the
    # error of six numbers is random.
    assert relative_error(converted(*args)["hidden"], expected) <= 1.1 * autocast_error


@DTYPES
def test_a_tied_table_is_stored_once_and_the_error_is_at_most_that_of_autocast(
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
            autocast_error = relative_error(
                with_rounded_tables(model, converted, dtype)(tokens), expected
            )
    assert relative_error(converted(tokens), expected) <= 1.1 * autocast_error


@DTYPES
def test_a_recurrent_layer_runs_in_float16_on_contiguous_weights_as_under_autocast(
    dtype: torch.dtype, tmp_path
) -> None:
    # torch warns if it has to make weights contiguous, and warnings are errors here. autocast casts
    # to float16 for cuDNN with any dtype of the region.
    animal = _animal("lstm")
    converted = mezzo.convert(animal.model, animal.args, dtype=dtype)
    assert converted.plan.row("lstm").dtype == "float16"
    converted.save(tmp_path / "model.pt2")
    found = converted(*animal.args)
    for other in (mezzo.Converted.load(tmp_path / "model.pt2"), converted.to("cpu").to("cuda")):
        assert relative_error(other(*animal.args), found) < 1e-3


@DTYPES
def test_a_program_converted_on_a_cpu_moves_to_the_gpu_and_back(
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
def test_a_converted_model_compiles_without_graph_breaks() -> None:
    animal = _animal("bert")
    converted = mezzo.convert(animal.model, animal.args, dtype="bfloat16")
    compiled = torch.compile(converted.module, fullgraph=True)
    with torch.no_grad():
        assert relative_error(compiled(*animal.args), converted(*animal.args)) < 0.05
