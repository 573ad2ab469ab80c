"""Lightning, Fabric, Accelerate and transformers with DistributedDataParallel, two processes."""

import os
import tempfile

import pytest
import torch
from support.processes import run_ranks
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

import mezzo

pytest.importorskip("pytorch_lightning")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

VALUES = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
"""Four batches for each of two ranks."""
VALUES[1, 2] = torch.inf


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, batch):
    return square(model(batch))


def square(output):
    return output.float().square().mean()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def with_trainer(rank):
    import pytorch_lightning as pl

    from mezzo.integrations.lightning import MezzoPrecision

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, _index):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            return adam(self.model)

    plugin, module = MezzoPrecision("O2", dtype="float16"), Module()
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        plugins=[plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=1e-2,
    ).fit(module, DataLoader(VALUES[rank], batch_size=None))
    return module.model, plugin.scaler


def with_fabric(rank):
    from lightning_fabric import Fabric

    from mezzo.integrations.lightning import MezzoFabricPrecision

    plugin = MezzoFabricPrecision("O2", dtype="float16")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=plugin)
    fabric.launch()
    model = make_model()
    wrapped, optimizer = fabric.setup(model, adam(model))
    for batch in VALUES[rank]:
        fabric.backward(loss_of(wrapped, batch))
        fabric.clip_gradients(wrapped, optimizer, max_norm=1e-2, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    plugin.state_dict()
    return mezzo.undecorate(model), plugin.scaler


def with_accelerator(rank):
    from accelerate import Accelerator

    from mezzo.integrations.accelerate import use

    accelerator = use(Accelerator(cpu=True), "O2", dtype="float16")
    model = make_model()
    wrapped, optimizer = accelerator.prepare(model, adam(model))
    for batch in VALUES[rank]:
        accelerator.backward(loss_of(wrapped, batch))
        accelerator.clip_grad_norm_(wrapped.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.scaler.update()
    return mezzo.undecorate(model), accelerator.scaler.scaler


def with_step_in_trainer(rank):
    """Train by a step in manual optimization."""
    import pytorch_lightning as pl

    from mezzo.integrations.lightning import MezzoPrecision

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.model = make_model()

        def forward(self, batch):
            return self.model(batch)

        def on_train_start(self):
            self.step = mezzo.TrainStep(self.trainer.strategy.model, square, self.optimizers())

        def training_step(self, batch, _index):
            self.step(batch)
            self.optimizers().step()

        def configure_optimizers(self):
            return adam(self.model)

    plugin, module = MezzoPrecision("O2", dtype="float16", clip_norm=1e-2), Module()
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        plugins=[plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(module, DataLoader(VALUES[rank], batch_size=None))
    return module.model, plugin.scaler


def with_step_in_fabric(rank):
    from lightning_fabric import Fabric

    from mezzo.integrations.lightning import MezzoFabricPrecision

    plugin = MezzoFabricPrecision("O2", dtype="float16", clip_norm=1e-2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=plugin)
    fabric.launch()
    model = make_model()
    wrapped, optimizer = fabric.setup(model, adam(model))
    step = mezzo.TrainStep(wrapped, square, optimizer)
    for batch in VALUES[rank]:
        step(batch)
    return mezzo.undecorate(model), plugin.scaler


def with_step_in_accelerator(rank):
    from accelerate import Accelerator

    from mezzo.integrations.accelerate import use

    accelerator = use(Accelerator(cpu=True), "O2", dtype="float16", clip_norm=1e-2)
    model = make_model()
    wrapped, optimizer = accelerator.prepare(model, adam(model))
    step = mezzo.TrainStep(wrapped, square, optimizer)
    for batch in VALUES[rank]:
        step(batch)
    return mezzo.undecorate(model), accelerator.scaler.scaler


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def forward(self, x):
        return {"loss": loss_of(self.net, x)}


def with_transformers(_rank):
    """Train by steps that are captured where there is a GPU."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import PrinterCallback, TrainingArguments

    from mezzo.integrations.transformers import MezzoTrainer

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()

    class Trainer(MezzoTrainer):
        def _get_train_sampler(self, *_args):
            return SequentialSampler(self.train_dataset)

    model = WithLoss()
    trainer = Trainer(
        model,
        TrainingArguments(
            tempfile.mkdtemp(),
            use_cpu=True,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            max_grad_norm=1e-2,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
        ),
        # The ranks get batches alternately.
        train_dataset=[{"x": x} for x in VALUES.transpose(0, 1).reshape(-1, 4)],
        optimizers=(adam(model), None),
        policy="O2",
        dtype="float16",
        capture="auto",
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return mezzo.undecorate(model), trainer.accelerator.scaler.scaler


def train_plain(rank):
    model = make_model()
    optimizer = adam(model)
    mezzo.decorate(model, optimizer, "O2", dtype="float16")
    wrapped = nn.parallel.DistributedDataParallel(model)
    scaler = mezzo.GradScaler("cpu")
    for batch in VALUES[rank]:
        scaler.scale(loss_of(wrapped, batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return mezzo.undecorate(model), scaler


RUNS = {
    "trainer": with_trainer,
    "fabric": with_fabric,
    "accelerator": with_accelerator,
    "step in trainer": with_step_in_trainer,
    "step in fabric": with_step_in_fabric,
    "step in accelerator": with_step_in_accelerator,
    "transformers": with_transformers,
}


def run_all(rank):
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    results = {}
    for name, run in {"plain": train_plain, **RUNS}.items():
        model, scaler = run(rank)
        state = scaler.state()
        results[name] = (
            [one.detach().tolist() for one in model.parameters()],
            (state.good_steps, state.skipped_steps, state.scale),
        )
    return results


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, run_all)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_the_plain_loop_and_skip_together(ranks, name):
    expected = ranks[0]["plain"]
    assert expected[1] == (3, 1, 2.0**15)
    assert [one[name] for one in ranks] == [expected, expected]
