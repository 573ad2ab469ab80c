"""`mezzo convert`: a model of a factory to a file."""

import json
import sys

import onnx
import pytest
import torch
from typer.testing import CliRunner

import mezzo
from mezzo.cli.app import app
from mezzo.cli.convert_model import parse_input

MODELS = """
import torch
from torch import nn

def pair():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2)), torch.ones(4, 8)

def alone():
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 2))

class Large(nn.Module):
    def forward(self, x):
        return (x @ x) * 1e4

def overflows():
    return Large(), torch.ones(64, 64)

class Loop(nn.Module):
    def forward(self, x):
        raise KeyError("mask")

def broken():
    return Loop(), torch.ones(2)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets_of_test.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("nets_of_test", None)


def convert(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)], prog_name="mezzo")


def test_a_model_with_a_sample_becomes_a_file_that_loads_in_eval_mode():
    result = convert("nets_of_test:pair", "-o", "model.pt2", "--dtype", "float16")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("model.pt2: float16, ")
    converted = mezzo.Converted.load("model.pt2")
    model, x = sys.modules["nets_of_test"].pair()
    torch.testing.assert_close(converted(x), model.eval()(x), rtol=1e-2, atol=1e-2)


def test_json_has_the_casts_the_sizes_and_the_error():
    result = convert("nets_of_test:pair", "-o", "model.pt2", "--policy", "bfloat16", "--json")
    data = json.loads(result.stdout)
    assert data["files"] == ["model.pt2"]
    assert data["dtype"] == "bfloat16"
    assert data["model_bytes"] == 4 * (8 * 16 + 16 + 16 * 2 + 2)
    assert data["casts"] <= data["autocast_casts"]
    assert 0 < data["relative_error"] < 0.05


def test_outputs_that_overflow_are_named_and_the_json_stays_valid():
    result = convert("nets_of_test:overflows", "-o", "m.pt2", "--dtype", "float16", "--json")
    assert result.exit_code == 0, result.output
    assert "The outputs of the sample are not finite in float16" in result.stderr
    assert json.loads(result.stdout, parse_constant=pytest.fail)["relative_error"] == "inf"


def test_a_shape_replaces_the_sample():
    result = convert("nets_of_test:alone", "-o", "model.pt2", "--input", "2,5:int64")
    assert result.exit_code == 0, result.output
    assert mezzo.Converted.load("model.pt2")(torch.zeros(2, 5, dtype=torch.int64)).shape[-1] == 2


def test_onnx_in_bfloat16_prints_the_warning_in_one_line():
    result = convert("nets_of_test:pair", "-o", "model.onnx", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("mezzo: The program computes in bfloat16")
    assert result.stderr.count("\n") == 1
    onnx.checker.check_model("model.onnx")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nets_of_test:alone", "-o", "m.pt2"), "returns no sample, which a conversion needs"),
        (("nets_of_test:pair", "-o", "m.bin"), "'m.bin' ends with neither of .pt2, .onnx"),
        (("nets_of_test:pair", "-o", "none/m.pt2"), "is no file in an existing folder"),
        (("nets_of_test:pair", "-o", "m.pt2", "--input", "2,x"), "--input '2,x' is not a shape"),
        (("nets_of_test:pair", "-o", "m.pt2", "--input", "2,3"), "does not run on these example"),
        (("nets_of_test:pair", "-o", "m.pt2", "--dtype", "int8"), "int8"),
        (("nets_of_test:pair",), "Missing option '-o'"),
        (("nets_of_test:broken", "-o", "m.pt2"), "KeyError"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_no_file(folder, arguments, message):
    result = convert(*arguments)
    assert result.exit_code == 2
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("mezzo: ")
    assert message in line
    assert not list(folder.glob("m.*"))


@pytest.mark.parametrize(
    ("text", "dtype"), [("2,3", "float32"), ("2,3:bfloat16", "bfloat16"), ("2,3:bool", "bool")]
)
def test_an_input_has_the_dtype_after_the_colon(text, dtype):
    made = parse_input(text)
    assert made.shape == (2, 3)
    assert made.dtype == getattr(torch, dtype)
