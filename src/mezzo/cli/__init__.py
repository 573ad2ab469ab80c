"""The command line: `mezzo run`, `mezzo report`, `mezzo lint` and `mezzo advise`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Its libraries are an extra: `pip install 'mezzo[cli]'`."""
    try:
        from mezzo.cli.app import app, pending_script  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"mezzo: {error.name} is not installed. Run: pip install 'mezzo[cli]'")
    excepthook = sys.excepthook
    try:
        app(prog_name="mezzo")
    except SystemExit:
        if pending_script.script is None:
            raise
    # Typer has put its own hook there. The script runs outside of typer, which would catch its
    # exceptions and Ctrl-C.
    sys.excepthook = excepthook
    pending_script.run()
