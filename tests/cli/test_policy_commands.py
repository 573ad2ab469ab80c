"""`mezzo explain` and `mezzo policy`."""

import json
import sys

import pytest
from typer.testing import CliRunner

import mezzo
from mezzo.cli.app import app

MODELS = """
import torch
from torch import nn

def trained():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "sample": torch.ones(4, 8)}

def with_loss():
    model = nn.Linear(8, 2)
    sample = torch.ones(4, 8), torch.ones(4, 2)
    return {"model": model, "sample": sample, "loss_fn": nn.functional.mse_loss}

def alone():
    return nn.Linear(8, 16)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "models_of_test.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("models_of_test", None)


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], prog_name="mezzo")


def printed(*arguments, code=0):
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    return result.stdout


def refused(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("mezzo: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


# -- explain ---------------------------------------------------------------------------------------


def test_explain_of_an_op_prints_its_dtype_and_the_reason():
    assert printed("explain", "linear", "--device", "cpu", "--dtype", "float16").startswith(
        "linear runs in float16: a matrix product"
    )


def test_explain_of_an_op_says_for_which_inputs_it_is():
    # An op in no list runs in the dtype of its inputs, and float32 is only an example.
    text = printed("explain", "hypot", "--device", "cpu")
    assert "That is for float32 inputs on cpu, " in text
    assert "Pass --input bfloat16 for 16-bit ones." in text
    text = printed("explain", "hypot", "--device", "cpu", "--input", "bfloat16")
    assert text.startswith("hypot runs in bfloat16: in no list")
    assert "That is on cpu, " in text


def test_explain_of_an_op_names_the_device(monkeypatch):
    assert " on cpu, " in printed("explain", "softmax", "--device", "cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "Pass --device cuda for a GPU." in printed("explain", "softmax")
    text = printed("explain", "O2", "softmax", "--device", "cuda", "--dtype", "float16")
    assert text.startswith("softmax runs in float32: sums exponentials")
    assert " on cuda, which this machine does not have: " in text


@pytest.mark.parametrize("arguments", [("O3", "softmax"), ("policy.toml", "softmax")])
def test_explain_of_an_op_under_a_policy_prints_json(arguments):
    mezzo.Policy("O3").save("policy.toml")
    data = json.loads(printed("explain", *arguments, "--dtype", "bfloat16", "--json"))
    expected = mezzo.Policy("O3", "bfloat16").explain("softmax")
    assert data == {
        "op": "softmax",
        "rule": "half",
        "dtype": "bfloat16",
        "reason": expected.reason,
    }


def test_explain_takes_the_dtypes_of_inputs():
    arguments = ("explain", "float16", "relu", "--device", "cpu")
    assert printed(*arguments).startswith("relu runs in float32")
    assert printed(*arguments, "--input", "float16").startswith("relu runs in float16")


def test_explain_of_a_policy_lists_ops_by_rule():
    data = json.loads(printed("explain", "O2", "--device", "cpu", "--json"))
    assert "linear" in data["ops"]["half"]
    assert data["policy"] == {"level": "O2"}
    assert "half" in printed("explain", "O2", "--device", "cpu")


def test_explain_of_a_model_has_its_tensors_and_the_ops_of_its_sample():
    arguments = ("explain", "O2", "models_of_test:trained", "--dtype", "bfloat16")
    text = printed(*arguments)
    assert "0.weight  16 × 8  float32 → bfloat16  float32 master" in text
    assert "native_layer_norm" in text
    data = json.loads(printed(*arguments, "--json"))
    assert [row["after"] for row in data["tensors"]] == ["bfloat16"] * 2 + ["float32"] * 2
    assert ("0", "addmm", "bfloat16") in {
        (row["module"], row["op"], row["dtype"]) for row in data["ops"]
    }


def test_explain_of_a_model_without_a_sample_has_its_tensors():
    data = json.loads(printed("explain", "models_of_test.py:alone", "--json"))
    assert data["policy"] == {"level": "O2"}
    assert data["ops"] is None


def test_the_target_of_a_sample_is_not_passed_to_the_model():
    assert "addmm" in printed("explain", "O1", "models_of_test:with_loss")


def test_what_cannot_be_explained_is_refused():
    assert "Unknown level 'O9'. Choose one of: O0, O1" in refused("explain", "O9")
    assert "Unknown op 'sofmax'. Did you mean 'softmax'" in refused("explain", "sofmax")
    assert "There is no policy file at 'no.toml'" in refused("explain", "no.toml", "linear")
    assert "has no 'alon'. Did you mean 'alone'" in refused("explain", "models_of_test:alon")


# -- policy ----------------------------------------------------------------------------------------


def test_new_writes_a_policy_that_loads():
    text = printed(
        *("policy", "new", "my.toml", "O2", "--dtype", "float16", "--preset", "torch-cuda"),
        *("--full", "add", "--full", "gelu", "--half", "softmax", "--keep-full", "head"),
        *("--master", "float32"),
    )
    expected = mezzo.Policy(
        "O2",
        "float16",
        preset="torch-cuda",
        full={"add", "gelu"},
        half={"softmax"},
        keep_full=[*mezzo.NORMS, "head"],
        master="float32",
    )
    assert mezzo.Policy.load("my.toml") == expected
    assert text == f"my.toml: {expected!r}\n"


def test_new_replaces_a_file_only_with_force(folder):
    assert json.loads(printed("policy", "new", "my.toml", "--json")) == {
        "file": "my.toml",
        "policy": {"level": "O1"},
    }
    assert "'my.toml' exists. Pass another file, or --force" in refused("policy", "new", "my.toml")
    printed("policy", "new", "my.toml", "O3", "--force")
    assert mezzo.Policy.load("my.toml") == mezzo.Policy("O3")


def test_new_writes_nothing_if_an_option_is_wrong(folder):
    assert "Unknown op 'sofmax'" in refused("policy", "new", "my.toml", "--full", "sofmax")
    assert "does not end with .toml" in refused("policy", "new", "my.yaml")
    refused("policy", "new", "missing/my.toml")
    assert not list(folder.glob("**/my.*"))


def test_show_prints_toml_that_loads(folder):
    mezzo.Policy("O2", "float16", modules={"head": "full"}).save("my.toml")
    for options in ([], ["--all"]):
        (folder / "copy.toml").write_text(printed("policy", "show", "my.toml", *options))
        assert mezzo.Policy.load("copy.toml") == mezzo.Policy.load("my.toml")


def test_show_can_list_the_ops():
    assert "matrix product" in printed("policy", "show", "O1", "--ops", "--device", "cpu")
    data = json.loads(printed("policy", "show", "O1", "--ops", "--device", "cpu", "--json"))
    assert data["ops"]["linear"][0] == "half"


def test_diff_names_fields_and_ops_and_exits_with_1():
    printed("policy", "new", "my.toml", "--full", "linear")
    text = printed("policy", "diff", "O1", "my.toml", "--device", "cpu", code=1)
    assert text.startswith("full: [] → ['linear']\n")
    assert "op linear: half → full\n" in text
    data = json.loads(printed("policy", "diff", "O1", "my.toml", "--json", code=1))
    assert data["fields"] == {"full": [[], ["linear"]]}
    assert data["ops"]["linear"] == ["half", "full"]


def test_diff_of_equal_policies_exits_with_0():
    printed("policy", "new", "my.toml", "O1")
    assert printed("policy", "diff", "O1", "my.toml") == "no difference\n"


def test_check_names_the_error_of_each_file_and_exits_with_1(folder):
    printed("policy", "new", "good.toml", "--dtype", "bfloat16")
    (folder / "bad.toml").write_text('full = ["sofmax"]\n')
    assert printed("policy", "check", "good.toml", "--device", "cpu").startswith(
        "good.toml: valid; O1 on cpu: bfloat16, "
    )
    text = printed("policy", "check", "good.toml", "bad.toml", code=1)
    assert "bad.toml: In 'bad.toml': Unknown op 'sofmax'. Did you mean 'softmax'" in text
    data = json.loads(printed("policy", "check", "good.toml", "bad.toml", "--json", code=1))
    assert [one["valid"] for one in data] == [True, False]


def test_check_of_a_missing_file_or_device_exits_with_2():
    assert "There is no policy file at 'no.toml'" in refused("policy", "check", "no.toml")
    printed("policy", "new", "my.toml")
    assert "Unknown device 'gpu'" in refused("policy", "check", "my.toml", "--device", "gpu")


@pytest.mark.parametrize("command", ["new", "show", "diff", "check"])
def test_help_has_an_example(command):
    assert f"Example: mezzo policy {command}" in printed("policy", command, "--help")
