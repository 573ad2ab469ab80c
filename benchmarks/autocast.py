"""Cost of autocast, compared with torch.autocast and a minimal function mode.

Run it with `python benchmarks/autocast.py [cpu|cuda]`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, store, take_turns
from torch import nn
from torch.overrides import TorchFunctionMode

import mezzo


class Transformer(nn.Module):
    """Four blocks of a transformer encoder, written out so that no fast path skips autocast."""

    def __init__(self, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "first": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "second": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        for block in self.blocks:
            qkv = (
                block["qkv"](block["first"](x))
                .view(batch, length, 3, self.heads, width // self.heads)
                .permute(2, 0, 3, 1, 4)
            )
            mixed = (
                F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(batch, length, width)
            )
            x = x + block["out"](mixed)
            x = x + block["down"](F.gelu(block["up"](block["second"](x))))
        return x


class Block(nn.Module):
    """A residual block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet18() -> nn.Module:
    """Return the layers of ResNet-18."""
    widths = [
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    ]
    stem = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    return nn.Sequential(
        *stem,
        *(Block(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    )


class BareMode(TorchFunctionMode):
    """The minimal function mode that casts the inputs of one function."""

    def __init__(self, function: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.function, self.dtype = function, dtype

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.function:
            return func(*[value.to(self.dtype) for value in args])
        return func(*args, **(kwargs or {}))


def models(device: str) -> list[Row]:
    """Compare the default policy with torch.autocast on whole models."""
    rows = []
    for name, model, shape, calls in (
        ("transformer, 4 blocks, forward", Transformer(), (2, 64, 256), 1),
        ("ResNet-18 layers, forward", resnet18(), (2, 3, 64, 64), 1),
    ):
        module, x = model.to(device), torch.randn(shape, device=device)

        def under(region: Any, module: nn.Module = module, x: torch.Tensor = x) -> Any:
            def run() -> None:
                with region(device, dtype=torch.bfloat16):
                    module(x)

            return run

        times = take_turns(
            {"torch.autocast": under(torch.autocast), "mezzo.autocast": under(mezzo.autocast)},
            calls=calls,
            device=device,
            rounds=61,
        )
        rows.append(Row(name, times, times["mezzo.autocast"] / times["torch.autocast"], "×", 1.03))
    return rows


def regions(device: str) -> list[Row]:
    """Measure creating, entering and exiting an autocast region."""

    def enter_and_exit(region: Any) -> Any:
        def run() -> None:
            with region(device, dtype=torch.bfloat16):
                pass

        return run

    times = take_turns(
        {
            "torch.autocast": enter_and_exit(torch.autocast),
            "mezzo.autocast": enter_and_exit(mezzo.autocast),
        },
        calls=500,
        rounds=121,
    )
    return [Row("make, enter and leave a region", times, times["mezzo.autocast"], "µs", 6.0)]


def within(region: Any, run: Any) -> Any:
    """Call a function many times inside one region, to measure the op and not the region."""

    def batch() -> None:
        with region:
            for _ in range(200):
                run()

    return batch


def custom_policy(device: str) -> list[Row]:
    """Measure ops under a custom policy: one that it does not name, and two that it casts."""
    x, h = torch.randn(2, 2, device=device), torch.randn(2, 2, device=device, dtype=torch.bfloat16)
    custom = {"dtype": torch.bfloat16, "half": {"add"}, "full": {"mm"}}
    relu = take_turns(
        {
            "plain": within(torch.no_grad(), lambda: torch.relu(x)),
            "custom policy": within(mezzo.autocast(device, **custom), lambda: torch.relu(x)),
        },
        calls=5,
    )
    relu = {name: time / 200 for name, time in relu.items()}
    rows = [
        Row(
            "an op that the policy does not name",
            relu,
            relu["custom policy"] - relu["plain"],
            "µs",
            2.0,
        )
    ]
    for name, function, value, dtype in (
        ("add overridden to half, two casts", torch.add, x, torch.bfloat16),
        ("mm overridden to full, two casts", torch.mm, h, torch.float32),
    ):

        def run(function: Any = function, value: torch.Tensor = value) -> None:
            function(value, value)

        times = take_turns(
            {
                "bare mode": within(BareMode(function, dtype), run),
                "custom policy": within(mezzo.autocast(device, **custom), run),
            },
            calls=5,
            rounds=121,
        )
        times = {name: time / 200 for name, time in times.items()}
        rows.append(Row(name, times, times["custom policy"] / times["bare mode"], "×", 1.3))
    return rows


class EmptyMode(TorchFunctionMode):
    """A mode that does nothing, to measure dynamo's check for active modes."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compiled(device: str) -> list[Row]:
    """Compare compiled code under a custom policy with the same casts written by hand."""
    # Large enough that the computation dominates: dynamo's checks before each call take the host
    # microseconds.
    size = 4096 if device == "cuda" else 512
    x, weight = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    policy = {"dtype": torch.bfloat16, "half": {"add", "linear"}}

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, w) + x)

    def by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x.to(torch.bfloat16), w.to(torch.bfloat16))
        return torch.tanh(hidden + x.to(torch.bfloat16))

    def region_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with mezzo.autocast(device, **policy):
            return plain(x, w)

    def many(function: Any, around: Any) -> Any:
        function = torch.compile(function, fullgraph=True)

        def run() -> None:
            with around:
                for _ in range(20):
                    function(x, weight)

        return run

    inside = take_turns(
        {
            "casts by hand": many(by_hand, nullcontext()),
            "region inside": many(region_inside, nullcontext()),
        },
        calls=3,
        device=device,
    )
    around = take_turns(
        {
            "casts by hand, silent mode around": many(by_hand, EmptyMode()),
            "region around": many(plain, mezzo.autocast(device, **policy)),
        },
        calls=3,
        device=device,
    )
    inside, around = (
        {name: time / 20 for name, time in times.items()} for times in (inside, around)
    )
    return [
        Row(
            "compiled, the region inside",
            inside,
            inside["region inside"] / inside["casts by hand"],
            "×",
            1.05,
        ),
        Row(
            "compiled, the region around, against any mode",
            around,
            around["region around"] / around["casts by hand, silent mode around"],
            "×",
            1.05,
        ),
    ]


def main() -> None:
    """Measure, print and store."""
    device = sys.argv[1] if len(sys.argv) > 1 else mezzo.hardware().device
    rows = [row for part in (regions, custom_policy, models, compiled) for row in part(device)]
    for row in rows:
        print(row)
    print(f"stored in {store('autocast', rows, device).name}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
