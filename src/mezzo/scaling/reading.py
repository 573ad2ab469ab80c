"""Schedulers that catch up when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler

from mezzo._errors import ScalerError

_behind: WeakKeyDictionary[LRScheduler, Callable[[], None]] = WeakKeyDictionary()
"""What brings a scheduler up to date. It is kept here, since a scheduler's `state_dict()` is all that its `__dict__` holds."""


def keep_up(scheduler: LRScheduler, catch_up: Callable[[], None]) -> None:
    """Call `catch_up` before a scheduler's rates, state or epoch are read."""
    if scheduler not in _behind:
        kind: Any = type(scheduler)
        scheduler.__class__ = _reader(kind)
    _behind[scheduler] = catch_up


def let_go(scheduler: LRScheduler) -> None:
    """Make it a plain scheduler again."""
    if _behind.pop(scheduler, None) is not None:
        scheduler.__class__ = type(scheduler).plain  # type: ignore[attr-defined]


@contextmanager
def plainly(scheduler: LRScheduler) -> Iterator[None]:
    """Let a scheduler be read and stepped as it is."""
    catch_up = _behind.pop(scheduler, None)
    try:
        yield
    finally:
        if catch_up is not None:
            _behind[scheduler] = catch_up


def _catch_up(scheduler: LRScheduler) -> None:
    if catch_up := _behind.get(scheduler):
        catch_up()


def _new(kind: type[LRScheduler]) -> LRScheduler:
    return kind.__new__(kind)


@cache
def _reader(kind: Any) -> Any:
    class Reader(kind):  # type: ignore[misc]
        plain = kind

        @property
        def last_epoch(self) -> int:
            _catch_up(self)
            try:
                return self.__dict__["last_epoch"]  # type: ignore[no-any-return]
            except KeyError:
                # A ChainedScheduler has none.
                raise AttributeError("last_epoch") from None

        @last_epoch.setter
        def last_epoch(self, epoch: int) -> None:
            self.__dict__["last_epoch"] = epoch

        def get_last_lr(self) -> Any:
            _catch_up(self)
            return super().get_last_lr()

        def state_dict(self) -> Any:
            _catch_up(self)
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            _catch_up(self)
            super().load_state_dict(state_dict)

        def step(self, *args: Any, **kwargs: Any) -> None:
            if self in _behind:
                raise ScalerError(
                    "This scheduler was passed to scaler.step(), which steps it after every good step. Remove scheduler.step(), or do not pass it."
                )
            super().step(*args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Copies and pickles are of the plain kind."""
            _catch_up(self)
            _, _, *state = super().__reduce_ex__(protocol)
            return _new, (kind,), *state

    Reader.__name__, Reader.__qualname__, Reader.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Reader
