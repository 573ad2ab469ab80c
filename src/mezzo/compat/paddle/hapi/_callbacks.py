"""`paddle.callbacks`: what wants to hear of a model's passes."""

from __future__ import annotations

from typing import Any


class Callback:
    """Hears of what a model does: overwrite what you want to hear. `self.model` is the model; setting its `stop_training` ends training after the epoch."""

    model: Any = None

    def set_model(self, model: Any) -> None:
        """Learn whose passes are heard."""
        self.model = model

    def on_train_begin(self, logs: Any = None) -> None:
        """Training begins."""

    def on_train_end(self, logs: Any = None) -> None:
        """Training has ended."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """An epoch has ended, with evaluation."""

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """A batch begins."""

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """A batch has been trained on."""

    def on_eval_begin(self, logs: Any = None) -> None:
        """Evaluation begins."""

    def on_eval_end(self, logs: Any = None) -> None:
        """Evaluation has ended."""

    def on_predict_begin(self, logs: Any = None) -> None:
        """Prediction begins."""

    def on_predict_end(self, logs: Any = None) -> None:
        """Prediction has ended."""


class Callbacks:
    """All that want to hear of one pass."""

    def __init__(self, callbacks: Any, model: Any) -> None:
        self._several = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        for one in self._several:
            if not isinstance(one, Callback):
                raise TypeError(f"callbacks should be instances of callbacks.Callback, got {type(one).__name__}.")
            one.set_model(model)

    def call(self, event: str, *args: Any) -> None:
        """Tell all of them."""
        for one in self._several:
            getattr(one, event)(*args)
