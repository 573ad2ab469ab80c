"""Passes over data: `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch

from mezzo.compat.paddle.hapi._callbacks import Callbacks
from mezzo.compat.paddle.hapi._data import listed, loader_of
from mezzo.compat.paddle.hapi._progress import Progress
from mezzo.compat.paddle.metric import Metric


class Passes:
    """What a model does with a whole data set, batch by batch."""

    _taken: int
    _metrics: list[Metric]
    stop_training: bool

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Train on a batch."""
        raise NotImplementedError

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """Evaluate a batch."""
        raise NotImplementedError

    def predict_batch(self, inputs: Any) -> list[Any]:
        """Predict from a batch."""
        raise NotImplementedError

    def save(self, path: str, training: bool = True) -> None:  # noqa: FBT001, FBT002
        """Save network and optimizer."""
        raise NotImplementedError

    def fit(
        self,
        train_data: Any = None,
        eval_data: Any = None,
        batch_size: int = 1,
        epochs: int = 1,
        eval_freq: int = 1,
        log_freq: int = 10,
        save_dir: str | None = None,
        save_freq: int = 1,
        verbose: int = 2,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - Paddle's call shape
        shuffle: bool = True,  # noqa: FBT001, FBT002
        num_workers: int = 0,
        callbacks: Any = None,
        accumulate_grad_batches: int = 1,
        num_iters: int | None = None,
    ) -> None:
        """Train for some epochs. Gradients of `accumulate_grad_batches` batches are added up for one update; the last of an epoch may be fewer."""
        if train_data is None:
            raise AssertionError("train_data must be given!")
        loader = loader_of(train_data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, num_workers=num_workers)
        heard, self.stop_training = Callbacks(callbacks, self), False
        steps = _length(loader, num_iters)
        Progress(verbose, log_freq, steps).say("The loss value printed in the log is the current step, and the metric is the average value of previous steps.")
        heard.call("on_train_begin", {})
        for epoch in range(epochs):
            logs = self._epoch(loader, steps, f"Epoch {epoch + 1}/{epochs}", (verbose, log_freq), accumulate_grad_batches, heard, epoch)
            if eval_data is not None and (epoch + 1) % eval_freq == 0:
                logs |= {f"eval_{name}": value for name, value in self.evaluate(eval_data, batch_size, log_freq, verbose, num_workers).items()}
            heard.call("on_epoch_end", epoch, logs)
            if save_dir is not None and (epoch + 1) % save_freq == 0:
                self.save(f"{save_dir}/{epoch}")
            if self.stop_training:
                break
        if save_dir is not None:
            self.save(f"{save_dir}/final")
        heard.call("on_train_end", {})

    def _epoch(
        self, loader: Iterable[Any], steps: int | None, title: str, shown: tuple[int, int], accumulate: int, heard: Callbacks, epoch: int
    ) -> dict[str, Any]:
        progress = Progress(*shown, steps)
        progress.say(title)
        heard.call("on_epoch_begin", epoch, {})
        self._reset()
        logs: dict[str, Any] = {}
        for step, batch in enumerate(islice(loader, steps)):
            heard.call("on_train_batch_begin", step, logs)
            inputs, labels = self._parted(batch)
            logs = self._logs(self.train_batch(inputs, labels, update=(step + 1) % accumulate == 0 or step + 1 == steps))
            progress.show(step + 1, logs)
            heard.call("on_train_batch_end", step, logs)
        return logs

    def evaluate(
        self,
        eval_data: Any,
        batch_size: int = 1,
        log_freq: int = 10,
        verbose: int = 2,
        num_workers: int = 0,
        callbacks: Any = None,
        num_iters: int | None = None,
    ) -> dict[str, Any]:
        """The loss of the last batch, and the metrics over all of them."""
        loader = loader_of(eval_data, batch_size=batch_size, num_workers=num_workers)
        heard, steps = Callbacks(callbacks, self), _length(loader, num_iters)
        progress = Progress(verbose, log_freq, steps)
        progress.say("Eval begin...")
        heard.call("on_eval_begin", {"steps": steps})
        self._reset()
        logs: dict[str, Any] = {}
        samples = 0
        for step, batch in enumerate(islice(loader, steps)):
            inputs, labels = self._parted(batch)
            logs = self._logs(self.eval_batch(inputs, labels))
            samples += len(inputs[0])
            progress.show(step + 1, logs)
        progress.say(f"Eval samples: {samples}")
        heard.call("on_eval_end", logs)
        return logs

    def predict(
        self,
        test_data: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        stack_outputs: bool = False,  # noqa: FBT001, FBT002 - Paddle's call shape
        verbose: int = 1,
        callbacks: Any = None,
    ) -> list[Any]:
        """For each output of the network its arrays, one for each batch, or stacked to one."""
        loader = loader_of(test_data, batch_size=batch_size, num_workers=num_workers)
        heard, steps = Callbacks(callbacks, self), _length(loader, None)
        progress = Progress(verbose, 1, steps)
        progress.say("Predict begin...")
        heard.call("on_predict_begin", {"steps": steps})
        rows = []
        for step, batch in enumerate(loader):
            rows.append(self.predict_batch(self._parted(batch)[0]))
            progress.show(step + 1, {})
        progress.say(f"Predict samples: {sum(len(row[0]) for row in rows)}")
        heard.call("on_predict_end", {})
        outputs: list[Any] = list(map(list, zip(*rows, strict=True)))
        return [torch.cat([torch.as_tensor(one) for one in several]).numpy() for several in outputs] if stack_outputs else outputs

    def _parted(self, batch: Any) -> tuple[list[Any], list[Any]]:
        values = [one for value in listed(batch) for one in listed(value)]
        return values[: self._taken], values[self._taken :]

    def _reset(self) -> None:
        for metric in self._metrics:
            metric.reset()

    def _logs(self, told: Any) -> dict[str, Any]:
        losses = told[0] if isinstance(told, tuple) else told
        logs: dict[str, Any] = {"loss": losses} if losses else {}
        for metric in self._metrics:
            logs |= dict(zip(listed(metric.name()), listed(metric.accumulate()), strict=True))
        return logs


def _length(loader: Any, num_iters: int | None) -> int | None:
    steps = len(loader) if hasattr(loader, "__len__") else None
    return steps if num_iters is None else min(num_iters, steps or num_iters)
