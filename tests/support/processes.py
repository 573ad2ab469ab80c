"""Run functions and programs in processes of their own, forked from one that has imported torch."""

from __future__ import annotations

import datetime as dt
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "mezzo", "pytest"]
"""Imported once, in the process that the others are forked from."""
_GRACE = 5.0
"""Seconds for the other ranks after one has failed."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 60.0,
    group_seconds: float = 30.0,
) -> list[Any]:
    """Return `function(rank, *args)` of each rank of a gloo group, by rank.

    The function is found by its file and name in each process; its arguments and results are
    pickled. A rank that fails or takes too long raises an `AssertionError` with its traceback, and
    all ranks are ended. `group_seconds` is the time-out of the process group.
    """
    context = forkserver()
    source = str(inspect.getsourcefile(function))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_run,
                args=(folder, rank, world_size, group_seconds, source, function.__name__, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, time.monotonic() + seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [_result(Path(folder), rank) for rank in range(world_size)]


def run_program(
    program: Path, folder: Path, *, arguments: Sequence[str] = (), seconds: float = 60.0
) -> tuple[int | None, str]:
    """Run a program in a folder as `python -W error` does; return its exit code and its output."""
    output = folder / f"{program.stem}.out"
    process = forkserver().Process(target=_run_program, args=(program, folder, output, arguments))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode, output.read_text()


def _run_program(program: Path, folder: Path, output: Path, arguments: Sequence[str]) -> None:
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(folder)
    sys.argv, sys.path[0] = [str(program), *arguments], str(program.parent)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "AMP is slow on", UserWarning)  # depends on the processor
    runpy.run_path(str(program), run_name="__main__")


def forkserver() -> Any:
    """Return a context whose processes are forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return context


def _wait(ranks: list[Any], deadline: float) -> None:
    """Wait for all ranks; once one has failed, only for a few seconds more."""
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)


def _result(folder: Path, rank: int) -> Any:
    path = folder / f"{rank}.pickle"
    errors = [one.read_text() for one in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    assert path.exists(), f"rank {rank} was ended: it took too long, or was killed"
    return pickle.loads(path.read_bytes())


def _run(
    folder: str,
    rank: int,
    world_size: int,
    group_seconds: float,
    source: str,
    name: str,
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # or each collection would visit, and copy, what was forked
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=dt.timedelta(seconds=group_seconds),
        )
        result = getattr(_module(source), name)(rank, *args)
        Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))
    except BaseException:  # noqa: BLE001
        Path(folder, f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        # Not an orderly exit, in which a group whose other ranks are gone may wait for them.
        os._exit(1)
    distributed.destroy_process_group()


def _module(source: str) -> Any:
    """Import a file, also one that no package holds."""
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(source).stem] = module
    spec.loader.exec_module(module)
    return module
