"""Stored results of `mezzo compare` on other machines, shown beside those of this one.

They are the files `compare-*.json` in `benchmarks/results` of a checkout, which a wheel contains as
`mezzo/comparing/results`. Each has one result, or a list of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mezzo._errors import MezzoError
from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.workload import Documented

_INSTALLED = Path(__file__).parent / "results"
_CHECKOUT = Path(__file__).parents[3] / "benchmarks" / "results"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "None": (type(None),),
}


def stored_results(folder: Path | None = None) -> tuple[Comparison, ...]:
    """Return the results in the files `compare-*.json` of a folder, by default mezzo's own.

    Raises:
        MezzoError: A file has something else; it is named.
    """
    folder = folder or (_INSTALLED if _INSTALLED.is_dir() else _CHECKOUT)
    return tuple(
        result for path in sorted(folder.glob("compare-*.json")) for result in read_results(path)
    )


def read_results(path: Path) -> tuple[Comparison, ...]:
    """Return the results of a file that `mezzo compare --json` wrote: one, or a list of them.

    Raises:
        MezzoError: The file is not there, or has something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return tuple(_result(entry) for entry in (data if isinstance(data, list) else [data]))
    except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise MezzoError(
            f"{path} has no results of mezzo compare ({problem}). Remove it, or write it again:"
            f" mezzo compare --json > {path.name}"
        ) from error


def others(comparison: Comparison, stored: tuple[Comparison, ...]) -> list[Comparison]:
    """Return the stored results of the same workload, those of this machine left out."""
    return [
        result
        for result in stored
        if result.workload == comparison.workload
        and (result.machine, result.preset) != (comparison.machine, comparison.preset)
    ]


def _result(data: Any) -> Comparison:
    if not isinstance(data, dict) or data.get("benchmark") != "compare":
        raise ValueError("`benchmark` is not `compare`")
    result = Comparison.from_json(data)
    parts: list[Comparison | ModeResult | Documented]
    parts = [result, *result.modes, *result.documented]
    for part in parts:
        _check_types(part)
    return result


def _check_types(part: Comparison | ModeResult | Documented) -> None:
    """Check the fields of plain types, so that a wrong file is named before it is shown."""
    for field in fields(part):
        value = getattr(part, field.name)
        names = str(field.type).split(" | ")
        if all(name in _TYPES for name in names):
            values, allowed = [value], tuple(kind for name in names for kind in _TYPES[name])
        elif str(field.type) == "tuple[float, ...]":
            values, allowed = list(value), _TYPES["float"]
        else:
            continue
        if not all(isinstance(entry, allowed) for entry in values):
            raise TypeError(f"{field.name} is {value!r}")
