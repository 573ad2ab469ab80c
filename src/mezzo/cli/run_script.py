"""Run a script on mezzo as `python script.py` would run it, and write a report at its end."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from io import open_code
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from mezzo._errors import MezzoError, UnsupportedError
from mezzo.cli.console import as_line, check_report_libraries
from mezzo.cli.explain import parse_policy
from mezzo.cli.rank_logs import Ranks, all_logs, remove_old_logs, wait_for_logs
from mezzo.cli.script_observer import ScriptObserver
from mezzo.compat import apex
from mezzo.compat import torch as torch_dialect
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level
from mezzo.reporting.page import write_report
from mezzo.reporting.run_data import read_run
from mezzo.reporting.summary import summary_data
from mezzo.reporting.verdict import judge


@dataclass(frozen=True)
class Script:
    """A script to run, with what is to be observed."""

    target: str
    """Path of the script, or name of the module."""
    arguments: tuple[str, ...]
    policy: Policy | None
    """Policy of all autocast regions; None for what the script passes."""
    report: Path
    log: Path
    """The log; with several ranks, the name that the names of their logs are made from."""
    every: int | None
    """Steps between samples of tensors; None leaves the choice to `observe`."""
    is_module: bool
    as_json: bool
    """Whether stderr gets the summary as one line of JSON, and not as a sentence."""

    @classmethod
    def of(
        cls,
        target: str,
        arguments: list[str],
        policy: str | None,
        report: Path,
        log: Path | None,
        every: int | None,
        *,
        is_module: bool,
        as_json: bool,
    ) -> Self:
        """Check the options; raise before anything of the script runs."""
        if not is_module and not Path(target).is_file():
            raise MezzoError(
                f"can't open file {str(Path(target).absolute())!r}: there is no such file. Pass the"
                " path of a script, or -m and the name of a module."
            )
        check_report_libraries()
        # Absolute, because a script may change its folder.
        report, log = report.absolute(), (log or report.with_suffix(".jsonl")).absolute()
        for path in (report, log):
            if path.is_dir() or not path.parent.is_dir():
                raise MezzoError(
                    f"{str(path)!r} is no file in an existing folder. Pass a file to --report and"
                    " --log, and make its folder first."
                )
        parsed = None if policy is None else parse_policy(policy)
        return cls(target, tuple(arguments), parsed, report, log, every, is_module, as_json)


def run_script(script: Script) -> None:
    """Run a script on mezzo, and write its report, also if it fails.

    Exceptions propagate, with a hook that leaves mezzo's frames out of the traceback: Python then
    prints it and exits as it does without mezzo.
    """
    ranks, process, reason = Ranks.from_environment(os.environ), os.getpid(), "stopped"
    remove_old_logs(script.log, ranks)
    level = None if script.policy is None else script.policy.level
    if level in (Level.O2, Level.O3) and ranks.rank == 0:
        _say(
            f"mezzo: regions have the op rules of {level.value}; parameters stay float32, unless"
            " the script casts them. mezzo.decorate and mezzo.TrainStep do."
        )
    torch_dialect.install(policy=script.policy)
    with suppress(UnsupportedError):
        # If Apex itself is there, the script runs on it.
        apex.install()
    # It is about the hook that waits for the first model, not about hooks of the script.
    warnings.filterwarnings(
        "ignore", r"Using .torch\.compile\(module\). when there are global hooks"
    )
    observer = ScriptObserver(script.log, script.every, ranks, script.policy)
    try:
        with observer:
            _execute(script)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in {None, 0}:
            reason = _reason(error)
        sys.excepthook = _hook_for_script(sys.excepthook)
        raise
    finally:
        if os.getpid() == process:
            observer.close(reason)
            _write_report(script, ranks, reason)


def _execute(script: Script) -> None:
    """Run the code of a script in a new `__main__`. Frames up to this one are not the script's."""
    if script.is_module:
        sys.argv = [script.target, *script.arguments]
        _replace_first_path(Path.cwd())
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        return
    path = str(Path(script.target).absolute())
    sys.argv = [script.target, *script.arguments]
    _replace_first_path(Path(script.target).resolve().parent)
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    vars(main).update(__builtins__=sys.modules["builtins"], __cached__=None)
    # It stays there: functions that run at exit, and processes that are spawned, look it up.
    sys.modules["__main__"] = main
    with open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102 - the user's script


def _replace_first_path(folder: Path) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def _reason(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _hook_for_script(hook: ExceptHook) -> ExceptHook:
    """Return a hook that passes exceptions without the frames before the script's."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = trace
        while frames is not None and frames.tb_frame.f_code is not _execute.__code__:
            frames = frames.tb_next
        inner = trace if frames is None else frames.tb_next
        # Syntax errors of the script come from `compile`, and have no frame of the script.
        hook(kind, error.with_traceback(inner), inner)

    return show


def _write_report(script: Script, ranks: Ranks, reason: str) -> None:
    """Write the report: rank 0 does, and a rank that failed, since it may outlive the others."""
    if ranks.rank != 0 and reason == "stopped":
        return
    if reason == "stopped":
        wait_for_logs(script.log, ranks)
    try:
        run = read_run(all_logs(script.log, ranks))
        write_report(run, script.report)
        message = f"mezzo: {judge(run).sentence} Report: {script.report}"
        if script.as_json:
            message = as_line(summary_data(run) | {"report": str(script.report)})
    except Exception as error:  # noqa: BLE001 - the exit code is the script's
        message = f"mezzo: the report could not be written: {error}"
    _say(message)


def _say(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201
