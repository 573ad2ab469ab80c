"""Policies as TOML: readable, diffable, and read back equal."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from math import isinf
from pathlib import Path
from typing import Any

from mezzo._errors import PolicyError
from mezzo._files import write_text

_HEADER = "# A mezzo policy: mezzo.Policy.load reads it.\n"


def save(path: str | os.PathLike[str], words: Mapping[str, Any]) -> None:
    """Write a policy's words, whole or not at all."""
    lines = [f"{name} = {_value(value)}" for name, value in words.items() if not isinstance(value, Mapping)]
    for name, table in words.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{_json(key)} = {_value(value)}" for key, value in table.items())]
    write_text(path, _HEADER + "\n".join(lines) + "\n")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a policy's words, or say what is wrong with the file."""
    try:
        # utf-8-sig: some editors put a byte order mark before the text.
        words = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise PolicyError(f"There is no policy file at {os.fspath(path)!r}. Write one with `policy.save(path)`.") from error
    except OSError as error:
        raise PolicyError(f"The policy file {os.fspath(path)!r} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise PolicyError(f"{os.fspath(path)!r} is nested too deeply to be read. A policy file has tables and lists of plain values only.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f'{os.fspath(path)!r} is not valid TOML: {error}. A policy file holds lines such as level = "O1" and full = ["softmax"].') from error
    return {name: _plain(value) for name, value in words.items()}


def _value(value: Any) -> str:
    match value:
        case None:
            # TOML has no null; an empty table stands for it.
            return "{}"
        case list():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case float() if isinf(value):
            return str(value)
    return _json(value)


def _json(value: Any) -> str:
    """A string, number or boolean, which is the same text in JSON and in TOML; but TOML takes no halves of a surrogate pair, and no bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [None if item == {} else _plain(item) for item in value]
    return value
