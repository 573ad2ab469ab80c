"""Train with DistributedDataParallel under torchrun, with a fault in the first attempt.

    torchrun --nproc-per-node=2 --max-restarts=1 faulty_run.py FOLDER FAULT SECONDS

FAULT is "none", "kill" or "sleep": what rank 1 does before its fourth update.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mezzo

UPDATES, FAULTY = 6, 4


def main(folder: Path, fault: str, seconds: float) -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    run(distributed.get_rank(), str(folder), fault if is_first_attempt else "none")
    gc.collect()  # or a thread of gloo may hold a tensor when Python ends, which aborts it
    distributed.destroy_process_group()


def run(rank: int, folder: str, fault: str) -> None:
    """Train from the last complete checkpoint on; save after each update."""
    model, optimizer = decorated()
    ddp, first = DistributedDataParallel(model), 0
    torch.manual_seed(rank)
    if (path := mezzo.latest_checkpoint(folder)) is not None:
        first = mezzo.load_checkpoint(path, ddp, optimizer)["updates"]
    for update in range(first, UPDATES):
        if update == FAULTY and rank == 1:
            fail(fault)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * update + rank))
        ddp(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if update + 1 < UPDATES:
            mezzo.save_checkpoint(f"{folder}/{update + 1}.pt", ddp, optimizer, updates=update + 1)
    if not rank:
        mezzo.save_checkpoint(f"{folder}/end.pt", model, optimizer, first=first)


def decorated() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Dropout(0.25), nn.Linear(12, 3))
    return mezzo.decorate(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), "O2", dtype="bfloat16"
    )


def run_clean_and_resumed(rank: int, clean: str, resumed: str) -> None:
    for folder in (clean, resumed):
        run(rank, folder, "none")


def fail(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sleep":
        time.sleep(120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
