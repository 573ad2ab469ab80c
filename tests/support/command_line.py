"""Run `mezzo` or a script in a forked child, which saves the seconds of importing torch."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
_SECONDS = 60


@dataclass(frozen=True)
class Finished:
    """What a process left."""

    code: int
    stdout: str
    stderr: str


def start_mezzo(folder: Path, *arguments: Any, name: str = "out", **environment: str) -> int:
    """Start `mezzo` with arguments in a folder; return the number of the process."""
    return _start(folder, name, ["mezzo", *map(str, arguments)], main, environment)


def run_mezzo(folder: Path, *arguments: Any, **environment: str) -> Finished:
    return wait(start_mezzo(folder, *arguments, **environment), folder)


def run_python(folder: Path, script: Path, *arguments: Any) -> Finished:
    """Run a script without mezzo."""

    def run() -> None:
        runpy.run_path(str(script), run_name="__main__")

    return wait(_start(folder, "out", [str(script), *map(str, arguments)], run, {}), folder)


def wait(process: int, folder: Path, name: str = "out") -> Finished:
    _, status = os.waitpid(process, 0)
    texts = [(folder / f"{name}.{stream}").read_text() for stream in ("stdout", "stderr")]
    return Finished(os.waitstatus_to_exitcode(status), *texts)


def _start(
    folder: Path,
    name: str,
    arguments: Sequence[str],
    function: Callable[[], None],
    environment: dict[str, str],
) -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns about threads, which the child does not use.
        warnings.simplefilter("ignore")
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        signal.alarm(_SECONDS)
        for number, stream in enumerate(("stdout", "stderr"), 1):
            os.dup2(os.open(folder / f"{name}.{stream}", os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv, sys.excepthook = list(arguments), sys.__excepthook__
        sys.path.insert(0, "replaced")
        warnings.resetwarnings()
        code = _exit_code(function)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(function: Callable[[], None]) -> int:
    """Do what Python does when the main program ends."""
    try:
        function()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        return 0
    return 1
