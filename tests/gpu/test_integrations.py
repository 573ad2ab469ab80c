"""Lightning, Fabric, Accelerate and transformers on a GPU, against a plain loop with mezzo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_state import reset_accelerate_state
from torch import nn
from torch.utils.data import DataLoader

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning"),
]

BATCHES = [torch.randn(8, 16, generator=torch.Generator().manual_seed(n)) for n in range(6)]
LIMIT = 1e-2
"""A norm below that of every gradient."""
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch.cuda()).float().square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train_plain(level: str) -> list[float]:
    model = make_model().cuda()
    optimizer = adam(model)
    mezzo.decorate(model, optimizer, level, dtype="float16")
    scaler = mezzo.GradScaler("cuda")
    losses = []
    for batch in BATCHES:
        loss = loss_of(model, batch)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


@LEVELS
def test_trainer_trains_resumes_and_returns_a_float32_module_on_the_cpu(
    level: str, tmp_path: Path
) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    from mezzo.integrations.lightning import MezzoPrecision

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = make_model(), []

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            loss = loss_of(self.model, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.model)

    def fit(epochs: int, **options: Any) -> tuple[Any, Any]:
        module = Module()
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=epochs,
            plugins=[MezzoPrecision(level, dtype="float16")],
            gradient_clip_val=LIMIT,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(BATCHES, batch_size=None), **options)
        return module, trainer

    whole, _ = fit(2)
    assert whole.losses[:6] == train_plain(level)
    assert whole.model[0].weight.dtype is torch.float32
    assert whole.model[0].weight.device.type == "cpu"
    first, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    second, _ = fit(2, ckpt_path=tmp_path / "first.ckpt")
    assert first.losses + second.losses == whole.losses


@LEVELS
def test_fabric_trains_as_the_plain_loop(level: str) -> None:
    fabric_package = pytest.importorskip("lightning_fabric")
    from mezzo.integrations.fabric import MezzoFabricPrecision

    plugin = MezzoFabricPrecision(level, dtype="float16")
    fabric = fabric_package.Fabric(accelerator="gpu", devices=1, plugins=plugin)
    model = make_model()
    wrapped, optimizer = fabric.setup(model, adam(model))
    losses = []
    for batch in BATCHES:
        loss = loss_of(wrapped, batch)
        losses.append(loss.item())
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=LIMIT, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == train_plain(level)


@pytest.fixture
def accelerate() -> Iterator[Any]:
    package = pytest.importorskip("accelerate")
    reset_accelerate_state()
    yield package
    reset_accelerate_state()


@LEVELS
def test_accelerator_trains_as_the_plain_loop(level: str, accelerate: Any) -> None:
    from mezzo.integrations.accelerate import use

    # Its own float16 precision, with a scaler, is replaced.
    accelerator = use(accelerate.Accelerator(mixed_precision="fp16"), level)
    model = make_model()
    model, optimizer = accelerator.prepare(model, adam(model))
    losses = []
    for batch in BATCHES:
        loss = loss_of(model, batch)
        losses.append(loss.item())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == train_plain(level)
    assert not accelerator.optimizer_step_was_skipped


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": (logits.float() - labels).square().mean(), "logits": logits}


@pytest.mark.usefixtures("accelerate")
@LEVELS
def test_trainer_of_transformers_trains_and_resumes(level: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from mezzo.integrations.transformers import MezzoTrainer

    rows = [{"x": x, "labels": x[:8]} for batch in BATCHES for x in batch]

    def train(folder: str, **options: Any) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            per_device_train_batch_size=8,
            num_train_epochs=1,
            fp16=True,
            save_strategy="steps",
            save_steps=3,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = MezzoTrainer(WithLoss(), arguments, train_dataset=rows, policy=level)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(**options)
        return mezzo.undecorate(trainer.model)

    whole = train("whole")
    resumed = train("resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


# -- captured steps --------------------------------------------------------------------------------

MANY = [torch.randn(8, 16, generator=torch.Generator().manual_seed(n)) for n in range(16)]
"""Enough batches to warm up, to capture and to replay."""
MANY[12] = torch.full((8, 16), torch.inf)


def square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def run_step(step: Any, scheduler: Any, batches: list[Any]) -> list[float]:
    """Train, with a scheduler that advances after each update; return the losses."""
    losses = []
    for batch in batches:
        losses.append(float(step(*batch)))
        if not step.position and not step.scaler.state().consecutive_skips:
            scheduler.step()
    return losses


def train_eagerly(
    level: str, model: nn.Module, loss_fn: Any, batches: list[Any], **options: Any
) -> list[float]:
    """Train by a step alone that is not captured; return its losses."""
    optimizer = adam(model.cuda())
    step = mezzo.TrainStep(
        model,
        loss_fn,
        optimizer,
        level,
        dtype="float16",
        clip_norm=LIMIT,
        capture=False,
        **options,
    )
    return run_step(step, decay(optimizer), batches)


@LEVELS
def test_a_step_of_an_accelerator_is_captured_reports_skips_and_resumes(
    level: str, tmp_path: Path, accelerate: Any
) -> None:
    from mezzo.integrations.accelerate import use

    accelerator = use(accelerate.Accelerator(), level, dtype="float16", clip_norm=LIMIT)
    model = make_model()
    optimizer = adam(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, decay(optimizer))
    step = mezzo.TrainStep(model, square, optimizer, capture=True)

    def train(batches: list[torch.Tensor]) -> list[float]:
        losses, rates = [], [scheduler.get_last_lr()[0]]
        for batch in batches:
            losses.append(float(step(batch)))
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            has_skipped = not bool(batch.isfinite().all())
            assert accelerator.optimizer_step_was_skipped is has_skipped
            assert (rates[-1] == rates[-2]) is has_skipped
        return losses

    losses = train(MANY[:10])
    accelerator.save_state(str(tmp_path))
    losses += train(MANY[10:])
    assert step.captured, repr(step)
    assert str(losses) == str(train_eagerly(level, make_model(), square, [(x,) for x in MANY]))
    # The captured step continues from what is loaded.
    accelerator.load_state(str(tmp_path))
    assert str(train(MANY[10:])) == str(losses[10:])
    assert step.eager_reason is None


@LEVELS
def test_a_step_of_fabric_is_captured(level: str) -> None:
    fabric_package = pytest.importorskip("lightning_fabric")
    from mezzo.integrations.fabric import MezzoFabricPrecision

    plugin = MezzoFabricPrecision(level, dtype="float16", clip_norm=LIMIT)
    fabric = fabric_package.Fabric(accelerator="gpu", devices=1, plugins=plugin)
    model = make_model()
    wrapped, optimizer = fabric.setup(model, adam(model))
    step = mezzo.TrainStep(wrapped, square, optimizer, accumulate=2, capture=True)
    batches = [(x,) for x in [*MANY, *MANY]]
    losses = run_step(step, decay(optimizer.optimizer), batches)
    assert step.captured, repr(step)
    assert step.scaler is plugin.scaler
    assert str(losses) == str(train_eagerly(level, make_model(), square, batches, accumulate=2))


@LEVELS
def test_a_step_in_manual_optimization_is_captured(level: str) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    from mezzo.integrations.lightning import MezzoPrecision

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, capture: bool) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model, self.capture = make_model(), capture
            self.losses: list[float] = []

        def forward(self, batch: torch.Tensor) -> Any:
            return self.model(batch)

        def on_train_start(self) -> None:
            self.step = mezzo.TrainStep(
                self.trainer.strategy.model, square, self.optimizers(), capture=self.capture
            )

        def training_step(self, batch: torch.Tensor, _index: int) -> None:
            with torch.no_grad():
                before = float(square(self(batch)))
            loss = float(self.step(batch))
            self.optimizers().step()
            # In the same autocast region, whose weight cache must not be used here.
            with torch.no_grad():
                self.losses += [before, loss, float(square(self(batch)))]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.model)

    def fit(*, capture: bool) -> Any:
        module = Module(capture)
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            plugins=[MezzoPrecision(level, dtype="float16", clip_norm=LIMIT)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(MANY, batch_size=None))
        assert trainer.global_step == len(MANY)
        return module

    captured, eager = fit(capture=True), fit(capture=False)
    assert captured.step.replays > 0, captured.step.eager_reason
    assert str(captured.losses) == str(eager.losses)


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("accumulate", [1, 2])
@LEVELS
def test_a_trainer_of_transformers_captures_its_steps_and_resumes(
    level: str, accumulate: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from mezzo.integrations.transformers import MezzoTrainer

    rows = [{"x": x, "labels": x.nan_to_num(0, 0, 0)[:8]} for batch in MANY for x in batch]

    class Trainer(MezzoTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.__dict__.setdefault("losses", []).append(float(loss) * accumulate)
            return loss

        def _get_train_sampler(self, *_args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def train(folder: str, **options: Any) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=accumulate,
            num_train_epochs=3,
            max_grad_norm=LIMIT,
            save_strategy="steps",
            save_steps=8,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        model = WithLoss()
        optimizer = adam(model)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=rows,
            optimizers=(optimizer, decay(optimizer)),
            policy=level,
            dtype="float16",
            capture=True,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(**options)
        assert trainer.mezzo_step.captured, repr(trainer.mezzo_step)
        return trainer

    whole = train("whole")
    batches = [(x, x.nan_to_num(0, 0, 0)[:, :8]) for x in MANY * 3]
    expected = train_eagerly(level, WithLoss(), None, batches, accumulate=accumulate)
    assert str(whole.losses) == str(expected)
    resumed = train("resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert str(resumed.losses) == str(whole.losses[8 * accumulate :])
    weights = [mezzo.undecorate(one.model).parameters() for one in (whole, resumed)]
    assert all(map(torch.equal, *weights))
