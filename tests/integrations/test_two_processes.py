"""Lightning, Fabric and Accelerate with DistributedDataParallel over two processes."""

import os

import pytest
import torch
from support.processes import run_ranks
from torch import nn
from torch.utils.data import DataLoader

import mezzo

pytest.importorskip("pytorch_lightning")
pytest.importorskip("accelerate")

VALUES = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
"""Four batches for each of two ranks."""
VALUES[1, 2] = torch.inf


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, batch):
    return model(batch).float().square().mean()


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


RUNS = {"trainer": with_trainer, "fabric": with_fabric, "accelerator": with_accelerator}


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
