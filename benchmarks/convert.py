"""Cost and benefit of `mezzo.convert`: `python benchmarks/convert.py [cpu|cuda]`.

On a CPU: the time to plan graphs of 1,000, 3,000 and 10,000 nodes. On a GPU: inference of the
converted models against torch.autocast, eager and compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from internals import planner
from measure import Row, store, take_turns
from torch import nn

import mezzo

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.zoo import Block, ResNet50

SIZES = (1_000, 3_000, 10_000)
"""Approximate numbers of nodes of the planned graphs."""
DTYPES = (torch.float16, torch.bfloat16)


class Layers(nn.Module):
    """Residual layers with a norm, a product, ops in no list, and a softmax in every third layer.

    So the planner has precisions to choose: the softmax stays float32.
    """

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, (norm, linear) in enumerate(zip(self.norms, self.linears, strict=True)):
            y = torch.tanh(linear(norm(x)))
            y = (y * torch.sigmoid(y)).view(-1, 4, y.shape[-1]).transpose(0, 1)
            y = F.softmax(y, -1) if layer % 3 == 0 else F.relu(y) + 1
            x = x + y.transpose(0, 1).reshape(x.shape)
        return x


class Encoder(nn.Module):
    """The layers of BERT-base, written out so that no fast path of torch skips autocast."""

    def __init__(
        self, width: int = 768, layers: int = 12, heads: int = 12, vocabulary: int = 30522
    ) -> None:
        super().__init__()
        self.tokens, self.places, self.norm = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(512, width),
            nn.LayerNorm(width),
        )
        self.layers = nn.ModuleList(
            Block(width, heads, causal=False, before=False) for _ in range(layers)
        )
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(
            self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        )
        for layer in self.layers:
            x = layer(x)
        return x, torch.tanh(self.pooler(x[:, 0]))


def planning() -> list[Row]:
    """Measure the time to plan graphs of several sizes."""
    rows, per_node = [], []
    for size in SIZES:
        # A layer has about 15.6 nodes, including the placeholders of its weights.
        model = Layers(round(size / 15.6)).eval()
        nodes, plan = planner(model, (torch.randn(8, 16),), torch.bfloat16)
        seconds = sorted(plan() for _ in range(3))[1]
        per_node.append(seconds / nodes)
        rows.append(Row(f"plan {nodes:,} nodes", {"plan": seconds * 1e6}, seconds, "s", 20.0))
    rows.append(
        Row(
            "time a node, the largest against the smallest",
            {},
            per_node[-1] / per_node[0],
            "×",
            2.0,
        )
    )
    return rows


def inference() -> list[Row]:
    """Compare converted models with the same models under torch.autocast, eager and compiled."""
    models: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "ResNet-50, batch 64": (ResNet50(64, 1000), (torch.randn(64, 3, 224, 224),)),
        "BERT-base-like, 32 × 128": (Encoder(), (torch.randint(0, 30522, (32, 128)),)),
    }
    rows = []
    for name, (built, inputs) in models.items():
        model, args = built.eval().cuda(), tuple(tensor.cuda() for tensor in inputs)
        for dtype, other in (DTYPES, DTYPES[::-1]):
            converted = mezzo.convert(model, args, dtype=dtype)
            for way, wrap in (("eager", lambda model: model), ("compiled", torch.compile)):
                contestants = {
                    "torch.autocast": _under_autocast(wrap(model), args, dtype),
                    "converted": _called(wrap(converted), args),
                }
                # torch 2.11 serves code from its cache that was compiled under an autocast of
                # another dtype.
                with torch._functorch.config.patch(enable_autograd_cache=False):
                    computed = {dtype for run in contestants.values() for dtype in _dtypes(run())}
                if other in computed:
                    raise SystemExit(f"{name}, {way}: expected {dtype}, but {other} was computed")
                times = take_turns(contestants, calls=5, rounds=31, device="cuda")
                ratio = times["converted"] / times["torch.autocast"]
                rows.append(
                    Row(
                        f"{name}, {way}, {str(dtype).removeprefix('torch.')}",
                        times,
                        ratio,
                        "×",
                        1.0,
                    )
                )
            torch.compiler.reset()
    return rows


def _dtypes(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> set[torch.dtype]:
    tensors = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return {tensor.dtype for tensor in tensors}


def _under_autocast(
    model: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype
) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad(), torch.autocast("cuda", dtype=dtype):
            return model(*args)

    return run


def _called(converted: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return converted(*args)

    return run


def main() -> None:
    """Measure, print and store the rows for the device."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    rows = inference() if device == "cuda" else planning()
    for row in rows:
        print(row)
    print(f"stored in {store('convert', rows, device)}")


if __name__ == "__main__":
    main()
