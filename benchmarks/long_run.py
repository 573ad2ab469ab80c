"""A long training: a small GPT-2 on the sources of Python's standard library, byte by byte.

Trains in float32 and with mezzo at O1 and O2 on the same batches, and stores the curves:
`python benchmarks/long_run.py --steps 5000`.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt import GPT
from measure import results_path
from torch import Tensor, nn

import mezzo

POINTS = 100
"""Points of a stored curve, each the mean of as many steps as come between two."""
CONTEXT, BATCH = 256, 32
BYTES = 30_000_000
RATE = 1e-3

RUNS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "O1 float16": {"policy": "O1", "dtype": "float16"},
    "O2 float16": {"policy": "O2", "dtype": "float16"},
    "O2 bfloat16": {"policy": "O2", "dtype": "bfloat16", "master": "split"},
}
"""Arguments of `mezzo.TrainStep` by name; None trains with plain torch."""


def read_sources() -> Tensor:
    """Return the sources of the standard library as bytes, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "test", "tests"} & set(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= BYTES:
            break
    return torch.frombuffer(text[:BYTES], dtype=torch.uint8)


class Text:
    """Windows of a text, drawn at random, on a device."""

    def __init__(self, text: Tensor, device: str, batches: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.text = text.to(device)
        starts = torch.randint(len(text) - CONTEXT - 1, (batches, BATCH, 1), generator=random)
        self.starts = starts.to(device)
        self.window = torch.arange(CONTEXT + 1, device=device)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = self.text[self.starts[index] + self.window].long()
        return drawn[:, :-1], drawn[:, 1:]


def identity(loss: Tensor) -> Tensor:
    """Return the loss, which the model computes."""
    return loss


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return a cosine schedule with warm-up."""
    warm_up = max(steps // 50, 1)
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warm_up)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warm_up, RATE / 10)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [warm_up])


def plain_step(model: nn.Module, optimizer: Any, scheduler: Any) -> Callable[[Any], Tensor]:
    """Return a training step in float32."""

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return step


def train(
    name: str, data: Text, unseen: Text, steps: int, width: int, layers: int
) -> tuple[list[float], float, int]:
    """Train once; return the losses, the loss on unseen text, and the number of skipped updates."""
    torch.manual_seed(0)
    model = GPT(width, layers, width // 64, 256, CONTEXT).to(data.text.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    scheduler, options = schedule(optimizer, steps), RUNS[name]
    if options is None:
        step, skips = plain_step(model, optimizer, scheduler), 0
        losses = [step(data[index]) for index in range(steps)]
    else:
        captured = mezzo.TrainStep(model, identity, optimizer, scheduler=scheduler, **options)
        losses = [captured(data[index]) for index in range(steps)]
        skips = 0 if captured.scaler is None else captured.scaler.state().skipped_steps
        mezzo.undecorate(model)
    with torch.no_grad():
        validation = torch.stack([model(*unseen[index]) for index in range(len(unseen.starts))])
    return torch.stack(losses).tolist(), float(validation.mean()), skips


def thinned(losses: list[float]) -> list[float]:
    """Return means of equal parts of a curve.

    >>> thinned([1.0, 3.0])
    [1.0, 3.0]
    """
    size = max(len(losses) // POINTS, 1)
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    return [round(sum(part) / len(part), 4) for part in parts]


def main() -> None:
    """Train in all precisions, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = read_sources()
    cut = len(text) * 19 // 20
    data = Text(text[:cut], device, options.steps, seed=1)
    unseen = Text(text[cut:], device, 8, seed=2)
    record: dict[str, Any] = {
        "machine": mezzo.hardware(device).name,
        "torch": torch.__version__,
        "steps": options.steps,
        "tokens a step": BATCH * CONTEXT,
        "runs": {},
    }
    for name in options.only:
        begin = time.perf_counter()
        losses, validation, skips = train(
            name, data, unseen, options.steps, options.width, options.layers
        )
        seconds = round(time.perf_counter() - begin, 1)
        record["runs"][name] = {
            "validation": round(validation, 4),
            "skipped": skips,
            "seconds": seconds,
            "curve": thinned(losses),
        }
        print(
            f"{name:12} last {thinned(losses)[-1]:.4f}  unseen text {validation:.4f}"
            f"  skipped {skips}  {seconds} s",
            flush=True,
        )
    path = results_path("long_run", device)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"stored in {path.name}")


if __name__ == "__main__":
    main()
