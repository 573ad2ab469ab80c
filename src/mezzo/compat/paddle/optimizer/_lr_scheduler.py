"""Base of the schedulers of `paddle.optimizer.lr`: epochs, state and the optimizers they set."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol


class Scheduled(Protocol):
    """An optimizer whose learning rate a scheduler sets."""

    def _apply_learning_rate(self, value: float) -> None: ...


class LRScheduler:
    """`paddle.optimizer.lr.LRScheduler`: base class; define `get_lr` with `self.last_epoch`.

    Call `step()` after each update, or after each epoch. The optimizers that it was passed to have
    the new rate at once.

    >>> from mezzo.compat import paddle
    >>> scheduler = paddle.optimizer.lr.StepDecay(learning_rate=1.0, step_size=2)
    >>> layer = paddle.nn.Linear(1, 1)
    >>> optimizer = paddle.optimizer.SGD(scheduler, parameters=layer.parameters())
    >>> for _ in range(2):
    ...     scheduler.step()
    >>> optimizer.get_lr()
    0.1
    """

    keys: Sequence[str]

    def __init__(
        self, learning_rate: float = 0.1, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        if not isinstance(learning_rate, float | int):
            raise TypeError(
                f"The type of learning rate must be float, but received {type(learning_rate)}"
            )
        if learning_rate < 0:
            raise ValueError(f"Invalid learning rate: {learning_rate}")
        self.base_lr = float(learning_rate)
        self.last_lr = float(learning_rate)
        self.last_epoch = last_epoch
        self.verbose = verbose
        self.step()

    def __call__(self) -> float:
        """Return the current learning rate."""
        return self.last_lr

    @property
    def last_lr(self) -> float:
        """The current learning rate; setting it sets that of the optimizers too."""
        return self._last_lr

    @last_lr.setter
    def last_lr(self, value: float) -> None:
        self._last_lr = value
        for optimizer in self.__dict__.get("_optimizers", ()):
            optimizer._apply_learning_rate(value)

    def attach(self, optimizer: Scheduled) -> None:
        """Set the learning rate of an optimizer from now on."""
        self.__dict__.setdefault("_optimizers", weakref.WeakSet()).add(optimizer)
        optimizer._apply_learning_rate(self.last_lr)

    def detach(self, optimizer: Scheduled) -> None:
        """Set the learning rate of an optimizer no longer."""
        self.__dict__["_optimizers"].discard(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Go to the next epoch, or to the one that is passed, and compute its learning rate."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        closed_form = None if epoch is None else getattr(self, "_get_closed_form_lr", None)
        self.last_lr = self.get_lr() if closed_form is None else closed_form()
        self._print_rate()

    def get_lr(self) -> float:
        """Return the learning rate of `last_epoch`; subclasses define it."""
        raise NotImplementedError(f"Define get_lr() in {type(self).__name__}.")

    def state_keys(self) -> None:
        """Set `self.keys`, the names of the attributes in the state dict."""
        self.keys = ["last_epoch", "last_lr"]

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that `state_keys` names."""
        self.state_keys()
        return {key: getattr(self, key) for key in self.keys if hasattr(self, key)}

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the attributes that `state_keys` names."""
        self.state_keys()
        for key in self.keys:
            if key not in state_dict:
                raise RuntimeError(
                    "Please check whether state_dict is correct for optimizer. Can't find"
                    f" [ {key} ] in state_dict"
                )
            setattr(self, key, state_dict[key])

    set_dict = set_state_dict

    def _print_rate(self) -> None:
        if self.verbose:
            print(  # noqa: T201 - what verbose=True asks for
                f"Epoch {self.last_epoch}: {type(self).__name__} set learning rate to"
                f" {self.last_lr}."
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy schedules no optimizer.
        return {name: value for name, value in self.__dict__.items() if name != "_optimizers"}
