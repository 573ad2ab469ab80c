"""The commands of `mezzo` and their options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mezzo
from mezzo._errors import MezzoError
from mezzo.cli.console import FOUND, CommandGroup, fail, print_json, spinner
from mezzo.cli.factory import check_names, load_setup, user_code
from mezzo.cli.policy_commands import policy_app

if TYPE_CHECKING:
    from mezzo.cli.run_script import Script

app = typer.Typer(
    cls=CommandGroup,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Automatic mixed precision for PyTorch.",
    epilog="Exit codes: 0 done, 1 something was found or differs, 2 it could not be done, 130"
    " interrupted. Start with: mezzo doctor",
)
app.add_typer(policy_app, name="policy")


@dataclass
class PendingScript:
    """The script that was named on the command line, if one was."""

    script: Script | None = None

    def run(self) -> None:
        """Run it; raises what it raises, `SystemExit` too."""
        from mezzo.cli.run_script import run_script

        if self.script is not None:
            run_script(self.script)


pending_script = PendingScript()
"""The script that `run` leaves for `main`, which runs it outside of typer."""

_FACTORY = (
    "`module:factory` or `file.py:factory`. The factory takes no arguments and returns a model, a"
    " tuple `(model, sample)`, or a dictionary of the arguments of"
)


def _print_version(requested: bool) -> None:  # noqa: FBT001 - called by typer
    if requested:
        typer.echo(f"mezzo {mezzo.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Automatic mixed precision for PyTorch."""
    del version
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


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
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between samples; by default 100 or more, so that they take"
            " about 1 % of the time.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the summary on stderr as a line of JSON."),
    ] = False,
) -> None:
    """Run an unmodified training script on mezzo, and leave a report.

    torch.amp (and apex.amp, if Apex is not installed) is mezzo's in the script. Exit code,
    arguments, signals and tracebacks are as with python.

    Under torchrun each rank writes a log, and one report names them:
    `torchrun --nproc-per-node 2 -m mezzo run --report out.html train.py`
    """
    from mezzo.cli.run_script import Script

    del context
    try:
        pending_script.script = Script.of(
            script,
            arguments or [],
            policy,
            report,
            log,
            every,
            is_module=module,
            as_json=as_json,
        )
    except (MezzoError, OSError) as error:
        fail(error)


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
    from mezzo.reporting.page import write_report
    from mezzo.reporting.run_data import read_run
    from mezzo.reporting.summary import print_summary, summary_data
    from mezzo.reporting.tensorboard import write_tensorboard

    try:
        data = read_run(log)
        path = write_report(data, output or log.with_suffix(".html"))
        if tensorboard is not None:
            write_tensorboard(data, tensorboard)
    except (MezzoError, OSError) as error:
        fail(error)
    if as_json:
        print_json(summary_data(data) | {"report": str(path)})
    else:
        print_summary(data)
        typer.echo(f"\nReport: {path}")


@app.command(epilog="Example: mezzo lint train:make_model")
def lint(
    factory: Annotated[str, typer.Argument(help=f"{_FACTORY} mezzo.lint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find what costs precision or time in a training setup. Exit code 1 if something is found."""
    found = _call(factory, mezzo.lint)
    if as_json:
        print_json(found.to_dicts())
    else:
        typer.echo(str(found))
    raise typer.Exit(FOUND if len(found) else 0)


@app.command(epilog="Example: mezzo advise train:make_model")
def advise(
    factory: Annotated[str, typer.Argument(help=f"{_FACTORY} mezzo.advise.")],
    gpu: Annotated[
        str | None, typer.Option(help="Estimate for this GPU, such as H100, from its data sheet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.")] = False,
) -> None:
    """Time a model at each level and dtype on this machine, and say which to use."""
    advice = _call(factory, mezzo.advise, **({} if gpu is None else {"gpu": gpu}))
    if as_json:
        print_json({"verdict": advice.verdict, **asdict(advice)})
    else:
        typer.echo(str(advice))


@app.command(
    epilog="Example: mezzo compare linears --report out.html; mezzo compare train:make_model"
    " --modes torch.amp,O2"
)
def compare(
    workload: Annotated[
        str | None,
        typer.Argument(
            help=f"A built-in workload (see --list), all of them (all), or {_FACTORY}"
            " mezzo.advise: model, sample, loss_fn, optimizer.",
            metavar="WORKLOAD|FACTORY",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="full or small; by default full on a GPU and small on a CPU."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The folder of real data, such as CIFAR-10.")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(help="Modes with commas, besides float32: torch.amp,O1,O2. Default: all."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float16 or bfloat16.")] = None,
    device: Annotated[
        str | None, typer.Option(help="The device; by default the accelerator, or else the CPU.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps before losses are compared.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 7,
    report: Annotated[Path | None, typer.Option(help="Write a page with charts.")] = None,
    list_workloads: Annotated[bool, typer.Option("--list", help="List the workloads.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Train a workload in float32, torch.amp, Apex and mezzo, and compare time, memory and loss.

    All modes start from the same weights and get the same batches; times are medians of
    interleaved rounds. Ctrl-C ends the run, and what was measured so far is printed and written.
    """
    from mezzo.cli import compare as comparing

    try:
        if list_workloads:
            comparing.print_workloads(as_json=as_json)
            return
        options = comparing.Options.parse(preset, data, modes, dtype, device, steps, rounds)
        comparing.check_report(report)
        results = comparing.run_workloads(workload, options)
        comparing.print_results(results, as_json=as_json)
        if report is not None:
            comparing.write_page(results, report, as_json=as_json)
    except (MezzoError, OSError) as error:
        fail(error)
    raise typer.Exit(results.exit_code)


@app.command(epilog="Example: mezzo doctor --json")
def doctor(
    device: Annotated[
        str | None, typer.Option(help="The device; by default the accelerator, or else the CPU.")
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Time matrix products in each dtype, in a process of its own.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what is fast on this machine and why, known traps, and which extras are missing.

    Exit code 1 if something prevents training in 16 bits.
    """
    from mezzo.cli.doctor import diagnose
    from mezzo.cli.machine import read_machine

    try:
        with spinner("timing matrix products"):
            diagnosis = diagnose(read_machine(device, measure=measure))
    except MezzoError as error:
        fail(error)
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        typer.echo(str(diagnosis))
    raise typer.Exit(FOUND if diagnosis.has_problem else 0)


@app.command(
    epilog="Example: mezzo explain softmax; mezzo explain my.toml batch_norm --input float16;"
    " mezzo explain O2 train:make_model"
)
def explain(
    policy: Annotated[
        str | None,
        typer.Argument(
            help="A level, a dtype or a .toml file; by default O1, and O2 for a model.",
            metavar="POLICY",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Argument(
            help=f"An op such as softmax, or {_FACTORY} mezzo.lint: model, sample.",
            metavar="OP|FACTORY",
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float16 or bfloat16.")] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="Dtype of an input of the op.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="The device of the ops.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Explain what a policy does: with all ops, with one op, or with a model.

    With a model it prints the dtype of every parameter, and, if the factory returns a sample, the
    ops of a forward pass.
    """
    from mezzo.cli import explain as explaining

    policy, target = explaining.split_arguments(policy, target)
    is_factory = target is not None and ":" in target
    try:
        parsed = explaining.parse_policy(policy or ("O2" if is_factory else "O1"), dtype)
        if target is None:
            summary: Any = explaining.explain_policy(parsed, device)
            data = summary.to_dict()
        elif is_factory:
            with spinner(f"explain {target}"):
                summary = explaining.explain_model(target, parsed)
            data = summary.to_dict()
        else:
            summary = parsed.explain(target, *inputs or (), device=device)
            data = explaining.decision_data(summary)
    except MezzoError as error:
        fail(error)
    if as_json:
        print_json(data)
        return
    typer.echo(str(summary))
    if target is not None and not is_factory:
        typer.echo(explaining.conditions_note(device, inputs or ()))


@app.command(epilog="Example: mezzo convert train:make_model -o model.pt2 --dtype float16")
def convert(
    factory: Annotated[str, typer.Argument(help=f"{_FACTORY} mezzo.lint: model, sample.")],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="The file: .pt2 for mezzo.Converted.load, .onnx for ONNX."
        ),
    ],
    policy: Annotated[str, typer.Option(help="A level, a dtype or a .toml file.")] = "O1",
    dtype: Annotated[str | None, typer.Option(help="float16 or bfloat16.")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="Shape of an input, if the factory returns no sample: 8,3,224,224 or"
            " 8,128:int64. Can be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a model to 16 bits for inference, and write it to a file.

    The model is put into eval mode. Prints the casts, the size and the error against float32.
    """
    from mezzo.cli.convert_model import convert_model
    from mezzo.cli.explain import parse_policy

    try:
        with spinner(f"convert {factory}"):
            result = convert_model(factory, output, parse_policy(policy, dtype), inputs or ())
    except (MezzoError, OSError) as error:
        fail(error)
    for warning in result.warnings:
        typer.echo(f"mezzo: {warning}", err=True)
    if as_json:
        print_json(result.to_dict())
    else:
        typer.echo(str(result))


def _call(factory: str, function: Any, **arguments: Any) -> Any:
    try:
        with spinner(f"{function.__name__} {factory}"), user_code(factory):
            setup = load_setup(factory)
            check_names(factory, setup, function)
            return function(**setup, **arguments)
    except MezzoError as error:
        fail(error)
    except TypeError as error:
        if function.__name__ not in str(error):
            raise
        fail(MezzoError(f"{factory}: {error}. Return arguments of mezzo.{function.__name__}()."))
