"""Lightning, Fabric, Accelerate and transformers on a GPU, against a plain loop with mezzo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield package
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
    package.state.GradientState._reset_state()


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
