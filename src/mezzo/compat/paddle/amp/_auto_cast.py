"""`auto_cast`: a region with Paddle's op lists."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from mezzo.autocasting.autocast import everywhere
from mezzo.autocasting.dynamo import constant
from mezzo.autocasting.regions import innermost_region
from mezzo.compat.paddle.amp import _words
from mezzo.policy.registry import registry

P = ParamSpec("P")
R = TypeVar("R")


class auto_cast:  # noqa: N801 - Paddle's spelling
    """Run what is inside with Paddle's op lists: as context manager and as decorator.

    `O1` and `O2` run ops of the white list in 16 bits and of the black list in float32, and every other one in float32 as soon as one input is; the black list
    of `O2` is short, and `use_promote=False` turns its other ops 16-bit. `OD` runs the white list in 16 bits and all else in float32, `O0` everything.

    It differs from Paddle's where that surprises: words are checked here and not at `with`; a CPU computes in 16 bits too; names that reach no op are told in the log;
    lists belong to this thread; a float16 tensor is not recast under bfloat16; a weight is cast once, not at every use.

    >>> import torch
    >>> with auto_cast(custom_white_list={"elementwise_add"}, level="O1", dtype="bfloat16"):
    ...     (torch.ones(2) + torch.ones(2)).dtype
    torch.bfloat16
    """

    def __init__(
        self,
        enable: bool = True,  # noqa: FBT001, FBT002 - Paddle's call shape
        custom_white_list: _words.Names = None,
        custom_black_list: _words.Names = None,
        level: str = "O1",
        dtype: str | torch.dtype = "float16",
        use_promote: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        words = (enable, custom_white_list, custom_black_list, level, dtype, use_promote)
        if is_dynamo_compiling():
            self._region = everywhere(**_decoded(_settled_code(*words)))
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
    unlisted: str | None
    half: frozenset[str]
    full: frozenset[str]


def _settled(enable: bool, white: _words.Names, black: _words.Names, level: str, dtype: str | torch.dtype, use_promote: bool) -> _Settled:  # noqa: FBT001
    level = _words.level_of(level)
    half = _words.half_of(dtype, needed=enable) or "float16"
    if level == "O0":
        return _Settled(False, "O0", half, None, frozenset(), frozenset())
    # Without promotion every op that is not black is 16-bit. Elsewhere Paddle takes the word and does nothing with it.
    unlisted = "half" if level == "O2" and not use_promote else None
    return _Settled(bool(enable), level, half, unlisted, *_words.custom_lists(white, black))


@lru_cache(maxsize=64)
def _region(*settled: Any, generation: int) -> everywhere:  # noqa: ARG001 - an op that is registered meanwhile makes other regions of the same words
    """A region; the same words give the same one, for a program says them at every step."""
    return everywhere(**_words_of(_Settled(*settled)))


def _words_of(settled: _Settled) -> dict[str, Any]:
    lists = {"preset": "paddle", "unlisted": settled.unlisted, "half": settled.half, "full": settled.full} if settled.level != "O0" else {}
    return {"policy": settled.level, "enabled": settled.enabled, "dtype": settled.dtype, **lists}


@constant
def _settled_code(*words: Any) -> str:
    """`_settled` as a constant of compiled code."""
    enabled, level, dtype, unlisted, half, full = _settled(*words)
    return "/".join((str(int(enabled)), level, dtype, unlisted or "", " ".join(sorted(half)), " ".join(sorted(full))))


def _decoded(code: str) -> dict[str, Any]:
    enabled, level, dtype, unlisted, half, full = code.split("/")
    return _words_of(_Settled(enabled == "1", level, dtype, unlisted or None, tuple(half.split()), tuple(full.split())))  # type: ignore[arg-type]


amp_guard = auto_cast
"""The name that `auto_cast` had first."""


def autocast(
    device_type: str,  # noqa: ARG001 - Paddle ignores it too: the region is on every device
    dtype: str | torch.dtype = "float16",
    enabled: bool = True,  # noqa: FBT001, FBT002 - Paddle's call shape
    cache_enabled: bool = True,  # noqa: FBT001, FBT002, ARG001
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
    return "float16" if region is None or not region.enabled else str(region.computes_in).removeprefix("torch.")
