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

import torch
from support.processes import forkserver

from mezzo.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
_SECONDS = 60


@dataclass(frozen=True)
class Finished:
    """What a process left."""

    code: int
    stdout: str
    stderr: str


def run_mezzo(folder: Path, *arguments: Any, **environment: str) -> Finished:
    """Run `mezzo` with arguments in a folder, with what this process has patched."""
    return _fork(folder, _mezzo(arguments), main, environment)


def run_mezzo_ranks(folder: Path, *arguments: Any, ranks: int = 2) -> list[Finished]:
    """Run ranks as torchrun does: it serves the store, so that no port has to be guessed.

    They are not forked from here: threads of the store may hold locks.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    names = [f"rank{rank}" for rank in range(ranks)]
    started = [
        forkserver().Process(
            target=_run, args=(folder, name, _mezzo(arguments), main, common | {"RANK": str(rank)})
        )
        for rank, name in enumerate(names)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return [
        _finished(process.exitcode, folder, name)
        for process, name in zip(started, names, strict=True)
    ]


def run_python(folder: Path, script: Path, *arguments: Any) -> Finished:
    """Run a script without mezzo."""

    def run() -> None:
        runpy.run_path(str(script), run_name="__main__")

    return _fork(folder, [str(script), *map(str, arguments)], run, {})


def _mezzo(arguments: Sequence[Any]) -> list[str]:
    return ["mezzo", *map(str, arguments)]


def _finished(code: int | None, folder: Path, name: str) -> Finished:
    texts = [(folder / f"{name}.{stream}").read_text() for stream in ("stdout", "stderr")]
    return Finished(-1 if code is None else code, *texts)


def _fork(
    folder: Path,
    arguments: Sequence[str],
    function: Callable[[], None],
    environment: dict[str, str],
) -> Finished:
    with warnings.catch_warnings():
        # Python 3.12 warns about threads, which the child does not use.
        warnings.simplefilter("ignore")
        process = os.fork()
    if not process:
        _run(folder, "out", arguments, function, environment)
    _, status = os.waitpid(process, 0)
    return _finished(os.waitstatus_to_exitcode(status), folder, "out")


def _run(
    folder: Path,
    name: str,
    arguments: Sequence[str],
    function: Callable[[], None],
    environment: dict[str, str],
) -> None:
    """Run a function as the main program of this process, and end the process."""
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
