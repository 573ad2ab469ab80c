"""16-bit parameters with exact masters, against torch.amp with its scaler and its fused optimizers, in the same run on a GPU.

Whole steps of a wide network and of GPT-2; the optimizer phase alone, against torch's and against a
copy of the bytes that it must move; memory.

    python benchmarks/optim.py
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpt import GPT
from measure import Row, store, take_turns
from torch import nn

import mezzo
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.fused_step import FusedBinding

Step = Callable[[], object]
AMP, O2, COPY, PRODUCTS = "torch.amp", "mezzo O2", "copy", "products"


def gpt_shapes(width: int, layers: int) -> list[tuple[int, ...]]:
    """The shapes of a GPT's parameters."""
    with torch.device("meta"):
        return [
            tuple(parameter.shape)
            for parameter in GPT(width, layers, heads=width // 64).parameters()
        ]


class Parameters(nn.Module):
    """Parameters of given shapes, with gradients."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.held = nn.ParameterList(
            nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes
        )

    def draw_gradients(self) -> None:
        for parameter in self.held:
            parameter.grad = torch.randn_like(parameter) * 1e-3

    @property
    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.held)


def phase_of_torch(shapes: Sequence[tuple[int, ...]]) -> Step:
    """What torch.amp does after backward: unscale, clip, fused AdamW, update the scale."""
    model = Parameters(shapes)
    model.draw_gradients()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    scaler = _begun(torch.amp.GradScaler("cuda", init_scale=1.0))

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def phase_of_mezzo(shapes: Sequence[tuple[int, ...]], **words: Any) -> Step:
    """The same at O2."""
    model = Parameters(shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    mezzo.decorate(model, optimizer, "O2", clip_norm=1.0, **words)
    model.draw_gradients()
    scaler = _begun(mezzo.GradScaler("cuda", init_scale=1.0))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def _begun(scaler: Any) -> Any:
    scaler.scale(torch.ones((), device="cuda", requires_grad=True))
    return scaler


def copy_of(size: int) -> Step:
    """A copy that moves so many bytes: half of them read, half of them written."""
    source, target = (torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: target.copy_(source)


def phase_rows(name: str, shapes: Sequence[tuple[int, ...]], rounds: int) -> list[Row]:
    """The optimizer phase with clipping. 30 bytes a parameter: the gradient twice, then master, two states and parameter."""
    count = Parameters(shapes).count
    rows = []
    for kind, words in {
        "float16, float32 masters": {"dtype": "float16"},
        "bfloat16, split": {"dtype": "bfloat16", "master": "split"},
    }.items():
        contestants = {
            AMP: phase_of_torch(shapes),
            O2: phase_of_mezzo(shapes, **words),
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
    """torch.amp as its documentation has it, with a fused optimizer."""
    return lambda model: (
        optimizer(model.parameters(), fused=True),
        torch.amp.GradScaler("cuda"),
        torch.autocast("cuda", torch.float16),
    )


def o2(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> Callable[[nn.Module], tuple[torch.optim.Optimizer, Any, Any]]:
    """O2."""

    def begin(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, Any]:
        made = optimizer(model.parameters())
        mezzo.decorate(model, made, "O2", dtype="float16")
        # The region that a script has around its loss stays, and does no harm to the model's own.
        return made, mezzo.GradScaler("cuda"), mezzo.autocast("cuda", torch.float16)

    return begin


def products() -> Step:
    """The matrix products of a step of the wide network alone, over tensors as many and as large as the network's: 9 forward, 9 for the weights, 8 for the inputs."""
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
        # Or they would fade to zero from run to run, and products of zeros take less power and
        # time.
        flowing[0].copy_(activations[0])

    return run


def wide_rows(rounds: int) -> list[Row]:
    """A whole step of the wide network."""
    sgd = lambda parameters, **words: torch.optim.SGD(parameters, lr=1e-4, **words)  # noqa: E731
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
    """A whole step of GPT-2."""
    adamw = lambda parameters, **words: torch.optim.AdamW(parameters, lr=1e-4, **words)  # noqa: E731
    contestants = {AMP: Text(amp(adamw)).step, O2: Text(o2(adamw)).step}
    times = take_turns(contestants, calls=10, rounds=rounds, device="cuda")
    contestants.clear()
    _clear()
    return [
        Row("step, GPT-2 124M, 8 × 1024, float16, AdamW", times, times[O2] / times[AMP], "×", 0.88)
    ]


def memory_rows() -> list[Row]:
    """Bytes a parameter for parameter, master and Adam's states, as the allocator counts them, and what the tables of the step add."""
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
    bound = optimizer_binding(optimizer)
    if isinstance(bound, FusedBinding):
        bound._plan = None
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
    parser.add_argument("--memory", action="store_true", help="memory alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("16-bit parameters are measured on a GPU, and there is none.")
        return
    rows = memory_rows()
    if not options.memory:
        rows += wide_rows(options.rounds) + text_rows(options.rounds)
        rows += phase_rows("124M", gpt_shapes(768, 12), options.rounds) + phase_rows(
            "1B", gpt_shapes(1536, 34), options.rounds
        )
    for row in rows:
        print(row)
    print(f"stored in {store('optim', rows, 'cuda').name}")


if __name__ == "__main__":
    main()
