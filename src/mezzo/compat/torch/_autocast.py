"""`torch.autocast` in all its spellings, carried out by mezzo's regions.

torch's own constructor reads and refuses the arguments, so that every error and warning is torch's.
Only what entering and leaving does is mezzo's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch.amp.autocast_mode import autocast as torchs_own
from torch.compiler import is_dynamo_compiling

from mezzo._torch import qualified_name
from mezzo.autocasting import regions
from mezzo.autocasting.autocast import autocast as mezzos
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.regions import Region

P = ParamSpec("P")
R = TypeVar("R")


class StandsFor(type):
    """The class of classes that compilers take for torch's own: they ask whether a class is *equal* to one of torch's, and then put torch's own region in the graph.

    So what is compiled, exported or scripted is exactly what it would be without mezzo; op lists
    are the same in both.
    """

    stands_for: type | None
    _jit_override_qualname: str

    def __new__(
        cls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        stands_for: type | None = None,
    ) -> Any:
        """A class, and which of torch's it stands for. Its subclasses stand for themselves."""
        made = super().__new__(cls, name, bases, namespace)
        made.stands_for = stands_for
        if stands_for is not None and qualified_name is not None:
            # What TorchScript looks a class up by.
            made._jit_override_qualname = qualified_name(stands_for)
        return made

    def __eq__(cls, other: object) -> bool:
        return cls is other or (cls.stands_for is not None and cls.stands_for is other)

    def __hash__(cls) -> int:
        return type.__hash__(cls if cls.stands_for is None else cls.stands_for)

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any
    ) -> None:
        super().__init__(name, bases, namespace)


_KNOWN = ("cpu", "cuda")

_ELSEWHERE = "_entered"
"""What belongs to one process: a copy starts without it."""


# Torch's spelling.
class autocast(mezzos, torchs_own, metaclass=StandsFor, stands_for=torchs_own):  # noqa: N801
    """`torch.autocast`: the same arguments, strictness and attributes.

    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.bfloat16
    >>> autocast(torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: Expected `device_type` of type `str`, got: `<class 'torch.device'>`
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if is_dynamo_compiling():
            # The compiler takes torch's constructor for a type's. What it would refuse is refused
            # outside compiled code.
            mezzos.__init__(self, device_type, dtype, _is_on(device_type, enabled), cache_enabled)
            return
        torchs_own.__init__(self, device_type, dtype, enabled, cache_enabled)
        # Of other devices torch alone knows what they compute in: there the region is switched off,
        # and then told to be as torch says.
        known = device_type in _KNOWN
        mezzos.__init__(
            self, device_type, self.fast_dtype, self._enabled and known, self._cache_enabled
        )
        if not known:
            self._region = Region(self.device, self._enabled, self.fast_dtype, self._cache_enabled)

    def __enter__(self) -> Self:
        if not is_dynamo_compiling() and regions.is_exporting():
            torchs_own.__enter__(self)
            return self
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not is_dynamo_compiling() and regions.is_exporting():
            torchs_own.__exit__(self, kind, error, trace)
        else:
            super().__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function; a generator or a coroutine function too, which torch leaves outside."""
        if not callable(function):
            raise TypeError(
                f"autocast()(func) requires a callable, but got {type(function).__name__}. As a"
                " context manager it is `with torch.autocast(device_type=...):`."
            )
        decorated = super().__call__(function)
        # What torch.jit.script asks of a function, under the very name; written in full it would
        # get this class's own.
        setattr(
            decorated,
            "__script_unsupported",
            "@autocast() decorator is not supported in script mode",
        )
        return decorated

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its attributes, as torch's: those of subclasses too."""
        return _again, (
            type(self),
            {name: value for name, value in self.__dict__.items() if name != _ELSEWHERE},
        )


@dynamo_constant
def _is_on(device: str, enabled: bool) -> bool:
    return enabled and (
        device != "cuda" or not torch.cuda.amp.common.amp_definitely_not_available()
    )


def _again(kind: type[autocast], attributes: dict[str, Any]) -> autocast:
    made = kind.__new__(kind)
    made.__dict__.update(attributes, **{_ELSEWHERE: {}})
    return made


# Stands for torch.cuda.amp.autocast.
class cuda_autocast(autocast, stands_for=torch.cuda.amp.autocast):  # noqa: N801
    """`torch.cuda.amp.autocast`, which torch is giving up."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        warn_of_old("autocast", "cuda")
        super().__init__("cuda", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


# Stands for torch.cpu.amp.autocast.
class cpu_autocast(autocast, stands_for=torch.cpu.amp.autocast):  # noqa: N801
    """`torch.cpu.amp.autocast`, which torch is giving up."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
    ) -> None:
        warn_of_old("autocast", "cpu")
        super().__init__("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


def warn_of_old(name: str, device: str) -> None:
    """Warn as torch does where a name is used that it is giving up."""
    if not is_dynamo_compiling():
        warnings.warn(
            f"`torch.{device}.amp.{name}(args...)` is deprecated. Please use"
            f" `torch.amp.{name}('{device}', args...)` instead.",
            FutureWarning,
            stacklevel=3,
        )
