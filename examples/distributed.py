"""Train with several processes: replicas (DDP) or shards (FSDP2), on GPUs or on CPUs.

Shows: the order of `decorate`, wrapping and `TrainStep`; loss scale, clipping and skipped steps
that are alike on all ranks; gradient accumulation; checkpoints from which `--resume` continues to
the bit, also after torchrun has restarted the processes.

    torchrun --nproc-per-node=2 examples/distributed.py
    torchrun --nproc-per-node=2 examples/distributed.py --strategy fsdp
    torchrun --nproc-per-node=2 examples/distributed.py --resume

Rank 0 prints the mean loss of each epoch, and the accuracy over the data of all ranks:

    epoch 3: loss 0.069, loss scale 1024
    accuracy 0.972
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mezzo


class Block(nn.Module):
    """A hidden layer with a norm, added to its input: FSDP2 gathers one block at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the output of the layers."""
        return x + self.layers(x)


def make_model(width: int, blocks: int) -> nn.Sequential:
    """Return a classifier of points in the plane."""
    hidden = [Block(width) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(2, width), *hidden, nn.Linear(width, 2))


def make_data() -> TensorDataset:
    """Return points in the plane, and whether they are inside a circle."""
    points = torch.randn(2048, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) < 1.2).long())


def make_step(model: nn.Sequential, options: argparse.Namespace) -> mezzo.TrainStep:
    """Wrap or shard the model, and return its training step."""
    loss_fn, scaler = nn.CrossEntropyLoss(), mezzo.GradScaler(options.device, init_scale=1024.0)
    common = {"accumulate": options.accumulate, "scaler": scaler, "same_shapes": True}
    if options.strategy == "ddp":
        # O2 casts parameters, so the order is: decorate, wrap, make the step.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mezzo.decorate(model, optimizer, "O2", dtype="float16", clip_norm=1.0)
        return mezzo.TrainStep(DistributedDataParallel(model), loss_fn, optimizer, **common)
    # fully_shard replaces parameters, so the order is: shard, make the optimizer, then the step.
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    precision = {"dtype": "float16", "clip_norm": 1.0}
    return mezzo.TrainStep(model, loss_fn, optimizer, "O2", **precision, **common)


def parse_arguments() -> argparse.Namespace:
    """Return the options; `--tiny` is what the tests run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=2, help="batches for each update")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/distributed"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--tiny", action="store_true", help="2 blocks, 3 epochs")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node=2 examples/distributed.py")
    if options.tiny:
        options.blocks, options.epochs = 2, 3
    options.out /= options.strategy
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def train(options: argparse.Namespace) -> None:
    """Train, and print losses and the accuracy over all processes."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    torch.manual_seed(0)  # the same weights on every rank
    model = make_model(options.width, options.blocks).to(options.device)
    step = make_step(model, options)
    evaluate = mezzo.EvalStep(model, capture=False)
    data = make_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)

    start = 0
    if options.resume and (path := mezzo.latest_checkpoint(options.out)):
        start = mezzo.load_checkpoint(path, step=step)["epoch"]
        if rank == 0:
            print(f"continue after epoch {start}")
    for epoch in range(start + 1, options.epochs + 1):
        sampler.set_epoch(epoch)
        losses = [step(points, inside) for points, inside in loader]
        step.flush()  # the last update, if its batches are not complete
        mean = torch.stack(losses).mean()
        distributed.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / ranks:.3f}, loss scale {step.scale:g}")
        # Every rank calls this: replicas become a file, shards a folder to which each rank writes.
        mezzo.save_checkpoint(options.out / f"epoch_{epoch}", step=step, epoch=epoch)

    points, inside = data[rank::ranks]
    right = (evaluate(points).argmax(dim=1).cpu() == inside).sum().to(options.device)
    distributed.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right.item() / len(data):.3f}")
        print(step)


def main() -> None:
    """Start and end the process group around the training."""
    options = parse_arguments()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    train(options)
    # Nothing holds the group any more, so that it waits for its threads: Python aborts if one of
    # gloo's still holds a tensor when the process ends.
    gc.collect()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
