"""`trace_overflow` on one rank of several: it calls no collective, so that no rank waits."""

import pytest
import torch
from support.processes import run_ranks
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mezzo

pytestmark = pytest.mark.slow


def traced(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = DistributedDataParallel(model)
    step = mezzo.TrainStep(wrapped, F.mse_loss, optimizer, dtype="float16")
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    step(x, y)
    found = []
    # The others would have to take part in a collective, and are at the barrier.
    if rank == 1:
        synced = nn.Sequential(nn.Linear(8, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))
        targets = [(step, ()), (wrapped, (F.mse_loss,)), (synced, (F.mse_loss,))]
        for target, loss_fn in targets:
            for inputs in (x, x * float("inf")):
                one = mezzo.trace_overflow(target, (inputs, y), *loss_fn)
                found.append(one.direction.value)
    distributed.barrier()
    step(x, y)
    return found, float(step(x, y))


def test_one_rank_traces_alone_and_training_goes_on():
    (_, loss), (found, other) = run_ranks(2, traced, group_seconds=20.0)
    assert found == ["none", "data"] * 3
    assert torch.isfinite(torch.tensor([loss, other])).all()
