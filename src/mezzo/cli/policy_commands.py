"""The commands of `mezzo policy`: write, show, compare and check policies in TOML files."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

import mezzo
from mezzo._dtypes import dtype_name
from mezzo._errors import MezzoError, PolicyError
from mezzo._hardware import hardware
from mezzo.cli.console import FOUND, fail, print_json
from mezzo.cli.explain import parse_policy
from mezzo.policy.decide import resolve_dtype_quietly
from mezzo.policy.parse import format_toml
from mezzo.policy.policy import Policy

policy_app = typer.Typer(help="Write, show, compare and check policies in TOML files.")

_POLICY = "A level such as O1, a dtype, or a .toml file."
Json = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
Device = Annotated[
    str | None, typer.Option(help="The device; by default the accelerator, or else the CPU.")
]
Names = list[str] | None


@policy_app.command(epilog="Example: mezzo policy new my.toml O2 --dtype float16 --full softmax")
def new(
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    policy: Annotated[str, typer.Argument(help=f"What to start from. {_POLICY}")] = "O1",
    dtype: Annotated[str | None, typer.Option(help="float16, bfloat16 or auto.")] = None,
    preset: Annotated[str | None, typer.Option(help="The op lists to start from.")] = None,
    half: Annotated[Names, typer.Option(help="An op in 16 bits; can be repeated.")] = None,
    full: Annotated[Names, typer.Option(help="An op in float32; can be repeated.")] = None,
    keep_full: Annotated[
        Names, typer.Option(help="Modules whose parameters stay float32, besides norms.")
    ] = None,
    master: Annotated[str | None, typer.Option(help="Format of the master weights.")] = None,
    force: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write a policy to a TOML file."""
    options = {"preset": preset, "half": half, "full": full, "master": master}
    try:
        if file.suffix != ".toml":
            raise PolicyError(f"{str(file)!r} does not end with .toml. Pass, for example, my.toml.")
        if file.exists() and not force:
            raise PolicyError(f"{str(file)!r} exists. Pass another file, or --force to replace it.")
        start = parse_policy(policy, dtype)
        if keep_full:
            options["keep_full"] = [*start.format_field("keep_full"), *keep_full]
        made = Policy.parse(start, **{name: value for name, value in options.items() if value})
        made.save(file)
    except (MezzoError, OSError) as error:
        fail(error)
    if as_json:
        print_json({"file": str(file), "policy": made.to_dict()})
    else:
        typer.echo(f"{file}: {made!r}")


@policy_app.command(epilog="Example: mezzo policy show O2 --ops")
def show(
    policy: Annotated[str, typer.Argument(help=_POLICY)],
    every: Annotated[bool, typer.Option("--all", help="Show defaults too.")] = False,
    ops: Annotated[bool, typer.Option(help="Show every op with its rule and reason.")] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Print a policy as TOML, and with --ops the rule of every op."""
    try:
        shown = parse_policy(policy)
        table = mezzo.ops(shown, device=device) if ops else None
    except MezzoError as error:
        fail(error)
    names = [field.name for field in fields(shown)]
    values = {name: shown.format_field(name) for name in names} if every else shown.to_dict()
    if as_json:
        rules = {} if table is None else {op.name: [op.rule, op.reason] for op in table}
        print_json({"policy": values} | ({"ops": rules} if ops else {}))
        return
    # TOML has no null: a field that is None is left out, which is its default.
    stored = {name: value for name, value in values.items() if value is not None}
    typer.echo(format_toml(stored).rstrip())
    if table is not None:
        typer.echo(f"\n{table}")


@policy_app.command(epilog="Example: mezzo policy diff O1 my.toml")
def diff(
    first: Annotated[str, typer.Argument(help=_POLICY)],
    second: Annotated[str, typer.Argument(help=_POLICY)],
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Print the fields and the ops in which two policies differ. Exit code 1 if they do."""
    try:
        found = parse_policy(first).diff(parse_policy(second), device)
    except MezzoError as error:
        fail(error)
    if as_json:
        print_json(
            {
                "fields": {name: [first, second] for name, first, second in found.fields},
                "ops": {name: [first, second] for name, first, second in found.ops},
            }
        )
    else:
        typer.echo(str(found))
    raise typer.Exit(FOUND if found else 0)


@policy_app.command(epilog="Example: mezzo policy check policies/*.toml")
def check(
    files: Annotated[list[Path], typer.Argument(help="TOML files of policies.")],
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Check that files are valid policies. Exit code 1 if one is not."""
    for file in files:
        if not file.is_file():
            fail(PolicyError(f"There is no policy file at {str(file)!r}."))
    try:
        hardware(device)
    except MezzoError as error:
        fail(error)
    found = [_check(file, device) for file in files]
    if as_json:
        print_json(found)
    else:
        for checked in found:
            typer.echo(f"{checked['file']}: {checked['error'] or 'valid; ' + checked['note']}")
    raise typer.Exit(0 if all(result["valid"] for result in found) else FOUND)


def _check(file: Path, device: str | None) -> dict[str, Any]:
    try:
        policy = Policy.load(file)
        # The names of ops are looked up in the preset's lists.
        mezzo.ops(policy, device=device)
    except MezzoError as error:
        return {"file": str(file), "valid": False, "error": str(error), "note": ""}
    facts = hardware(device)
    resolved = resolve_dtype_quietly(policy, facts)
    dtype = "float32" if resolved.dtype is None else dtype_name(resolved.dtype)
    note = f"{policy.level.value} on {facts.device}: {dtype}, {resolved.reason}"
    return {"file": str(file), "valid": True, "error": None, "note": note}
