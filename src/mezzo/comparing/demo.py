"""Compare the modes on handwritten digits and write a report: `make demo`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo._errors import MezzoError, UnsupportedError
from mezzo._hardware import hardware
from mezzo.comparing.compare import Progress, compare
from mezzo.comparing.comparison import Comparison
from mezzo.comparing.modes import Mode
from mezzo.comparing.page import write_comparison
from mezzo.comparing.stored import stored_results
from mezzo.comparing.table import mode_table, summary_table
from mezzo.comparing.verdict import judge
from mezzo.comparing.workload import Batch, Preset, Workload
from mezzo.reporting.tables import Table

REPORT = Path("mezzo-demo.html")
_BATCH, _EPOCHS, _ROUNDS = 64, 4, 5
_TEST_PART = 4
"""One of so many digits is tested on and not trained on."""
_CPU_MODES = (Mode.FLOAT32, Mode.TORCH_AMP, Mode.O1, Mode.O2, Mode.CONVERTED)
"""Modes on a CPU. Apex's dtype is float16, in which a convolution takes a CPU a second."""
_COLUMNS = ("mode", "ms", "× float32", "kept for backward", "casts", "loss", "accuracy")
"""Columns of the table on the terminal; the report has all."""

_PIPE_WIDTH = 120
_SUMMARY = ("workload", "machine", "float32, ms", "fastest mode", "ms", "× float32", "memory")


@dataclass(frozen=True)
class Digits:
    """Images of 8 × 8 pixels from 0 to 1, and the digits that they show."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        """Read the 1,797 digits that come with scikit-learn: nothing is downloaded."""
        images, digits = _required("sklearn.datasets").load_digits(return_X_y=True)
        pixels = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        labels = torch.as_tensor(digits, dtype=torch.int64)
        is_test = torch.arange(len(labels)) % _TEST_PART == 0
        return cls(pixels[~is_test], labels[~is_test], pixels[is_test], labels[is_test])

    @property
    def epoch_steps(self) -> int:
        """Whole batches of an epoch."""
        return len(self.train) // _BATCH

    def make_batch(self, number: int) -> Batch:
        """Return the batch of a step: each epoch has its own order, the same in every run."""
        epoch, place = divmod(number, self.epoch_steps)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(epoch))
        chosen = order[place * _BATCH : (place + 1) * _BATCH]
        return self.train[chosen], self.train_labels[chosen]

    def accuracy(self, model: nn.Module) -> float:
        """Return the part of the test digits that a model classifies correctly."""
        device = next(model.parameters()).device
        predicted = model(self.test.to(device)).argmax(1)
        return float((predicted.cpu() == self.test_labels).float().mean())


def digits_workload(epochs: int = _EPOCHS) -> Workload:
    """Return a small convolutional network on scikit-learn's digits as a workload."""
    digits = Digits.load()
    return Workload(
        "digits",
        f"2 convolutions and 2 linear layers, batch {_BATCH}, AdamW, {epochs} epochs",
        Preset.FULL,
        "scikit-learn's digits, 8 × 8",
        make_model=_make_model,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
        make_batch=digits.make_batch,
        loss=_loss,
        samples=_BATCH,
        steps=epochs * digits.epoch_steps,
        epoch_steps=digits.epoch_steps,
        evaluate=digits.accuracy,
    )


def _make_model() -> nn.Sequential:
    """Return a network with an accuracy of 97 % after a few epochs."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main(epochs: int = _EPOCHS, report: Path = REPORT) -> None:
    """Compare, print what was found, and write the report."""
    console = _required("rich.console").Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width: nothing is folded.
        console.width = _PIPE_WIDTH
    stored, facts = stored_results(), hardware()
    console.print("Handwritten digits, one small network, every way to train it\n", style="bold")
    console.print(f"{facts}\n", markup=False, soft_wrap=True)
    with _progress(console) as progress:
        comparison = compare(
            digits_workload(epochs),
            modes=_CPU_MODES if facts.device == "cpu" else None,
            rounds=_ROUNDS,
            progress=progress,
        )
    _print_table(console, _with_columns(mode_table(comparison), _COLUMNS))
    _print_verdict(console, comparison)
    if stored:
        console.print("\nStored results of mezzo compare on other machines, with larger workloads:")
        _print_table(console, _with_columns(summary_table(stored), _SUMMARY))
    path = write_comparison([comparison], report, stored=stored)
    console.print(
        f"\nReport, with charts and all numbers: {path.resolve()}", markup=False, soft_wrap=True
    )


def _print_verdict(console: Any, comparison: Comparison) -> None:
    judged = judge(comparison)
    console.print(judged.sentence, markup=False, style="bold")
    for fact in judged.facts:
        console.print(f"- {fact}", markup=False)
    for mode in comparison.modes:
        if mode.note:
            console.print(f"- {mode.mode}: {mode.note}", markup=False, style="dim")


def _with_columns(table: Table, names: Sequence[str]) -> Table:
    places = [place for place, name in enumerate(table.columns) if name in names]
    rows = tuple(tuple(row[place] for place in places) for row in table.rows)
    return Table(tuple(table.columns[place] for place in places), rows)


def _print_table(console: Any, table: Table) -> None:
    shown = _required("rich.table").Table(box=_required("rich.box").SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(table.columns):
        is_number = any(row[place].is_number for row in table.rows)
        shown.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(_required("rich.markup").escape(cell.text) for cell in row))
    console.print(shown)


@contextmanager
def _progress(console: Any) -> Iterator[Progress | None]:
    """Show what is being measured; nothing if the output is not a terminal."""
    if not console.is_terminal:
        yield None
        return
    with _required("rich.progress").Progress(console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total
        )


def _required(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = {"sklearn": "scikit-learn"}.get(name.partition(".")[0], name.partition(".")[0])
        raise UnsupportedError(
            f"The demo needs {package}, which is not installed. Run: pip install 'mezzo[demo]'"
        ) from error


if __name__ == "__main__":
    try:
        main()
    except MezzoError as error:
        sys.exit(f"mezzo: {error}")
    except KeyboardInterrupt:
        sys.exit("mezzo: interrupted")
