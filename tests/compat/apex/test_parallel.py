"""Apex's wrapper for several processes: torch's, under Apex's arguments."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mezzo import UnsupportedError
from mezzo.compat.apex import amp, parallel


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_is_wrapped_after_initialize_and_trains(group, level):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    model = parallel.DistributedDataParallel(model, delay_allreduce=True, message_size=1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_wrapped_model_is_refused_by_initialize(group):
    with pytest.raises(RuntimeError, match=r"torch\.nn\.parallel\.DistributedDataParallel.*AFTER"):
        amp.initialize(parallel.DistributedDataParallel(nn.Linear(1, 1)), verbosity=0)


def test_sums_instead_of_means_are_refused():
    with pytest.raises(NotImplementedError, match="averages gradients"):
        parallel.DistributedDataParallel(nn.Linear(1, 1), gradient_average=False)


def test_batch_norms_are_made_synchronous():
    model = parallel.convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(2)))
    assert isinstance(model[0], parallel.SyncBatchNorm)


@pytest.mark.parametrize("name", ["LARC", "Reducer"])
def test_what_is_not_there_says_so(name):
    with pytest.raises(UnsupportedError, match=f"{name} is not available here. (Use|Wrap)"):
        getattr(parallel, name)(nn.Linear(1, 1))
