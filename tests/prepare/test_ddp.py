"""A decorated model in DistributedDataParallel trains as one process over the joint batch."""

import pytest
import torch
from support.processes import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo

MASTERS = ("float32", "split")


def train_wrapped(rank):
    """Train on half of each batch; return weights and gradients by master format."""
    results = {}
    for master in MASTERS:
        model, optimizer = decorated_pair(master)
        parameters = list(model.parameters())
        wrapped = DistributedDataParallel(model)
        train(wrapped, optimizer, slice(8 * rank, 8 * rank + 8))
        for others in (wrapped.module.parameters(), optimizer.param_groups[0]["params"]):
            assert all(one is other for one, other in zip(parameters, others, strict=True))
        gradients = [parameter.grad.clone() for parameter in parameters]
        mezzo.undecorate(model)
        results[master] = {"weights": dict(model.state_dict()), "gradients": gradients}
    return results


def decorated_pair(master):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master, clip_norm=1.0)


def train(model, optimizer, rows, steps=4):
    for step in range(steps):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))[rows]
        loss = (model(x).float() - x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.slow
def test_two_processes_train_as_one_over_the_joint_batch():
    ranks = run_ranks(2, train_wrapped)
    for master in MASTERS:
        one, other = (rank[master] for rank in ranks)
        assert all(
            torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items()
        )
        assert all(
            torch.equal(first, second)
            for first, second in zip(one["gradients"], other["gradients"], strict=True)
        )
        assert_as_one_process(master, one["weights"])


def assert_as_one_process(master, weights):
    model, optimizer = decorated_pair(master)
    start = {name: value.float().clone() for name, value in model.state_dict().items()}
    train(model, optimizer, slice(None))
    mezzo.undecorate(model)
    for name, weight in model.state_dict().items():
        moved = (weight - start[name]).norm()
        assert moved > 0.01
        # bfloat16 gradients of 8 and of 16 rows round differently, by a fraction of the updates.
        assert (weight - weights[name]).norm() < 0.06 * moved, name
