"""The loops of `fit`, `evaluate` and `predict`: callbacks, data loading, progress."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader

from mezzo._casting import map_tensors
from mezzo.compat.paddle._tensor import as_tensor
from mezzo.compat.paddle.io import DataLoader
from mezzo.compat.paddle.metric import Metric


class Callback:
    """`paddle.callbacks.Callback`: base class of callbacks; override the methods you need.

    `self.model` is the model. Setting its `stop_training` ends training after the epoch.
    """

    model: Any = None

    def set_model(self, model: Any) -> None:
        """Set the model; called before the first event."""
        self.model = model

    def on_train_begin(self, logs: Any = None) -> None:
        """Run before training."""

    def on_train_end(self, logs: Any = None) -> None:
        """Run after training."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Run before an epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Run after an epoch and its evaluation."""

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Run before a training batch."""

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Run after a training batch."""

    def on_eval_begin(self, logs: Any = None) -> None:
        """Run before an evaluation."""

    def on_eval_end(self, logs: Any = None) -> None:
        """Run after an evaluation."""

    def on_predict_begin(self, logs: Any = None) -> None:
        """Run before a prediction."""

    def on_predict_end(self, logs: Any = None) -> None:
        """Run after a prediction."""


class LRScheduler(Callback):
    """`paddle.callbacks.LRScheduler`: step the optimizer's scheduler; `fit` adds one by itself."""

    def __init__(self, by_step: bool = True, by_epoch: bool = False) -> None:
        if by_step and by_epoch:
            raise ValueError("by_step option is mutually exclusive with by_epoch")
        self.by_step, self.by_epoch = by_step, by_epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Step the scheduler after each epoch."""
        if self.by_epoch:
            self._step()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Step the scheduler after each batch."""
        if self.by_step:
            self._step()

    def _step(self) -> None:
        scheduler = getattr(self.model._optimizer, "_scheduler", None)
        if scheduler is not None:
            scheduler.step()


class TrainingLoop:
    """Base of `Model`: loops over data sets, on top of the methods for one batch."""

    _num_inputs: int
    """How many values of a batch are inputs of the network; the others are labels."""
    _metrics: list[Metric]
    stop_training: bool

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """Train on one batch."""
        raise NotImplementedError

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """Evaluate one batch."""
        raise NotImplementedError

    def predict_batch(self, inputs: Any) -> list[Any]:
        """Predict one batch."""
        raise NotImplementedError

    def save(self, path: str, training: bool = True) -> None:
        """Save the network and the optimizer."""
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
        """Train for some epochs.

        Gradients of `accumulate_grad_batches` batches are added up for one update; the last update
        of an epoch may have fewer.
        """
        if train_data is None:
            raise AssertionError("train_data must be given!")
        loader = make_loader(
            train_data,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=num_workers,
        )
        callbacks = to_list(callbacks)
        if not any(isinstance(callback, LRScheduler) for callback in callbacks):
            callbacks.append(LRScheduler())
        callback_list, self.stop_training = _CallbackList(callbacks, self), False
        steps = _num_steps(loader, num_iters)
        Progress(verbose, log_freq, steps).write_line(
            "The loss value printed in the log is the current step, and the metric is the average"
            " value of previous steps."
        )
        callback_list.call("on_train_begin", {})
        for epoch in range(epochs):
            progress = Progress(verbose, log_freq, steps)
            progress.write_line(f"Epoch {epoch + 1}/{epochs}")
            callback_list.call("on_epoch_begin", epoch, {})
            logs = self._train_epoch(
                loader, steps, accumulate_grad_batches, progress, callback_list
            )
            if eval_data is not None and (epoch + 1) % eval_freq == 0:
                results = self.evaluate(eval_data, batch_size, log_freq, verbose, num_workers)
                logs |= {f"eval_{name}": value for name, value in results.items()}
            callback_list.call("on_epoch_end", epoch, logs)
            if save_dir is not None and (epoch + 1) % save_freq == 0:
                self.save(f"{save_dir}/{epoch}")
            if self.stop_training:
                break
        if save_dir is not None:
            self.save(f"{save_dir}/final")
        callback_list.call("on_train_end", {})

    def _train_epoch(
        self,
        loader: Iterable[Any],
        steps: int | None,
        accumulate: int,
        progress: Progress,
        callback_list: _CallbackList,
    ) -> dict[str, Any]:
        self._reset_metrics()
        logs: dict[str, Any] = {}
        for step, batch in enumerate(islice(loader, steps)):
            callback_list.call("on_train_batch_begin", step, logs)
            inputs, labels = self._split_batch(batch)
            update = (step + 1) % accumulate == 0 or step + 1 == steps
            logs = self._make_logs(self.train_batch(inputs, labels, update=update))
            progress.show_step(step + 1, logs)
            callback_list.call("on_train_batch_end", step, logs)
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
        """Return the loss of the last batch, and the metrics over all batches."""
        loader = make_loader(eval_data, batch_size=batch_size, num_workers=num_workers)
        callback_list, steps = _CallbackList(callbacks, self), _num_steps(loader, num_iters)
        progress = Progress(verbose, log_freq, steps)
        progress.write_line("Eval begin...")
        callback_list.call("on_eval_begin", {"steps": steps})
        self._reset_metrics()
        logs: dict[str, Any] = {}
        samples = 0
        for step, batch in enumerate(islice(loader, steps)):
            inputs, labels = self._split_batch(batch)
            logs = self._make_logs(self.eval_batch(inputs, labels))
            samples += len(inputs[0])
            progress.show_step(step + 1, logs)
        progress.write_line(f"Eval samples: {samples}")
        callback_list.call("on_eval_end", logs)
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
        """Return the arrays of each output of the network: one per batch, or stacked to one."""
        loader = make_loader(test_data, batch_size=batch_size, num_workers=num_workers)
        callback_list, steps = _CallbackList(callbacks, self), _num_steps(loader, None)
        progress = Progress(verbose, 1, steps)
        progress.write_line("Predict begin...")
        callback_list.call("on_predict_begin", {"steps": steps})
        batches = []
        for step, batch in enumerate(loader):
            batches.append(self.predict_batch(self._split_batch(batch)[0]))
            progress.show_step(step + 1, {})
        progress.write_line(f"Predict samples: {sum(len(outputs[0]) for outputs in batches)}")
        callback_list.call("on_predict_end", {})
        per_output: list[Any] = list(map(list, zip(*batches, strict=True)))
        if not stack_outputs:
            return per_output
        return [
            torch.cat([torch.as_tensor(array) for array in arrays]).numpy() for arrays in per_output
        ]

    def _split_batch(self, batch: Any) -> tuple[list[Any], list[Any]]:
        """Split a batch into inputs and labels."""
        values = [value for entry in to_list(batch) for value in to_list(entry)]
        return values[: self._num_inputs], values[self._num_inputs :]

    def _reset_metrics(self) -> None:
        for metric in self._metrics:
            metric.reset()

    def _make_logs(self, result: Any) -> dict[str, Any]:
        """Return the log entries for a result of `train_batch` or `eval_batch`."""
        losses = result[0] if isinstance(result, tuple) else result
        logs: dict[str, Any] = {"loss": losses} if losses else {}
        for metric in self._metrics:
            logs |= dict(zip(to_list(metric.name()), to_list(metric.accumulate()), strict=True))
        return logs


class _CallbackList:
    """All callbacks of one `fit`, `evaluate` or `predict`."""

    def __init__(self, callbacks: Any, model: Any) -> None:
        self._callbacks = to_list(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    "callbacks should be instances of callbacks.Callback, got"
                    f" {type(callback).__name__}."
                )
            callback.set_model(model)

    def call(self, event: str, *args: Any) -> None:
        """Call the method of an event on every callback."""
        for callback in self._callbacks:
            getattr(callback, event)(*args)


# -- data ------------------------------------------------------------------------------------------


def make_loader(
    data: Any,
    *,
    batch_size: int,
    shuffle: bool = False,
    drop_last: bool = False,
    num_workers: int = 0,
) -> Iterable[Any]:
    """Return a loader for a data set; a loader or a list of batches is returned unchanged."""
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not is_dataset or isinstance(data, TorchLoader | list | tuple):
        if not isinstance(data, Iterable):
            raise TypeError(
                "The data should be a paddle.io.Dataset or DataLoader, or an iterable of batches,"
                f" got {type(data).__name__}."
            )
        return data
    # On the CPU: each batch is moved to the network's device, which may not be the default place.
    return DataLoader(
        data,
        places="cpu",
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
    )


def count_inputs(forward: Callable[..., Any]) -> int:
    """Return how many values of a batch are inputs: the parameters of forward without a default.

    The other values are labels. `Model(network, inputs=[...])` overrides this.

    >>> count_inputs(torch.nn.Sequential().forward)
    1
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        parameter
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.default is inspect.Parameter.empty and parameter.kind in positional
    ]
    return len(required) or 1


def to_list(values: Any) -> list[Any]:
    """Return a list of one value or several; None is an empty list."""
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def to_device(values: Any, device: torch.device) -> list[Any]:
    """Return values of a batch as tensors on a device; also arrays and numbers."""
    return [
        map_tensors(
            value if isinstance(value, torch.Tensor) else torch.as_tensor(value),
            lambda tensor: as_tensor(tensor.to(device)),
        )
        for value in to_list(values)
    ]


def _num_steps(loader: Any, num_iters: int | None) -> int | None:
    steps = len(loader) if hasattr(loader, "__len__") else None
    return steps if num_iters is None else min(num_iters, steps or num_iters)


# -- progress --------------------------------------------------------------------------------------

_BAR_WIDTH = 30
_TIME_UNITS = {"s": 1.0, "ms": 1e-3}
_BAR, _LINES = 1, 2
"""Values of `verbose`: one line that is overwritten, or one line every `log_freq` steps."""


class Progress:
    """Progress of one pass over data, written to standard output as Paddle does."""

    def __init__(self, verbose: int, log_freq: int, steps: int | None) -> None:
        self._verbose, self._log_freq, self._steps = verbose, log_freq, steps
        self._start = time.perf_counter()

    def write_line(self, text: str) -> None:
        """Write a line, unless `verbose=0`."""
        if self._verbose:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def show_step(self, step: int, logs: Mapping[str, Any]) -> None:
        """Show a step, counted from 1; the last step is always shown."""
        is_last = step == self._steps
        if self._verbose == _BAR:
            sys.stdout.write(f"\r{self._format_step(step, logs)}" + ("\n" if is_last else ""))
            sys.stdout.flush()
        elif self._verbose == _LINES and (is_last or step % self._log_freq == 0):
            self.write_line(self._format_step(step, logs))

    def _format_step(self, step: int, logs: Mapping[str, Any]) -> str:
        total = "" if self._steps is None else f"/{self._steps}"
        bar = ""
        if self._verbose == _BAR and self._steps:
            bar = f" [{_format_bar(step, self._steps)}]"
        seconds = (time.perf_counter() - self._start) / step
        unit, size = next(
            ((unit, size) for unit, size in _TIME_UNITS.items() if seconds >= size), ("us", 1e-6)
        )
        return " - ".join(
            [
                f"step {step:>{len(str(self._steps or 0))}}{total}{bar}",
                *(f"{name}: {_format_value(value)}" for name, value in logs.items()),
                f"{seconds / size:.0f}{unit}/step",
            ]
        )


def _format_bar(step: int, steps: int) -> str:
    done = _BAR_WIDTH * step // steps
    return ("=" * done + ">" * (done < _BAR_WIDTH)).ljust(_BAR_WIDTH, ".")


def _format_value(value: Any) -> str:
    return " ".join(f"{number:.4f}" for number in to_list(value))
