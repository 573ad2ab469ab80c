"""Sizes and memory formats that tensor cores need: `python benchmarks/shapes.py`.

Forward and backward passes of single layers in float16 and bfloat16, each with a size beside a
multiple of 8 and with the multiple, and convolutions channels first and channels last. Needs a CUDA
device and takes half a minute; `--tiny` runs small sizes anywhere and stores nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from measure import Row, store, take_turns
from torch import nn

DTYPES = (torch.float16, torch.bfloat16)
ROUNDS = 9
SECONDS = 0.02
"""Of a round for each contestant."""
MAX_CALLS = 50
WARM_UP = 3
"""Calls before the capture, in which cuDNN and cuBLAS choose kernels."""

Run = Callable[[], object]


@dataclass(frozen=True)
class ShapeRow(Row):
    """A size against the one beside it."""

    dtype: str = ""
    size: str = ""
    """The size that tensor cores like."""
    than: str = ""
    """The size that it replaces."""


@dataclass(frozen=True)
class Linear:
    """A linear layer without a bias."""

    rows: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"linear {self.inputs} → {self.outputs}, {self.rows} rows"

    def make(self, device: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
        """Return the layer and an input."""
        layer = nn.Linear(self.inputs, self.outputs, bias=False, device=device, dtype=dtype)
        return layer, torch.randn(self.rows, self.inputs, device=device, dtype=dtype)


@dataclass(frozen=True)
class Convolution:
    """A convolution of a batch of square images, without a bias."""

    inputs: int
    outputs: int
    side: int
    kernel: int = 3
    stride: int = 1
    batch: int = 64
    channels_last: bool = True

    def __str__(self) -> str:
        what = f"{self.kernel} × {self.kernel} convolution {self.inputs} → {self.outputs}"
        form = "channels_last" if self.channels_last else "channels first"
        return f"{what}, {self.batch} × {self.side}², {form}"

    def make(self, device: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
        """Return the layer and an input, in the memory format."""
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        layer = nn.Conv2d(
            self.inputs,
            self.outputs,
            self.kernel,
            self.stride,
            padding=self.kernel // 2,
            bias=False,
            device=device,
            dtype=dtype,
        )
        shape = (self.batch, self.inputs, self.side, self.side)
        images = torch.randn(shape, device=device, dtype=dtype)
        return layer.to(memory_format=form), images.contiguous(memory_format=form)


Layer = Linear | Convolution
Pair = tuple[Layer, Layer]
"""A size, and the one that it replaces."""


def pairs() -> Iterator[Pair]:
    """Yield the layers to compare."""
    for odd, even in ((1017, 1024), (1020, 1024), (1023, 1024), (1025, 1032), (1016, 1024)):
        yield Linear(8192, even, even), Linear(8192, odd, odd)
    yield Linear(8192, 1024, 1024), Linear(8191, 1024, 1024)
    for odd, even in ((50257, 50264), (50257, 50304), (30522, 30528)):
        yield Linear(8192, 768, even), Linear(8192, 768, odd)
    for channels, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
        yield _both_formats(Convolution(channels, channels, side))
    yield _both_formats(Convolution(256, 64, 56, kernel=1))
    yield Convolution(64, 64, 56), Convolution(60, 60, 56)
    yield _both_formats(Convolution(3, 64, 224, kernel=7, stride=2))
    yield (
        Convolution(4, 64, 224, kernel=7, stride=2),
        Convolution(3, 64, 224, kernel=7, stride=2),
    )


def tiny_pairs() -> Iterator[Pair]:
    """Yield small layers, for tests."""
    yield Linear(16, 8, 16), Linear(16, 8, 15)
    yield _both_formats(Convolution(8, 8, 6, batch=2))


def _both_formats(last: Convolution) -> Pair:
    fields = (last.inputs, last.outputs, last.side, last.kernel, last.stride, last.batch)
    return last, Convolution(*fields, channels_last=False)


def compare(pair: Pair, dtype: torch.dtype, device: str) -> ShapeRow:
    """Measure a pair of layers."""
    runs = {str(layer): _passes(layer, dtype, device) for layer in pair}
    calls = min(_calls(run, device) for run in runs.values())
    times = take_turns(runs, calls=calls, rounds=ROUNDS, device=device)
    size, than = (str(layer) for layer in pair)
    name = str(dtype).removeprefix("torch.")
    ratio = times[size] / times[than]
    return ShapeRow(f"{size} for {than}, {name}", times, ratio, "×", 1.0, name, size, than)


def _passes(layer: Layer, dtype: torch.dtype, device: str) -> Run:
    """Return a function that runs both passes; on CUDA a graph, which the host does not slow."""
    module, inputs = layer.make(device, dtype)
    inputs.requires_grad_(not isinstance(layer, Convolution) or layer.inputs > 4)
    wanted = [*module.parameters(), *([inputs] if inputs.requires_grad else [])]
    grad = torch.randn_like(module(inputs).detach())

    def run() -> object:
        return torch.autograd.grad(module(inputs), wanted, grad)

    return _captured(run) if device == "cuda" else run


def _captured(run: Run) -> Run:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The results stay in the graph's memory as long as the graph.
        run()
    return graph.replay


def _calls(run: Run, device: str) -> int:
    """Return how many calls a round has."""
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return min(max(round(SECONDS / (time.perf_counter() - begin)), 2), MAX_CALLS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small sizes; nothing is stored")
    tiny = parser.parse_args(arguments).tiny
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        print("This benchmark needs a CUDA device, or --tiny.")
        return
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for pair in tiny_pairs() if tiny else pairs():
            rows: list[Row] = [compare(pair, dtype, device) for dtype in DTYPES]
            print(*rows, sep="\n", flush=True)
            if not tiny:
                print(f"stored in {store('shapes', rows, device)}")


if __name__ == "__main__":
    main()
