"""The command line of mezzo; `mezzo --help` lists the commands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mezzo.cli.app import PendingScript


def main() -> None:
    """Run the command line. Its libraries are an extra: `pip install 'mezzo[cli]'`."""
    try:
        pending_script = _run_command()
    except KeyboardInterrupt:
        # Ctrl-C while torch is imported. The code is that of the commands.
        sys.exit(130)
    # The script runs outside of typer, which would catch its exceptions and Ctrl-C.
    pending_script.run()


def _run_command() -> PendingScript:
    try:
        from mezzo.cli.app import app, pending_script
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
    # Typer has put its own hook there.
    sys.excepthook = excepthook
    return pending_script
