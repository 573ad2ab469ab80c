"""`paddle.amp.auto_cast`: levels and op lists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from mezzo._dtypes import dtype_name
from mezzo._errors import nearest
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.regions import innermost_region
from mezzo.compat.paddle._places import chosen_device
from mezzo.compat.paddle.amp._support import warn_if_slow
from mezzo.policy.presets import paddle
from mezzo.policy.registry import registry

P = ParamSpec("P")
R = TypeVar("R")

Names = Iterable[str] | None
"""Op names in a custom list."""

DTYPES = ("float16", "bfloat16")
_LEVELS = ("O0", "OD", "O1", "O2")
_MATMULS, _LINEAR = {"matmul", "matmul_v2"}, "linear_v2"
"""Paddle's names of matrix products, and of a linear layer that is one op."""

_LOG = logging.getLogger("mezzo.compat.paddle")
_logged_names: set[str] = set()
"""Names without effect that are in the log already."""


class auto_cast:
    """`paddle.amp.auto_cast`: run ops by Paddle's op lists; a context manager and a decorator.

    `O1` and `O2` run ops of the white list in 16 bits, ops of the black list in float32, and any
    other op in float32 if one of its inputs is. The black list of `O2` is short, and with
    `use_promote=False` its other ops run in 16 bits. `OD` runs the white list in 16 bits and
    everything else in float32. `O0` runs everything in float32.

    Differences from Paddle:

    - arguments are checked by the constructor, not when the region is entered;
    - a CPU computes in 16 bits too;
    - names in a custom list that match no op are logged as a warning;
    - op lists belong to the thread, not to the process;
    - a float16 tensor is not recast under bfloat16;
    - a weight is cast once, not at every use.

    >>> import torch
    >>> with auto_cast(custom_white_list={"elementwise_add"}, level="O1", dtype="bfloat16"):
    ...     (torch.ones(2) + torch.ones(2)).dtype
    torch.bfloat16
    """

    def __init__(
        self,
        enable: bool = True,
        custom_white_list: Names = None,
        custom_black_list: Names = None,
        level: str = "O1",
        dtype: str | torch.dtype = "float16",
        use_promote: bool = True,
    ) -> None:
        args = (enable, custom_white_list, custom_black_list, level, dtype, use_promote)
        if is_dynamo_compiling():
            self._region = autocast_all_devices(**_decode_kwargs(_encode_args(*args)))
        else:
            self._region = _cached_region(
                *_resolve(*args), generation=registry().generation, place=chosen_device()
            )

    def __enter__(self) -> Self:
        self._region.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._region.__exit__(*error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Run every call of a function, generator function or coroutine function in the region."""
        return self._region(function)


amp_guard = auto_cast
"""The older name of `auto_cast`."""


def autocast(
    device_type: str,
    dtype: str | torch.dtype = "float16",
    enabled: bool = True,
    cache_enabled: bool = True,
) -> Any:
    """Return an `auto_cast` for the arguments of `torch.autocast`, as later versions of Paddle do.

    >>> with autocast("gpu", dtype="bfloat16"):
    ...     get_autocast_dtype()
    'bfloat16'
    """
    return auto_cast(enable=enabled, dtype=dtype)


def is_autocast_enabled() -> bool:
    """Return whether the innermost `auto_cast` around this call is enabled.

    >>> with auto_cast(level="O0"):
    ...     is_autocast_enabled()
    False
    """
    region = innermost_region()
    return region is not None and region.enabled


def get_autocast_dtype() -> str:
    """Return the 16-bit dtype of the innermost `auto_cast`; outside of any, `float16` as Paddle."""
    region = innermost_region()
    return (
        "float16"
        if region is None or not region.enabled
        else str(region.computes_in).removeprefix("torch.")
    )


# -- from Paddle's arguments to mezzo's ------------------------------------------------------------


def custom_lists(white: Names, black: Names) -> tuple[frozenset[str], frozenset[str]]:
    """Translate custom lists to the ops that run in 16 bits and those that run in float32.

    One Paddle name may stand for several ops; an op that both lists match is float32, as in Paddle.
    A linear layer is a matmul and an addition in Paddle's guide but one op in its CUDA builds:
    matmul in the black list keeps linear layers in float32 too.
    """
    whites = check_names("custom_white_list", white)
    blacks = check_names("custom_black_list", black)
    if both := whites & blacks:
        raise ValueError(
            f"Custom white list overlap custom black list: {', '.join(sorted(both))}. An op can be"
            " in one of them."
        )
    if blacks & _MATMULS and _LINEAR not in whites:
        blacks |= {_LINEAR}
    half, full = _to_mezzo_names(whites), _to_mezzo_names(blacks)
    return half - full, full


class _RegionArgs(NamedTuple):
    """Checked arguments of a region, in mezzo's names."""

    enabled: bool
    level: str
    dtype: str
    default_rule: str | None
    half: frozenset[str] | tuple[str, ...]
    full: frozenset[str] | tuple[str, ...]


def _resolve(
    enable: bool,
    white: Names,
    black: Names,
    level: str,
    dtype: str | torch.dtype,
    use_promote: bool,
) -> _RegionArgs:
    _check_enable(enable)
    level = _parse_level(level)
    half_dtype = _parse_half_dtype(dtype, required=enable) or "float16"
    if level == "O0":
        return _RegionArgs(False, "O0", half_dtype, None, frozenset(), frozenset())
    # Without promotion every op outside the black list is 16-bit. At other levels Paddle accepts
    # the argument without effect.
    default_rule = "half" if level == "O2" and not use_promote else None
    return _RegionArgs(bool(enable), level, half_dtype, default_rule, *custom_lists(white, black))


# Programs construct the same region at every step. The registry's generation is part of the key:
# the same names can mean other ops after `mezzo.register_op`. So is the place, which may be slow.
@lru_cache(maxsize=64)
def _cached_region(*args: Any, generation: int, place: torch.device | None) -> autocast_all_devices:
    """Return the region for `_RegionArgs`; equal arguments share one."""
    region_args = _RegionArgs(*args)
    if region_args.enabled:
        warn_if_slow(region_args.dtype)
    return autocast_all_devices(**_autocast_kwargs(region_args))


def _autocast_kwargs(args: _RegionArgs) -> dict[str, Any]:
    lists = (
        {
            "preset": "paddle",
            "default_rule": args.default_rule,
            "half": args.half,
            "full": args.full,
            "on_unsupported": "ignore",  # `warn_if_slow` has warned
        }
        if args.level != "O0"
        else {}
    )
    return {"policy": args.level, "enabled": args.enabled, "dtype": args.dtype, **lists}


@dynamo_constant
def _encode_args(*args: Any) -> str:
    """Resolve arguments to a string, which dynamo can hold as a constant of compiled code."""
    enabled, level, dtype, default_rule, half, full = _resolve(*args)
    if enabled:
        warn_if_slow(dtype)
    lists = (" ".join(sorted(half)), " ".join(sorted(full)))
    return "/".join((str(int(enabled)), level, dtype, default_rule or "", *lists))


def _decode_kwargs(code: str) -> dict[str, Any]:
    enabled, level, dtype, default_rule, half, full = code.split("/")
    return _autocast_kwargs(
        _RegionArgs(
            enabled == "1",
            level,
            dtype,
            default_rule or None,
            tuple(half.split()),
            tuple(full.split()),
        )
    )


def _check_enable(enable: Any) -> None:
    if callable(enable):
        raise TypeError(
            f"auto_cast got the function {getattr(enable, '__name__', enable)!r} as 'enable'. As a"
            " decorator it has brackets: @paddle.amp.auto_cast()."
        )
    if isinstance(enable, str | list | tuple | dict):
        raise TypeError(
            f"enable={enable!r} is {type(enable).__name__}. It should be True or False; a level is"
            " level='O1'."
        )


def _parse_level(level: Any) -> str:
    if not isinstance(level, str):
        # Paddle raises AttributeError, from `level.upper()`.
        raise AttributeError(
            f"level={level!r} is {type(level).__name__}, not a string. level should be O0, OD, O1"
            " or O2."
        )
    if level.upper() not in _LEVELS:
        hint = ", with a zero in place of the letter O" if level.startswith("0") else ""
        raise ValueError(f"level should be O0, OD, O1 or O2. It is {level!r}{hint}.")
    return level.upper()


def _parse_half_dtype(dtype: Any, *, required: bool) -> str | None:
    """Return the name of a 16-bit dtype; None for any other dtype unless one is required."""
    if isinstance(dtype, torch.dtype):
        dtype = dtype_name(dtype)
    if not isinstance(dtype, str):
        raise AttributeError(
            f"dtype={dtype!r} is {type(dtype).__name__}. It should be the string 'float16' or"
            " 'bfloat16', or a torch.dtype."
        )
    if dtype.lower() in DTYPES:
        return dtype.lower()
    if required:
        raise ValueError(
            f"If enable amp, dtype should be 'float16' or 'bfloat16'. It is {dtype!r}."
        )
    return None


def check_names(argument: str, names: Names) -> frozenset[str]:
    """Return the op names of a custom list as a set."""
    if isinstance(names, str):
        # Paddle would take each character for a name.
        raise TypeError(
            f"{argument}={names!r} should be a set of op names: {argument}={{{names!r}}}."
        )
    if names is None:
        return frozenset()
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument}={names!r} should be a set of op names, such as {{'conv2d'}}.")
    return frozenset(names)


def _to_mezzo_names(names: frozenset[str]) -> frozenset[str]:
    known = paddle.NAMES.known
    for name in names - known.keys() - _logged_names:
        # A log entry and not an error: Paddle accepts any name and ignores unknown ones silently.
        _logged_names.add(name)
        _LOG.warning("%r in a custom list has no effect: %s.", name, _no_effect_reason(name))
    return frozenset(op for name in names for op in known.get(name, ()))


def _no_effect_reason(name: str) -> str:
    if reason := paddle.NAMES.unknown.get(str(name)):
        return f"Paddle's {name} {reason}"
    hint = nearest(str(name), paddle.NAMES.known)
    return f"no op that Paddle and torch share has that name.{hint}".rstrip("?.")
