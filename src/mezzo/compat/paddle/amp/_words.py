"""Paddle's words for levels, dtypes and op lists, each refused with its own exception and a message that says at least as much."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from mezzo._dtypes import dtype_name
from mezzo._errors import nearest
from mezzo.policy.presets import paddle

DTYPES = ("float16", "bfloat16")
LEVELS = ("O0", "OD", "O1", "O2")
_PRODUCTS, _LAYER = {"matmul", "matmul_v2"}, "linear_v2"

Names = Iterable[str] | None


def level_of(level: Any) -> str:
    """A level of `auto_cast`, in either case."""
    if not isinstance(level, str):
        raise AttributeError(f"level={level!r} is {type(level).__name__}, not a string. level should be O0, OD, O1 or O2.")  # noqa: TRY004 - Paddle's
    if level.upper() not in LEVELS:
        raise ValueError(f"level should be O0, OD, O1 or O2. It is {level!r}{_zero(level)}.")
    return level.upper()


def half_of(dtype: Any, *, needed: bool) -> str | None:
    """The name of a 16-bit dtype; None for another one that is not needed."""
    if isinstance(dtype, torch.dtype):
        dtype = dtype_name(dtype)
    if not isinstance(dtype, str):
        raise AttributeError(f"dtype={dtype!r} is {type(dtype).__name__}. It should be the string 'float16' or 'bfloat16', or one of torch's dtypes.")  # noqa: TRY004
    if dtype.lower() in DTYPES:
        return dtype.lower()
    if needed:
        raise ValueError(f"If enable amp, dtype should be 'float16' or 'bfloat16'. It is {dtype!r}.")
    return None


def custom_lists(white: Names, black: Names) -> tuple[frozenset[str], frozenset[str]]:
    """The ops that custom lists in Paddle's names turn half and full. A name may stand for several ops here; what both lists reach is float32, as there.

    A linear layer is a matmul and an addition in Paddle's guide, and one op in its builds for CUDA: who keeps matmul in float32 keeps layers there, too.
    """
    whites, blacks = _names("custom_white_list", white), _names("custom_black_list", black)
    if both := whites & blacks:
        raise ValueError(f"Custom white list overlap custom black list: {', '.join(sorted(both))}. An op can be in one of them.")
    if blacks & _PRODUCTS and _LAYER not in whites:
        blacks |= {_LAYER}
    half, full = _translated(whites), _translated(blacks)
    return half - full, full


def _names(what: str, names: Names) -> frozenset[str]:
    if isinstance(names, str):
        # Paddle takes its letters for names.
        raise TypeError(f"{what}={names!r} should be a set of op names: {what}={{{names!r}}}.")
    return frozenset(names or ())


def _translated(names: frozenset[str]) -> frozenset[str]:
    known = paddle.NAMES.known
    for name in names - known.keys() - _said:
        # In the log and once: Paddle accepts any word, does nothing with those that it does not know, and says so nowhere.
        _said.add(name)
        _LOG.warning("%r in a custom list has no effect: %s.", name, _why_not(name))
    return frozenset(ours for name in names for ours in known.get(name, ()))


_LOG = logging.getLogger("mezzo.compat.paddle")
_said: set[str] = set()
"""Names that were told already."""


def _why_not(name: str) -> str:
    reason = paddle.NAMES.unknown.get(str(name))
    return (
        f"Paddle's {name} {reason}" if reason else f"no op of Paddle that torch has too goes by that name.{nearest(str(name), paddle.NAMES.known)}".rstrip("?.")
    )


def _zero(level: str) -> str:
    return ", with a zero in place of the letter O" if level.startswith("0") else ""
