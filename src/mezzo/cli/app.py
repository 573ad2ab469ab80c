"""The commands of `mezzo` and their options."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mezzo._errors import MezzoError
from mezzo.cli.factory import load_setup
from mezzo.cli.run_script import PendingScript, Script

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Automatic mixed precision for PyTorch: run scripts on mezzo, report, lint and advise.",
)
pending_script = PendingScript()
"""The script that `run` leaves for `main`, which runs it outside of typer."""

_FACTORY = (
    "`module:factory` or `file.py:factory`. The factory takes no arguments and returns a model, a"
    " tuple `(model, sample)`, or a dictionary of the arguments of"
)


def _fail(error: MezzoError | OSError, code: int = 2) -> NoReturn:
    typer.echo(f"mezzo: {error}", err=True)
    raise typer.Exit(code)


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog="Example: mezzo run --report gpt.html train.py --batch-size 8",
)
def run(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(help="The training script, or with -m a module.", metavar="SCRIPT"),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", metavar="ARGS")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy of all autocast regions: a level such as O1, a dtype or a .toml file."
            " Without it the script's own dtype and torch's op lists.",
        ),
    ] = None,
    report: Annotated[Path, typer.Option(help="The page to write.")] = Path("mezzo-report.html"),
    log: Annotated[
        Path | None, typer.Option(help="The log to write; by default beside the report.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between samples of tensors.")] = 100,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
) -> None:
    """Run an unmodified training script on mezzo, and leave a report.

    torch.amp (and apex.amp, if Apex is not installed) is mezzo's in the script. Exit code,
    arguments, signals and tracebacks are as with python.

    Under torchrun each rank writes a log, and one report names them:
    `torchrun --nproc-per-node 2 -m mezzo run --report out.html train.py`
    """
    del context
    try:
        pending_script.script = Script.of(
            script, arguments or [], policy, report, log, every, is_module=module
        )
    except (MezzoError, OSError) as error:
        _fail(error)


@app.command(epilog="Example: mezzo report run.jsonl -o report.html")
def report(
    log: Annotated[
        Path, typer.Argument(help="The log; of several ranks, the name without a rank.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page to write; default: LOG.html.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write the data for TensorBoard to this folder too.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict and the skips as JSON.")
    ] = False,
) -> None:
    """Write a report from a log, and print its summary."""
    from mezzo.reporting.page import write_report  # noqa: PLC0415 - a second faster to --help
    from mezzo.reporting.run_data import read_run  # noqa: PLC0415
    from mezzo.reporting.summary import print_summary, summary_data  # noqa: PLC0415
    from mezzo.reporting.tensorboard import write_tensorboard  # noqa: PLC0415

    try:
        data = read_run(log)
        path = write_report(data, output or log.with_suffix(".html"))
        if tensorboard is not None:
            write_tensorboard(data, tensorboard)
    except (MezzoError, OSError) as error:
        _fail(error)
    if as_json:
        typer.echo(json.dumps(summary_data(data) | {"report": str(path)}, indent=2))
    else:
        print_summary(data)
        typer.echo(f"\nReport: {path}")


@app.command(epilog="Example: mezzo lint train:make_model")
def lint(
    factory: Annotated[str, typer.Argument(help=f"{_FACTORY} mezzo.lint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find what costs precision or time in a training setup. Exit code 1 if something is found."""
    import mezzo  # noqa: PLC0415

    found = _call(factory, mezzo.lint)
    if as_json:
        typer.echo(json.dumps(found.to_dicts(), indent=2))
    else:
        typer.echo(str(found))
    raise typer.Exit(1 if len(found) else 0)


@app.command(epilog="Example: mezzo advise train:make_model")
def advise(
    factory: Annotated[str, typer.Argument(help=f"{_FACTORY} mezzo.advise.")],
    gpu: Annotated[
        str | None, typer.Option(help="Estimate for this GPU, such as H100, from its data sheet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.")] = False,
) -> None:
    """Time a model at each level and dtype on this machine, and say which to use."""
    import mezzo  # noqa: PLC0415

    advice = _call(factory, mezzo.advise, **({} if gpu is None else {"gpu": gpu}))
    typer.echo(json.dumps(asdict(advice), indent=2, default=str) if as_json else str(advice))


def _call(factory: str, function: Any, **arguments: Any) -> Any:
    try:
        return function(**load_setup(factory), **arguments)
    except MezzoError as error:
        _fail(error)
    except TypeError as error:
        if function.__name__ not in str(error):
            raise
        _fail(MezzoError(f"{factory}: {error}. Return arguments of mezzo.{function.__name__}()."))
