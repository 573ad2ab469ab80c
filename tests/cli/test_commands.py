"""`mezzo report`, `mezzo lint`, `mezzo advise`, and their help."""

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from support import synthetic_logs as logs
from typer.testing import CliRunner

import mezzo
from mezzo.cli import main
from mezzo.cli.app import app

ROOT = Path(__file__).parents[2]
SETUP = """
import sys
import torch
from torch import nn

def raises():
    raise ValueError("no data here")

def exits():
    sys.exit(0)

class Broken(nn.Linear):
    def forward(self, x):
        raise KeyError("mask")

def fails_in_forward():
    return Broken(4, 4), torch.randn(2, 4)

def plain():
    return nn.Linear(32, 32)

def with_sample():
    return nn.Linear(32, 32), torch.randn(8, 32)

def half_without_scaler():
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "dtype": "float16"}

def misspelt():
    return {"model": nn.Linear(32, 32), "optimiser": None}

def wrong():
    return 3

def needs(width):
    return nn.Linear(width, width)
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


def test_a_folder_in_place_of_a_log_is_an_error_of_one_line(tmp_path):
    result = invoke("report", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"mezzo: {str(tmp_path)!r} is a folder, not a log. ")
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
        ("{}:needs", "without arguments: missing a required argument: 'width'. Pass a"),
        ("{}:wrong", "returned 'int'. Return a model, a tuple"),
        ("{}:misspelt", "dictionary with 'optimiser'. Choose one of: model, optimizer, "),
        ("{}:misspelt", "Or pass a field of mezzo.Policy. Did you mean 'optimizer'?"),
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
    assert data["times"][0]["setting"]["precision"] == "float32"
    assert data["verdict"] in text.stdout


@pytest.mark.parametrize(
    "command", ["run", "report", "lint", "advise", "compare", "doctor", "explain", "convert"]
)
def test_help_has_an_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: mezzo {command}" in result.stdout


def test_every_command_prints_json():
    commands = dict(typer.main.get_command(app).commands)
    policy = {f"policy {name}": one for name, one in commands.pop("policy").commands.items()}
    for name, command in {**commands, **policy}.items():
        assert any("--json" in one.opts for one in command.params), name


def test_the_page_about_the_command_line_has_every_command():
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = typer.main.get_command(app).commands
    assert len(commands) >= 8
    assert [name for name in commands if f"| `mezzo {name}` |" not in page] == []


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


def test_the_version_is_printed():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"mezzo {mezzo.__version__}\n"


@pytest.mark.parametrize(
    ("factory", "line", "error"),
    [
        ("raises", 'raise ValueError("no data here")', "raised ValueError: no data here"),
        ("exits", "sys.exit(0)", "raised SystemExit: 0"),
        ("fails_in_forward", 'raise KeyError("mask")', "raised KeyError: 'mask'"),
    ],
)
def test_a_factory_that_raises_shows_its_own_frames_and_one_line(setup, factory, line, error):
    result = invoke("advise", f"{setup}:{factory}")
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last):\n  File ")
    assert line in result.stderr
    assert str(Path(mezzo.__file__).parent) not in result.stderr.split("torch/nn")[0]
    assert result.stderr.endswith(f"mezzo: {setup}:{factory} {error}\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_package\n", "raised ModuleNotFoundError: No module named 'no_such_pac"),
        ("def f(:\n", "raised SyntaxError: "),
    ],
)
@pytest.mark.parametrize("name", ["broken", "broken.py"])
def test_a_module_that_cannot_be_imported_shows_its_own_frames(setup, name, text, error):
    Path("broken.py").write_text(text)
    sys.modules.pop("broken", None)
    importlib.invalidate_caches()
    result = invoke("lint", f"{name}:f")
    assert result.exit_code == 2
    assert text.strip() in result.stderr
    assert "importlib" not in result.stderr
    assert f"\nmezzo: {name} {error}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lint"], r"Missing argument '(?i:factory)'\. Run: mezzo lint --help"),
        (["lin"], r"No such command 'lin'\. Did you mean 'lint'.*\? Run: mezzo --help"),
        (["report", "-x"], r"No such option:? -x\. Run: mezzo report --help"),
        (["doctor", "a"], r"Got unexpected extra argument.* \(a\)\. Run: mezzo doctor --help"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_with_2(arguments, message):
    result = CliRunner().invoke(app, arguments, prog_name="mezzo")
    assert result.exit_code == 2
    assert re.fullmatch(f"mezzo: {message}\n", result.stderr)


def test_without_a_command_the_help_is_shown():
    result = invoke()
    assert result.exit_code == 0
    assert "doctor" in result.stdout
