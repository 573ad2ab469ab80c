"""`mezzo compare`: run workloads in all modes, print a table, and write JSON or a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import torch
import typer

from mezzo._errors import MezzoError, PolicyError, choices, nearest
from mezzo._hardware import hardware
from mezzo.cli.console import (
    FAILED,
    INTERRUPTED,
    check_report_libraries,
    print_json,
    progress_bar,
)
from mezzo.cli.factory import load_setup, user_code
from mezzo.cli.machine import ISA_LIMIT, WITHOUT_AMX
from mezzo.cli.product_times import time_products
from mezzo.comparing.compare import Progress, compare
from mezzo.comparing.comparison import Comparison
from mezzo.comparing.modes import Mode
from mezzo.comparing.own_workload import own_workload
from mezzo.comparing.table import mode_table
from mezzo.comparing.verdict import verdict
from mezzo.comparing.workload import Preset, Workload

EVERY = "all"
"""The argument for all built-in workloads."""
_PROGRAMS = "paddle-programs"
_PROGRAMS_LINE = "the eight programs of PaddlePaddle's document, through its dialect"
"""A workload of programs, which are not trained in the modes of the others."""
_SETUP = ("model", "sample", "loss_fn", "optimizer")
"""What the dictionary of a factory may have."""


@dataclass(frozen=True)
class Options:
    """The options of `mezzo compare`, checked."""

    preset: Preset
    data: Path | None = None
    modes: tuple[str, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    steps: int | None = None
    rounds: int = 7

    @classmethod
    def parse(
        cls,
        preset: str | None,
        data: Path | None,
        modes: str | None,
        dtype: str | None,
        device: str | None,
        steps: int | None,
        rounds: int,
    ) -> Options:
        """Check options before anything runs."""
        on_gpu = hardware(device).device == "cuda"
        if preset is None:
            preset = Preset.FULL if on_gpu else Preset.SMALL
        if preset not in set(Preset):
            raise PolicyError(f"--preset {preset!r} is no size. {choices(Preset)}")
        if data is not None and not data.is_dir():
            raise MezzoError(f"There is no folder {str(data)!r} for --data.")
        names = [name.strip() for name in (modes or "").split(",") if name.strip()]
        chosen = tuple(Mode.parse(name).value for name in names) or None
        return cls(Preset(preset), data, chosen, dtype, device, steps, rounds)


@dataclass
class Results:
    """What was measured so far."""

    several: bool
    """Whether all workloads were to be run: JSON then has a list."""
    comparisons: list[Comparison] = field(default_factory=list)
    failed: bool = False
    """Whether one of several workloads did not run; its error was printed."""
    interrupted: bool = False

    def add(self, comparison: Comparison) -> None:
        """Add a comparison, which is not complete if Ctrl-C ended it."""
        self.comparisons.append(comparison)
        self.interrupted = not comparison.complete

    def add_failure(self) -> None:
        """Count a workload that did not run."""
        self.failed = True

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.interrupted:
            return INTERRUPTED
        return FAILED if self.failed else 0


def run_workloads(name: str | None, options: Options) -> Results:
    """Run a workload, all of them, or a factory; Ctrl-C keeps what was measured."""
    results = Results(several=name == EVERY)
    names = _names(name)
    if results.several and options.data is not None:
        raise MezzoError("--data is for one workload: pass its name instead of all.")
    try:
        _avoid_trapped_instructions(options.device)
        for workload_name in names:
            _run_into(results, workload_name, options)
            if results.interrupted:
                break
    except KeyboardInterrupt:
        results.interrupted = True
    return results


def _run_into(results: Results, name: str, options: Options) -> None:
    """Run a workload and add its result; the error of one of several is printed."""
    try:
        with progress_bar(name) as progress:
            comparison = _run(name, options, progress)
    except MezzoError as error:
        if not results.several:
            raise
        typer.echo(f"mezzo: {name}: {error}", err=True)
        results.add_failure()
        return
    results.add(comparison)


def _names(name: str | None) -> Sequence[str]:
    """Return the workloads to run, or the factory."""
    if name is not None and ":" in name:
        return [name]
    known = _workloads()
    allowed = choices([*known, EVERY, "module:factory"])
    if name is None:
        raise MezzoError(f"Pass a workload, or a factory of your own. {allowed}")
    if name != EVERY and name not in known:
        raise MezzoError(f"There is no workload {name!r}. {allowed}{nearest(name, known)}")
    return list(known) if name == EVERY else [name]


def _workloads() -> dict[str, str]:
    """Return the built-in workloads: a line about each, by name."""
    from mezzo.comparing.builtin_workloads import WORKLOADS

    return {**WORKLOADS, _PROGRAMS: _PROGRAMS_LINE}


def _run(name: str, options: Options, progress: Progress) -> Comparison:
    if name == _PROGRAMS:
        return _run_programs(options, progress)
    is_own = ":" in name
    with user_code(name) if is_own else nullcontext():
        workload = load_own(name) if is_own else _load(name, options)
        return compare(
            workload,
            modes=options.modes,
            dtype=options.dtype,
            device=options.device,
            steps=options.steps,
            rounds=options.rounds,
            progress=progress,
        )


def _run_programs(options: Options, progress: Progress) -> Comparison:
    from mezzo.comparing.paddle_runs import PROGRAMS, run_programs

    device, done = torch.device(options.device or hardware().device), count()
    return run_programs(
        options.preset,
        device,
        options.steps,
        lambda mode: progress(f"run {mode}", next(done), len(PROGRAMS)),
    )


def _load(name: str, options: Options) -> Workload:
    from mezzo.comparing.builtin_workloads import load_workload

    return load_workload(name, options.preset, options.data)


def load_own(name: str) -> Workload:
    """Return the workload of a factory."""
    setup = load_setup(name)
    unknown = next((key for key in setup if key not in _SETUP), None)
    if unknown is not None:
        raise MezzoError(
            f"{name} returned a dictionary with {unknown!r}. {choices(_SETUP)}"
            f"{nearest(unknown, _SETUP)}"
        )
    if "model" not in setup or "sample" not in setup:
        raise MezzoError(
            f"{name} returned no {'sample' if 'model' in setup else 'model'}. Return (model,"
            " sample), or a dictionary with 'model', 'sample', 'loss_fn' and 'optimizer', of which"
            " the last two may be left out."
        )
    return own_workload(name, **setup)


def _avoid_trapped_instructions(device: str | None) -> None:
    """Limit oneDNN to AVX-512 on virtual machines that report AMX but trap its instructions.

    A process that computes a product in bfloat16 shows it. oneDNN reads the limit when it first
    computes, which it has not in this process.
    """
    if hardware(device).device != "cpu" or ISA_LIMIT in os.environ:
        return
    if any(
        product.failure == "SIGILL" for product in time_products("cpu", ["bfloat16", "float16"])
    ):
        os.environ[ISA_LIMIT] = WITHOUT_AMX
        typer.echo(
            "mezzo: this CPU reports instructions for 16 bits that it does not run. This run has"
            f" {ISA_LIMIT}={WITHOUT_AMX} in its environment, as mezzo doctor advises.",
            err=True,
        )


# -- output ----------------------------------------------------------------------------------------


def print_workloads(*, as_json: bool) -> None:
    """Print the built-in workloads, with a line about each."""
    known = _workloads()
    if as_json:
        print_json(known)
        return
    width = max(map(len, known))
    for name, line in known.items():
        typer.echo(f"{name:{width}}  {line}")


def print_results(results: Results, *, as_json: bool) -> None:
    """Print what was measured: tables and verdicts, or JSON."""
    if not as_json:
        for comparison in results.comparisons:
            _print_comparison(comparison)
    elif results.several:
        print_json([comparison.to_json() for comparison in results.comparisons])
    elif results.comparisons:
        print_json(results.comparisons[0].to_json())


def check_report(path: Path | None) -> None:
    """Raise if a page cannot be written there, before anything runs."""
    if path is None:
        return
    check_report_libraries()
    if path.is_dir() or not path.parent.is_dir():
        raise MezzoError(f"{str(path)!r} is no file in an existing folder. Make its folder first.")


def write_page(results: Results, path: Path, *, as_json: bool) -> None:
    """Write a page with charts, if something was measured."""
    from mezzo.comparing.page import write_comparison

    if results.comparisons:
        typer.echo(f"Report: {write_comparison(results.comparisons, path)}", err=as_json)


def _print_comparison(comparison: Comparison) -> None:
    """Print a table of modes, their notes, the numbers of documents and the verdict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    found = mode_table(comparison)
    shown = [place for place, name in enumerate(found.columns) if name != "note"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place in shown:
        is_number = any(row[place].is_number for row in found.rows)
        side: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(found.columns[place], justify=side, overflow="fold")
    for row in found.rows:
        table.add_row(*(row[place].text for place in shown))
    typer.echo(_headline(comparison))
    is_terminal = Console().is_terminal
    # A pipe has no width: nothing is folded or cut.
    Console(width=None if is_terminal else _WIDTH).print(table)
    for mode in comparison.modes:
        if mode.note:
            typer.echo(f"{mode.mode}: {mode.note}")
    for document in comparison.documented:
        typer.echo(
            f"{document.source}: {document.mode} is {document.speedup:g} times as fast as float32"
        )
    typer.echo(f"\n{verdict(comparison)}\n")


_WIDTH = 200


def _headline(comparison: Comparison) -> str:
    return (
        f"{comparison.workload}: {comparison.title}; data: {comparison.data}\n"
        f"{comparison.machine}, torch {comparison.torch}, mezzo {comparison.mezzo}; losses after"
        f" {comparison.steps} steps, medians of {comparison.rounds} rounds"
    )
