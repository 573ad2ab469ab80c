"""Check docs/report.md and docs/cli.md: images are small, options exist."""

import re
from pathlib import Path

import typer
from typer.testing import CliRunner

from mezzo.cli.app import app

DOCS = Path(__file__).parent.parent / "docs"


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
