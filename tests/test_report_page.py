"""Check docs/report.md and docs/cli.md: programs print what they show, options exist."""

import re
import runpy
from pathlib import Path

import typer
from typer.testing import CliRunner

from mezzo.autocasting import arguments
from mezzo.cli.app import app

DOCS = Path(__file__).parent.parent / "docs"
PROGRAM = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_program_of_the_page_prints_what_it_shows(tmp_path, capsys, monkeypatch):
    ((code, output),) = PROGRAM.findall((DOCS / "report.md").read_text())
    monkeypatch.chdir(tmp_path)
    # Regions that earlier tests have used emit no event again, and reports have the dtype from it.
    arguments._resolved.cache_clear()
    (tmp_path / "program.py").write_text(code)
    runpy.run_path("program.py")
    assert capsys.readouterr().out == output
    assert (tmp_path / "report.html").exists()


def test_images_of_the_page_are_there_and_small():
    for name in re.findall(r"!\[.*?\]\((.*?)\)", (DOCS / "report.md").read_text()):
        assert (DOCS / name).stat().st_size <= 150_000


def options_of(command):
    """Yield the options of a command and of those below it."""
    for part in command.params:
        yield from (*part.opts, *part.secondary_opts)
    for one in getattr(command, "commands", {}).values():
        yield from options_of(one)


def test_options_that_the_page_names_exist():
    text = (DOCS / "cli.md").read_text()
    known = {*options_of(typer.main.get_command(app)), "--help", "--max-iters", "--nproc-per-node"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known
    for command in re.findall(r"^## `mezzo (\w+)`", text, re.MULTILINE):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
