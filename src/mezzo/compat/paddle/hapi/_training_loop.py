"""The loops of `fit`, `evaluate` and `predict`: data, callbacks, progress."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from mezzo._casting import map_tensors
from mezzo.compat.paddle.metric import Metric


class Shuffled(Sampler[int]):
    """The places of a data set, in another order every time: on the CPU, whatever device is the default, where torch's own sampler fails."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self._count, device="cpu").tolist()

    def __len__(self) -> int:
        return self._count


def loader_of(
    data: Any,
    *,
    batch_size: int,
    shuffle: bool = False,
    drop_last: bool = False,
    num_workers: int = 0,
) -> Iterable[Any]:
    """A loader as it is, and one around a data set."""
    if (
        isinstance(data, DataLoader)
        or not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
        or isinstance(data, list | tuple)
    ):
        if not isinstance(data, Iterable):
            raise TypeError(
                "The data should be a torch Dataset or DataLoader, or batches to go through, got"
                f" {type(data).__name__}."
            )
        return data
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=Shuffled(len(data)) if shuffle else None,
        drop_last=drop_last,
        num_workers=num_workers,
    )


def inputs_taken(forward: Callable[..., Any]) -> int:
    """How many values of a batch go into a network: as many as its forward needs; the rest are labels. Others are said: `Model(network, inputs=[...])`.

    >>> inputs_taken(torch.nn.Sequential().forward)
    1
    """
    needed = [
        parameter
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.default is inspect.Parameter.empty
    ]
    return (
        sum(
            one.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for one in needed
        )
        or 1
    )


def listed(values: Any) -> list[Any]:
    """One value, or several, as a list."""
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def placed(values: Any, device: torch.device) -> list[Any]:
    """Values of a batch on a device, arrays as tensors."""
    return [
        map_tensors(
            one if isinstance(one, torch.Tensor) else torch.as_tensor(one),
            lambda tensor: tensor.to(device),
        )
        for one in listed(values)
    ]


_WIDTH = 30
_UNITS = {"s": 1.0, "ms": 1e-3}
_BAR, _LINES = 1, 2
"""`verbose`: one line that is written over, or a line every few steps."""


class Progress:
    """One pass over data, on standard output."""

    def __init__(self, verbose: int, log_freq: int, steps: int | None) -> None:
        self._verbose, self._log_freq, self._steps = verbose, log_freq, steps
        self._begun = time.perf_counter()

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._verbose:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def show(self, step: int, logs: Mapping[str, Any]) -> None:
        """How far the pass is, counted from 1; the last step always shows."""
        last = step == self._steps
        if self._verbose == _BAR:
            sys.stdout.write(f"\r{self._line(step, logs)}" + ("\n" if last else ""))
            sys.stdout.flush()
        elif self._verbose == _LINES and (last or step % self._log_freq == 0):
            self.say(self._line(step, logs))

    def _line(self, step: int, logs: Mapping[str, Any]) -> str:
        total = "" if self._steps is None else f"/{self._steps}"
        bar = f" [{self._bar(step, self._steps)}]" if self._verbose == _BAR and self._steps else ""
        spent = (time.perf_counter() - self._begun) / step
        unit, size = next(
            ((unit, size) for unit, size in _UNITS.items() if spent >= size), ("us", 1e-6)
        )
        return " - ".join(
            [
                f"step {step:>{len(str(self._steps or 0))}}{total}{bar}",
                *(f"{name}: {_shown(value)}" for name, value in logs.items()),
                f"{spent / size:.0f}{unit}/step",
            ]
        )

    @staticmethod
    def _bar(step: int, steps: int) -> str:
        done = _WIDTH * step // steps
        return ("=" * done + ">" * (done < _WIDTH)).ljust(_WIDTH, ".")


def _shown(value: Any) -> str:
    return " ".join(f"{one:.4f}" for one in (value if isinstance(value, list | tuple) else [value]))


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
        self._several = (
            []
            if callbacks is None
            else list(callbacks)
            if isinstance(callbacks, list | tuple)
            else [callbacks]
        )
        for one in self._several:
            if not isinstance(one, Callback):
                raise TypeError(
                    "callbacks should be instances of callbacks.Callback, got"
                    f" {type(one).__name__}."
                )
            one.set_model(model)

    def call(self, event: str, *args: Any) -> None:
        """Tell all of them."""
        for one in self._several:
            getattr(one, event)(*args)


class Passes:
    """What a model does with a whole data set, batch by batch."""

    _taken: int
    _metrics: list[Metric]
    stop_training: bool

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """Train on a batch."""
        raise NotImplementedError

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """Evaluate a batch."""
        raise NotImplementedError

    def predict_batch(self, inputs: Any) -> list[Any]:
        """Predict from a batch."""
        raise NotImplementedError

    def save(self, path: str, training: bool = True) -> None:
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
        drop_last: bool = False,
        shuffle: bool = True,
        num_workers: int = 0,
        callbacks: Any = None,
        accumulate_grad_batches: int = 1,
        num_iters: int | None = None,
    ) -> None:
        """Train for some epochs. Gradients of `accumulate_grad_batches` batches are added up for one update; the last of an epoch may be fewer."""
        if train_data is None:
            raise AssertionError("train_data must be given!")
        loader = loader_of(
            train_data,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=num_workers,
        )
        heard, self.stop_training = Callbacks(callbacks, self), False
        steps = _length(loader, num_iters)
        Progress(verbose, log_freq, steps).say(
            "The loss value printed in the log is the current step, and the metric is the average"
            " value of previous steps."
        )
        heard.call("on_train_begin", {})
        for epoch in range(epochs):
            logs = self._epoch(
                loader,
                steps,
                f"Epoch {epoch + 1}/{epochs}",
                (verbose, log_freq),
                accumulate_grad_batches,
                heard,
                epoch,
            )
            if eval_data is not None and (epoch + 1) % eval_freq == 0:
                logs |= {
                    f"eval_{name}": value
                    for name, value in self.evaluate(
                        eval_data, batch_size, log_freq, verbose, num_workers
                    ).items()
                }
            heard.call("on_epoch_end", epoch, logs)
            if save_dir is not None and (epoch + 1) % save_freq == 0:
                self.save(f"{save_dir}/{epoch}")
            if self.stop_training:
                break
        if save_dir is not None:
            self.save(f"{save_dir}/final")
        heard.call("on_train_end", {})

    def _epoch(
        self,
        loader: Iterable[Any],
        steps: int | None,
        title: str,
        shown: tuple[int, int],
        accumulate: int,
        heard: Callbacks,
        epoch: int,
    ) -> dict[str, Any]:
        progress = Progress(*shown, steps)
        progress.say(title)
        heard.call("on_epoch_begin", epoch, {})
        self._reset()
        logs: dict[str, Any] = {}
        for step, batch in enumerate(islice(loader, steps)):
            heard.call("on_train_batch_begin", step, logs)
            inputs, labels = self._parted(batch)
            logs = self._logs(
                self.train_batch(
                    inputs, labels, update=(step + 1) % accumulate == 0 or step + 1 == steps
                )
            )
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
        stack_outputs: bool = False,
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
        return (
            [torch.cat([torch.as_tensor(one) for one in several]).numpy() for several in outputs]
            if stack_outputs
            else outputs
        )

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
