"""16-bit parameters with master weights, compared with torch.amp and fused optimizers on a GPU.

Rows: whole steps of a wide network and of GPT-2; the optimizer step alone, compared with torch's
and with a copy of the bytes that it must move; memory.

    python benchmarks/optim.py
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpt import GPT
from internals import drop_step_tables
from measure import Row, store, take_turns
from torch import nn

import mezzo

Step = Callable[[], object]
AMP, O2, COPY, PRODUCTS = "torch.amp", "mezzo O2", "copy", "products"


def gpt_shapes(width: int, layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT's parameters."""
    with torch.device("meta"):
        return [
            tuple(parameter.shape)
            for parameter in GPT(width, layers, heads=width // 64).parameters()
        ]


class Parameters(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.parameter_list = nn.ParameterList(
            nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes
        )

    def draw_gradients(self) -> None:
        for parameter in self.parameter_list:
            parameter.grad = torch.randn_like(parameter) * 1e-3

    @property
    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameter_list)


def torch_optimizer_step(shapes: Sequence[tuple[int, ...]]) -> Step:
    """Return what torch.amp runs after backward: unscale, clip, fused AdamW, update the scale."""
    model = Parameters(shapes)
    model.draw_gradients()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    scaler = _started(torch.amp.GradScaler("cuda", init_scale=1.0))

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def mezzo_optimizer_step(shapes: Sequence[tuple[int, ...]], **options: Any) -> Step:
    """Return the same for mezzo at O2."""
    model = Parameters(shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    mezzo.decorate(model, optimizer, "O2", clip_norm=1.0, **options)
    model.draw_gradients()
    scaler = _started(mezzo.GradScaler("cuda", init_scale=1.0))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def _started(scaler: Any) -> Any:
    scaler.scale(torch.ones((), device="cuda", requires_grad=True))
    return scaler


def copy_of(size: int) -> Step:
    """Return a copy that moves `size` bytes: half of them read, half of them written."""
    source, target = (torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: target.copy_(source)


def optimizer_rows(name: str, shapes: Sequence[tuple[int, ...]], rounds: int) -> list[Row]:
    """Measure the optimizer step with clipping.

    It moves 30 bytes a parameter: the gradient twice, then master, two states and parameter.
    """
    count = Parameters(shapes).count
    rows = []
    for kind, options in {
        "float16, float32 masters": {"dtype": "float16"},
        "bfloat16, split": {"dtype": "bfloat16", "master": "split"},
    }.items():
        contestants = {
            AMP: torch_optimizer_step(shapes),
            O2: mezzo_optimizer_step(shapes, **options),
            COPY: copy_of(30 * count),
        }
        times = take_turns(contestants, calls=10, rounds=rounds, device="cuda")
        rows.append(
            Row(f"AdamW with clipping, {name}, {kind}", times, times[O2] / times[AMP], "×", 1 / 1.7)
        )
        rows.append(
            Row(
                f"the same, against a copy of its bytes, {name}, {kind}",
                times,
                times[O2] / times[COPY],
                "×",
                1 / 0.8,
            )
        )
        contestants.clear()
        _clear()
    return rows


class Wide:
    """Nine layers of 8192 × 8192."""

    def __init__(self, step: Callable[[nn.Module], tuple[torch.optim.Optimizer, Any, Any]]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(9))).cuda()
        self.inputs, self.targets = torch.randn(2, 2048, 8192, device="cuda")
        self.optimizer, self.scaler, self.region = step(self.model)

    def step(self) -> None:
        with self.region:
            loss = nn.functional.mse_loss(self.model(self.inputs), self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Text:
    """GPT-2 of 124M parameters on 8 × 1024 tokens."""

    def __init__(self, step: Callable[[nn.Module], tuple[torch.optim.Optimizer, Any, Any]]) -> None:
        torch.manual_seed(0)
        self.model = GPT().cuda()
        self.tokens, self.targets = torch.randint(50257, (2, 8, 1024), device="cuda")
        self.optimizer, self.scaler, self.region = step(self.model)

    def step(self) -> None:
        with self.region:
            loss = self.model(self.tokens, self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def amp(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> Callable[[nn.Module], tuple[torch.optim.Optimizer, Any, Any]]:
    """Set up torch.amp as documented, with a fused optimizer."""
    return lambda model: (
        optimizer(model.parameters(), fused=True),
        torch.amp.GradScaler("cuda"),
        torch.autocast("cuda", torch.float16),
    )


def o2(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> Callable[[nn.Module], tuple[torch.optim.Optimizer, Any, Any]]:
    """Set up mezzo at O2."""

    def begin(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, Any]:
        built = optimizer(model.parameters())
        mezzo.decorate(model, built, "O2", dtype="float16")
        # The autocast region around the loss stays as in a script written for torch.amp.
        return built, mezzo.GradScaler("cuda"), mezzo.autocast("cuda", torch.float16)

    return begin


def products() -> Step:
    """Return the matrix products of a step of the wide network alone.

    9 in the forward pass, 9 for gradients of weights and 8 for gradients of inputs, on as many
    tensors of the same sizes as in the network.
    """
    weights = [
        layer.weight.detach().half()
        for layer in nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(9))).cuda()
    ]
    gradients = [torch.empty_like(weight) for weight in weights]
    activations = [torch.randn(2048, 8192, device="cuda").half() for _ in range(10)]
    flowing = [torch.randn(2048, 8192, device="cuda").half() for _ in range(2)]

    def run() -> None:
        for layer, weight in enumerate(weights):
            torch.mm(activations[layer], weight.T, out=activations[layer + 1])
        for layer in reversed(range(9)):
            torch.mm(flowing[layer % 2].T, activations[layer], out=gradients[layer])
            if layer:
                torch.mm(flowing[layer % 2], weights[layer], out=flowing[(layer + 1) % 2])
        # Otherwise the values decay to zero over the runs, and products of zeros take less power
        # and time.
        flowing[0].copy_(activations[0])

    return run


def wide_rows(rounds: int) -> list[Row]:
    """Measure a whole step of the wide network."""
    sgd = functools.partial(torch.optim.SGD, lr=1e-4)
    contestants = {
        AMP: Wide(amp(sgd)).step,
        O2: Wide(o2(sgd)).step,
        PRODUCTS: products(),
        COPY: copy_of(12 * 9 * 8192 * 8193),
    }
    times = take_turns(contestants, calls=10, rounds=rounds, device="cuda")
    contestants.clear()
    _clear()
    floor = times[PRODUCTS] + times[COPY]
    return [
        Row(
            "step, 9 × Linear(8192), batch 2048, float16, SGD",
            times,
            times[O2] / times[AMP],
            "×",
            0.84,
        ),
        Row(
            "the same, against its products and 12 bytes a parameter",
            times,
            times[O2] / floor,
            "×",
            1.08,
        ),
    ]


def text_rows(rounds: int) -> list[Row]:
    """Measure a whole step of GPT-2."""
    adamw = functools.partial(torch.optim.AdamW, lr=1e-4)
    contestants = {AMP: Text(amp(adamw)).step, O2: Text(o2(adamw)).step}
    times = take_turns(contestants, calls=10, rounds=rounds, device="cuda")
    contestants.clear()
    _clear()
    return [
        Row("step, GPT-2 124M, 8 × 1024, float16, AdamW", times, times[O2] / times[AMP], "×", 0.88)
    ]


def memory_rows() -> list[Row]:
    """Measure the bytes that a parameter takes with its master weight and Adam's states.

    As the allocator counts them, without and with the tables of the fused step.
    """
    _clear()
    before = torch.cuda.memory_allocated()
    model = Parameters([(4096, 4096)] * 16)
    optimizer = torch.optim.AdamW(model.parameters())
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master="split")
    model.draw_gradients()
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    whole = (torch.cuda.memory_allocated() - before) / model.count
    drop_step_tables(optimizer)
    gc.collect()
    alone = (torch.cuda.memory_allocated() - before) / model.count
    return [
        Row("bytes a parameter, split masters, AdamW", {}, alone, "B", 12.0),
        Row("the same with the step's tables", {}, whole, "B", 12.01),
    ]


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true", help="measure only memory")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.")
        return
    rows = memory_rows()
    if not options.memory:
        rows += wide_rows(options.rounds) + text_rows(options.rounds)
        rows += optimizer_rows("124M", gpt_shapes(768, 12), options.rounds) + optimizer_rows(
            "1B", gpt_shapes(1536, 34), options.rounds
        )
    for row in rows:
        print(row)
    print(f"stored in {store('optim', rows, 'cuda').name}")


if __name__ == "__main__":
    main()
