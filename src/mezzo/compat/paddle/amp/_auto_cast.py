"""`paddle.amp.auto_cast`: levels, lists, and what a device supports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from mezzo import hardware
from mezzo._dtypes import dtype_name
from mezzo._errors import nearest
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.regions import innermost_region
from mezzo.compat.paddle._places import device_of
from mezzo.policy.presets import paddle
from mezzo.policy.registry import registry

DTYPES = ("float16", "bfloat16")
LEVELS = ("O0", "OD", "O1", "O2")
_PRODUCTS, _LAYER = {"matmul", "matmul_v2"}, "linear_v2"

Names = Iterable[str] | None


def level_of(level: Any) -> str:
    """A level of `auto_cast`, in either case."""
    if not isinstance(level, str):
        # Paddle's.
        raise AttributeError(
            f"level={level!r} is {type(level).__name__}, not a string. level should be O0, OD, O1"
            " or O2."
        )
    if level.upper() not in LEVELS:
        raise ValueError(f"level should be O0, OD, O1 or O2. It is {level!r}{_zero(level)}.")
    return level.upper()


def half_of(dtype: Any, *, needed: bool) -> str | None:
    """The name of a 16-bit dtype; None for another one that is not needed."""
    if isinstance(dtype, torch.dtype):
        dtype = dtype_name(dtype)
    if not isinstance(dtype, str):
        raise AttributeError(
            f"dtype={dtype!r} is {type(dtype).__name__}. It should be the string 'float16' or"
            " 'bfloat16', or one of torch's dtypes."
        )
    if dtype.lower() in DTYPES:
        return dtype.lower()
    if needed:
        raise ValueError(
            f"If enable amp, dtype should be 'float16' or 'bfloat16'. It is {dtype!r}."
        )
    return None


def custom_lists(white: Names, black: Names) -> tuple[frozenset[str], frozenset[str]]:
    """The ops that custom lists in Paddle's names turn half and full. A name may stand for several ops here; what both lists reach is float32, as there.

    A linear layer is a matmul and an addition in Paddle's guide, and one op in its builds for CUDA:
    who keeps matmul in float32 keeps layers there, too.
    """
    whites, blacks = _names("custom_white_list", white), _names("custom_black_list", black)
    if both := whites & blacks:
        raise ValueError(
            f"Custom white list overlap custom black list: {', '.join(sorted(both))}. An op can be"
            " in one of them."
        )
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
        # In the log and once: Paddle accepts any word, does nothing with those that it does not
        # know, and says so nowhere.
        _said.add(name)
        _LOG.warning("%r in a custom list has no effect: %s.", name, _why_not(name))
    return frozenset(ours for name in names for ours in known.get(name, ()))


_LOG = logging.getLogger("mezzo.compat.paddle")
_said: set[str] = set()
"""Names that were told already."""


def _why_not(name: str) -> str:
    reason = paddle.NAMES.unknown.get(str(name))
    return (
        f"Paddle's {name} {reason}"
        if reason
        else (
            "no op of Paddle that torch has too goes by that"
            f" name.{nearest(str(name), paddle.NAMES.known)}".rstrip("?.")
        )
    )


def _zero(level: str) -> str:
    return ", with a zero in place of the letter O" if level.startswith("0") else ""


P = ParamSpec("P")
R = TypeVar("R")


class auto_cast:  # noqa: N801 - Paddle's spelling
    """Run what is inside with Paddle's op lists: as context manager and as decorator.

    `O1` and `O2` run ops of the white list in 16 bits and of the black list in float32, and every
    other one in float32 as soon as one input is; the black list of `O2` is short, and
    `use_promote=False` turns its other ops 16-bit. `OD` runs the white list in 16 bits and all else
    in float32, `O0` everything.

    It differs from Paddle's where that surprises: words are checked here and not at `with`; a CPU
    computes in 16 bits too; names that reach no op are told in the log; lists belong to this
    thread; a float16 tensor is not recast under bfloat16; a weight is cast once, not at every use.

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
        words = (enable, custom_white_list, custom_black_list, level, dtype, use_promote)
        if is_dynamo_compiling():
            self._region = autocast_all_devices(**_decoded(_settled_code(*words)))
        else:
            self._region = _region(*_settled(*words), generation=registry().generation)

    def __enter__(self) -> Self:
        self._region.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._region.__exit__(*error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, a generator function or a coroutine function: every call runs in the region."""
        return self._region(function)


class _Settled(NamedTuple):
    """What the words of a call come to."""

    enabled: bool
    level: str
    dtype: str
    default_rule: str | None
    half: frozenset[str] | tuple[str, ...]
    full: frozenset[str] | tuple[str, ...]


def _settled(
    enable: bool,
    white: Names,
    black: Names,
    level: str,
    dtype: str | torch.dtype,
    use_promote: bool,
) -> _Settled:
    level = level_of(level)
    half = half_of(dtype, needed=enable) or "float16"
    if level == "O0":
        return _Settled(False, "O0", half, None, frozenset(), frozenset())
    # Without promotion every op that is not black is 16-bit. Elsewhere Paddle takes the word and
    # does nothing with it.
    default_rule = "half" if level == "O2" and not use_promote else None
    return _Settled(bool(enable), level, half, default_rule, *custom_lists(white, black))


@lru_cache(maxsize=64)
# An op that is registered meanwhile makes other regions of the same words.
def _region(*settled: Any, generation: int) -> autocast_all_devices:
    """A region; the same words give the same one, for a program says them at every step."""
    return autocast_all_devices(**_words_of(_Settled(*settled)))


def _words_of(settled: _Settled) -> dict[str, Any]:
    lists = (
        {
            "preset": "paddle",
            "default_rule": settled.default_rule,
            "half": settled.half,
            "full": settled.full,
        }
        if settled.level != "O0"
        else {}
    )
    return {"policy": settled.level, "enabled": settled.enabled, "dtype": settled.dtype, **lists}


@dynamo_constant
def _settled_code(*words: Any) -> str:
    """`_settled` as a constant of compiled code."""
    enabled, level, dtype, default_rule, half, full = _settled(*words)
    return "/".join(
        (
            str(int(enabled)),
            level,
            dtype,
            default_rule or "",
            " ".join(sorted(half)),
            " ".join(sorted(full)),
        )
    )


def _decoded(code: str) -> dict[str, Any]:
    enabled, level, dtype, default_rule, half, full = code.split("/")
    return _words_of(
        _Settled(
            enabled == "1",
            level,
            dtype,
            default_rule or None,
            tuple(half.split()),
            tuple(full.split()),
        )
    )


amp_guard = auto_cast
"""The name that `auto_cast` had first."""


def autocast(
    device_type: str,
    dtype: str | torch.dtype = "float16",
    enabled: bool = True,
    cache_enabled: bool = True,
) -> Any:
    """`auto_cast` in torch's words, as later versions of Paddle have it.

    >>> with autocast("gpu", dtype="bfloat16"):
    ...     get_autocast_dtype()
    'bfloat16'
    """
    return auto_cast(enable=enabled, dtype=dtype)


def is_autocast_enabled() -> bool:
    """Whether this is inside an `auto_cast` that is on.

    >>> with auto_cast(level="O0"):
    ...     is_autocast_enabled()
    False
    """
    region = innermost_region()
    return region is not None and region.enabled


def get_autocast_dtype() -> str:
    """The 16-bit dtype of the `auto_cast` that this is inside of; `float16` outside of any, as in Paddle."""
    region = innermost_region()
    return (
        "float16"
        if region is None or not region.enabled
        else str(region.computes_in).removeprefix("torch.")
    )


def is_float16_supported(device: Any = None) -> bool:
    """Whether `auto_cast` computes in float16 on a device (`"cpu"`, `"gpu:0"`; None is the one that is set).

    Paddle says yes to GPUs from compute capability 5.3 and no to every CPU; here a CPU computes
    float16 too, if slowly: `mezzo.hardware()` tells how fast.

    >>> is_float16_supported("cpu")
    True
    """
    return hardware(device_of(device).type).float16.supported


def is_bfloat16_supported(device: Any = None) -> bool:
    """Whether `auto_cast` computes in bfloat16 on a device. Paddle says yes to GPUs from compute capability 8.0 and to CPUs with AVX-512.

    >>> is_bfloat16_supported("cpu")
    True
    """
    return hardware(device_of(device).type).bfloat16.supported
