"""`mezzo report`, `mezzo lint`, `mezzo advise`, and their help."""

import importlib
import json
import sys
import tomllib
from pathlib import Path

import pytest
from support import synthetic_logs as logs
from typer.testing import CliRunner

from mezzo.cli import main
from mezzo.cli.app import app

ROOT = Path(__file__).parents[2]
SETUP = """
import torch
from torch import nn

def plain():
    return nn.Linear(32, 32)

def with_sample():
    return nn.Linear(32, 32), torch.randn(8, 32)

def half_without_scaler():
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "dtype": "float16"}

def wrong():
    return 3
"""


@pytest.fixture
def setup(tmp_path, monkeypatch):
    (tmp_path / "setup_of_test.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "setup_of_test"
    sys.modules.pop("setup_of_test", None)


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_report_writes_a_page_and_prints_a_summary(tmp_path):
    log = logs.write(tmp_path / "run.jsonl", logs.training_run(40, blocks=1))
    result = invoke("report", log)
    assert result.exit_code == 0
    assert "steps 40" in result.stdout
    assert (tmp_path / "run.html").stat().st_size > 1_000_000


def test_report_prints_json_and_writes_for_tensorboard(tmp_path):
    log = logs.write(tmp_path / "run.jsonl", logs.training_run(20, blocks=1))
    result = invoke(
        "report", log, "-o", tmp_path / "o.html", "--json", "--tensorboard", tmp_path / "tb"
    )
    data = json.loads(result.stdout)
    assert data["figures"]["steps"] == "20"
    assert data["report"] == str(tmp_path / "o.html")
    assert list((tmp_path / "tb").iterdir())


def test_a_missing_log_is_an_error_of_one_line(tmp_path):
    result = invoke("report", tmp_path / "missing.jsonl")
    assert result.exit_code == 2
    assert result.stderr.startswith("mezzo: There is no log ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("factory", ["plain", "with_sample"])
def test_lint_of_a_setup_without_findings_exits_with_0(setup, factory):
    result = invoke("lint", f"{setup}:{factory}")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("no findings")


def test_lint_exits_with_1_if_there_are_findings(setup):
    result = invoke("lint", f"{setup}.py:half_without_scaler", "--json")
    assert result.exit_code == 1, result.output
    assert "float16-without-scaler" in {one["rule"] for one in json.loads(result.stdout)}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("{}:wrong", "returned 'int'. Return a model, a tuple"),
        ("{}:plan", "has no 'plan'. Did you mean 'plain'"),
        ("no_such_module:f", "There is no module 'no_such_module'"),
        ("no_such_file.py:f", "There is no file 'no_such_file.py'"),
        ("f", "'f' is not of the form module:factory"),
    ],
)
def test_what_is_no_factory_is_refused(setup, factory, message):
    result = invoke("lint", factory.format(setup))
    assert result.exit_code == 2
    assert message in result.stderr


def test_advise_prints_the_setting_to_use(setup):
    text = invoke("advise", f"{setup}:with_sample", "--gpu", "H100")
    assert text.exit_code == 0, text.output
    assert "H100" in text.stdout
    data = json.loads(invoke("advise", f"{setup}:with_sample", "--gpu", "H100", "--json").stdout)
    assert "H100" in data["device"]


@pytest.mark.parametrize("command", ["run", "report", "lint", "advise"])
def test_help_has_an_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: mezzo {command}" in result.stdout


def test_the_installed_command_is_this_one():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["mezzo"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "mezzo.cli.app")
    with pytest.raises(
        SystemExit, match=r"typer is not installed. Run: pip install 'mezzo\[cli\]'"
    ):
        main()
