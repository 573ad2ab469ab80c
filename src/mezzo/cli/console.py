"""What all commands print: errors in one line, JSON, and progress while something takes long."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from math import isfinite
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from mezzo._errors import MezzoError, UnsupportedError
from mezzo.cli.factory import UserCodeError

FOUND, FAILED, INTERRUPTED = 1, 2, 130
"""Exit codes: a command has found something, it could not do its work, Ctrl-C ended it."""


class CommandGroup(TyperGroup):
    """The commands of `mezzo`. Wrong arguments and Ctrl-C are one line on stderr."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run a command, and exit with its code."""
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except Exception as error:
            # Not by its class: recent versions of typer have a click of their own.
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            context = getattr(error, "ctx", None)
            command = "mezzo" if context is None else context.command_path
            text = " ".join(message().split())
            end = "" if text.endswith((".", "?")) else "."
            typer.echo(f"mezzo: {text}{end} Run: {command} --help", err=True)
            sys.exit(FAILED)
        if code == INTERRUPTED:
            typer.echo("mezzo: interrupted", err=True)
        sys.exit(code if isinstance(code, int) else 0)


def fail(error: MezzoError | OSError) -> NoReturn:
    """Print an error in one line, after the traceback of the user's code, and exit with 2."""
    if isinstance(error, UserCodeError):
        typer.echo(error.traceback, err=True)
    typer.echo(f"mezzo: {error}", err=True)
    raise typer.Exit(FAILED)


def check_report_libraries() -> None:
    """Raise if a page cannot be written, before anything runs."""
    for library in ("plotly", "jinja2"):
        if find_spec(library) is None:
            raise UnsupportedError(
                f"The report needs {library}, which is not installed. Run:"
                " pip install 'mezzo[report]'"
            )


def print_json(data: Any) -> None:
    """Print data as JSON; what JSON has no type for is printed as text, infinities too."""
    typer.echo(json.dumps(_without_nonfinite(data), indent=2, default=str))


def as_line(data: Any) -> str:
    """Return data as `print_json` prints it, in one line."""
    return json.dumps(_without_nonfinite(data), default=str)


def _without_nonfinite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(name): _without_nonfinite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nonfinite(value) for value in data]
    return str(data) if isinstance(data, float) and not isfinite(data) else data


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr; nothing if that is not a terminal.

    Yields a function that takes what is being done, and how much of it of how much.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _text, _done, _total: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(text: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {text}", completed=done, total=total)

        yield show


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner on stderr; nothing if that is not a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
