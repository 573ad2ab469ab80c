"""What converting costs, and what it gains: `python benchmarks/convert.py [cpu|cuda]`.

On a CPU: the time to plan graphs of 1,000, 3,000 and 10,000 nodes. On a GPU: inference of the
converted models against torch.autocast, eager and compiled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, store, take_turns
from torch import nn
from torch.utils._pytree import tree_leaves

import mezzo
from mezzo._casting import map_tensors
from mezzo._dtypes import HALF_DTYPES
from mezzo.conversion.assignment import weight_nodes
from mezzo.conversion.export import export
from mezzo.conversion.nodes import copied_graph
from mezzo.conversion.normalize import normalize
from mezzo.conversion.options import ConvertOptions
from mezzo.conversion.subgraphs import plan_subgraphs

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from support.zoo import Block, ResNet50

SIZES = (1_000, 3_000, 10_000)
"""Nodes of the graphs that are planned."""


class Layers(nn.Module):
    """Residual layers that give the cut something to decide: a norm, a product, a few ops in no list, and one that stays float32 now and then."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, (norm, linear) in enumerate(zip(self.norms, self.linears, strict=True)):
            y = torch.tanh(linear(norm(x)))
            y = (y * torch.sigmoid(y)).view(-1, 4, y.shape[-1]).transpose(0, 1)
            y = F.softmax(y, -1) if place % 3 == 0 else F.relu(y) + 1
            x = x + y.transpose(0, 1).reshape(x.shape)
        return x


class Encoder(nn.Module):
    """The layers of BERT-base, written out, so that no fast path of torch's skips autocast."""

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
    """Time to plan, once per size: a graph is planned once."""
    said = ConvertOptions(mezzo.Policy("O1", "bfloat16"), torch.bfloat16, "cpu")
    rows, per_node = [], []
    for size in SIZES:
        # About 15.6 nodes a layer, the placeholders of its weights included.
        model = Layers(round(size / 15.6)).eval()
        exported = export(model, (torch.randn(8, 16),), {}, None)
        nodes, modules = len(exported.graph.nodes), dict(model.named_modules())
        samples = []
        for _ in range(3):
            module = copied_graph(exported.graph_module)
            begin = time.perf_counter()
            normalize(module, said.dtype, said.device)
            plan_subgraphs(module, weight_nodes(exported, module, said.dtype), said, modules)
            samples.append(time.perf_counter() - begin)
        seconds = sorted(samples)[1]
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
    """Converted models against the same models under torch.autocast, eager and compiled."""
    models: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
        "ResNet-50, batch 64": (ResNet50(64, 1000), (torch.randn(64, 3, 224, 224),)),
        "BERT-base-like, 32 × 128": (Encoder(), (torch.randint(0, 30522, (32, 128)),)),
    }
    rows = []
    for name, (made, inputs) in models.items():
        model, args = made.eval().cuda(), map_tensors(inputs, lambda one: one.cuda())
        for dtype, other in (HALF_DTYPES, HALF_DTYPES[::-1]):
            converted = mezzo.convert(model, args, dtype=dtype)
            for way, wrap in (("eager", lambda one: one), ("compiled", torch.compile)):
                contestants = {
                    "torch.autocast": _under_autocast(wrap(model), args, dtype),
                    "converted": _called(wrap(converted), args),
                }
                # torch 2.11 finds in its cache what was compiled under an autocast of another
                # dtype.
                with torch._functorch.config.patch(enable_autograd_cache=False):
                    given = {
                        found.dtype for run in contestants.values() for found in tree_leaves(run())
                    }
                if other in given:
                    raise SystemExit(f"{name}, {way}: asked for {dtype}, and {other} was computed")
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
    """Measure what the device can show, print and store it."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    rows = inference() if device == "cuda" else planning()
    for row in rows:
        print(row)
    print(f"stored in {store('convert', rows, device)}")


if __name__ == "__main__":
    main()
