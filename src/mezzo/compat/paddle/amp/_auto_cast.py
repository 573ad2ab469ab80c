"""`auto_cast`: a region with Paddle's op lists."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, Self, TypeVar

import torch

from mezzo.compat.paddle.amp import _words
from mezzo.eager.everywhere import everywhere
from mezzo.eager.region import innermost_region
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
        level = _words.level_of(level)
        half = _words.half_of(dtype, needed=enable)
        if level == "O0":
            self._region = everywhere("O0", enabled=False)
        else:
            lists = _words.custom_lists(custom_white_list, custom_black_list)
            # Without promotion every op that is not black is 16-bit. Elsewhere Paddle takes the word and does nothing with it.
            unlisted = "half" if level == "O2" and not use_promote else None
            self._region = _region(level, half or "float16", unlisted, *lists, enabled=bool(enable), generation=registry().generation)

    def __enter__(self) -> Self:
        self._region.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._region.__exit__(*error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, a generator function or a coroutine function: every call runs in the region."""
        return self._region(function)


@lru_cache(maxsize=256)
def _region(level: str, dtype: str, unlisted: str | None, half: frozenset[str], full: frozenset[str], *, enabled: bool, generation: int) -> everywhere:  # noqa: ARG001
    """A region of these words; the same words give the same one, for a program says them at every step. An op that is registered meanwhile makes others of them."""
    return everywhere(level, enabled=enabled, preset="paddle", dtype=dtype, unlisted=unlisted, half=half, full=full)


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
