"""Train with two processes: run `torchrun --nproc-per-node=2 examples/ddp.py`.

Each process gets its share of the data. DistributedDataParallel averages gradients, and mezzo
scales the loss, skips and updates alike in all processes.
"""

import os

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mezzo


def make_data() -> TensorDataset:
    """Return points in the plane, and whether they are inside a circle."""
    points = torch.randn(2048, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) < 1.2).long())


def main() -> None:
    """Train, and print losses and the accuracy over all processes."""
    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank = distributed.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # O2 casts parameters, so the order is: decorate, wrap, make the step.
    model, optimizer = mezzo.decorate(model, optimizer, "O2", dtype="float16", clip_norm=1.0)
    ddp = DistributedDataParallel(model)
    scaler = mezzo.GradScaler(device.type, init_scale=1024.0)
    step = mezzo.TrainStep(ddp, nn.CrossEntropyLoss(), optimizer, scaler=scaler, accumulate=2)

    data = make_data()
    sampler = DistributedSampler(data)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for points, inside in DataLoader(data, batch_size=64, sampler=sampler):
            step(points, inside)
        step.flush()
        if rank == 0:
            print(f"epoch {epoch}: loss {step.loss:.3f}, loss scale {step.scale:g}")

    points, inside = data[rank :: distributed.get_world_size()]
    right = (mezzo.EvalStep(ddp)(points).argmax(1).cpu() == inside).sum().to(device)
    distributed.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right.item() / len(data):.3f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
