"""Train sharded models captured and eagerly, as one of two ranks whose collectives only copy.

NCCL does not run two ranks on one GPU, and FSDP2 gathers nothing with one rank. With torch's fake
process group all its streams, events and buffers are used; only what other ranks would send is this
rank's own. Prints a JSON object with the outcome of each case.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import mezzo
from mezzo.parallel.process_groups import HostGroup

CALLS = 18
RANKS = 4
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "resharded": {"shard": {"reshard_after_forward": True}},
    "not resharded": {"shard": {"reshard_after_forward": False}},
    "resharded to two ranks": {"shard": {"reshard_after_forward": 2}},
    "hybrid": {"hybrid": True},
    "accumulated": {"accumulate": 2},
    "float16": {"dtype": "float16"},
    "host read in forward": {"read": "forward"},
    "host read in backward": {"read": "backward"},
    "host read in backward, resharded": {
        "read": "backward",
        "shard": {"reshard_after_forward": True},
    },
}


class HostRead(nn.Module):
    """Reads from the device, in forward or in backward, or not at all."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.total = where, 0.0

    def _read(self, value: torch.Tensor) -> None:
        self.total += float(value.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self._read(x)
        elif self.where == "backward" and x.requires_grad:
            x.register_hook(self._read)
        return x.tanh()


def train(
    *,
    captured: bool,
    shard: dict[str, Any] | None = None,
    hybrid: bool = False,
    read: str = "",
    dtype: str = "bfloat16",
    **args: Any,
) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.LayerNorm(128), HostRead(read), nn.Linear(128, 16)]
    model, options = nn.Sequential(*layers).cuda(), dict(shard or {})
    if hybrid:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cuda", (2, RANKS // 2), mesh_dim_names=names)
    for part in (model[0], model[3], model):
        fully_shard(part, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if dtype == "float16":
        args["scaler"] = mezzo.GradScaler("cuda", init_scale=256.0, dynamic=False)
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        optimizer,
        "O2",
        dtype=dtype,
        clip_norm=1.0,
        capture="auto" if captured else False,
        **args,
    )
    losses = []
    for index in range(CALLS):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(index)).cuda()
        losses.append(step(x, x[:, :16]))
    return torch.stack(losses).tolist(), step


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    (losses, step), (eager, _) = train(captured=True, **case), train(captured=False, **case)
    return {"equal": losses == eager, "replays": step.replays, "reason": step.eager_reason}


def main() -> None:
    torch.cuda.set_device(0)
    distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    distributed.get_backend_config = lambda _: "cuda:nccl"
    HostGroup.size = property(lambda _: 1)  # type: ignore[assignment, method-assign]
    warnings.simplefilter("ignore")
    outcomes = {}
    for name, case in CASES.items():
        try:
            outcomes[name] = outcome(case)
        except Exception:  # noqa: BLE001
            outcomes[name] = {"error": traceback.format_exc()}
    sys.stdout.write(json.dumps(outcomes) + "\n")
    sys.stdout.flush()
    # Not an orderly exit: the group is fake.
    os._exit(0)


if __name__ == "__main__":
    main()
