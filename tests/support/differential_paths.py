"""Ways of calling a step for the differential harness: call shapes, outputs, lengths, optimizers.

`in_steps` trains with a TrainStep, `by_hand` with the loop that a user writes. Both return the
losses, the weights, the outputs beside the loss and the norms of the gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from support.differential import OPTIMIZERS, Row, Trajectory, moved, state_of
from support.differential_zoo import CLASSES, OWN, TRANSFORMERS
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import mezzo

UPDATES = 8
OVERFLOWS = (1, 5, 6)
_ZOO = {row.name: row for row in (*OWN, *TRANSFORMERS)}


@dataclass(frozen=True)
class Path:
    """A model with its data, and how the step is made and called."""

    name: str
    row: Row
    level: str
    dtype: str
    call: Callable[..., torch.Tensor] = lambda step, inputs, target: step(inputs, target)
    """Calls the step with the inputs and the target."""
    loss: Callable[..., Any] | None = None
    """The loss function of the step. The last tensor of the target is its factor."""
    optimizers: Callable[[Any], Any] = OPTIMIZERS["AdamW"]
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    lengths: Sequence[int] = ()
    """Lengths that the sequences of one batch after the other are cut to."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of TrainStep."""
    captures: str = "call"
    """What is captured: the "call", its "body" or its "update" only."""
    updates: int = UPDATES

    def __str__(self) -> str:
        parts = [self.name, self.level, self.dtype, "schedule" if self.schedule else ""]
        named = [f"{key}={value}" for key, value in self.options.items() if value is not True]
        return " ".join(filter(None, [*parts, *named]))

    @property
    def accumulate(self) -> int:
        return self.options.get("accumulate", 1)

    def make(self, device: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return the model and its optimizers, always from the same seed."""
        torch.manual_seed(0)
        model = self.row.build().to(device).train()
        optimizers = self.optimizers(model.parameters())
        return model, optimizers if isinstance(optimizers, list) else [optimizers]

    def batches(self, device: str) -> list[tuple[Any, tuple[torch.Tensor, ...]]]:
        """Return the inputs and the target of each call."""
        generator, data = torch.Generator().manual_seed(7), []
        for call in range(self.updates * self.accumulate):
            inputs, target = self.row.batch(generator)
            if self.lengths:
                length = self.lengths[call % len(self.lengths)]
                inputs = {name: value[:, :length].contiguous() for name, value in inputs.items()}
            plants = self.dtype == "float16" and self.loss is not None
            overflows = plants and call // self.accumulate in OVERFLOWS
            factor = torch.tensor(float("inf") if overflows else 1.0)
            data.append((moved(inputs, device), moved((*target, factor), device)))
        return data


def in_steps(
    path: Path,
    device: str,
    *,
    capture: bool | str,
    prepare: Callable[[Any], None] | None = None,
) -> Trajectory:
    """Train with TrainStep; `prepare` may change it before the first call."""
    model, optimizers = path.make(device)
    data = path.batches(device)
    step = mezzo.TrainStep(
        model,
        path.loss,
        optimizers,
        path.level,
        dtype=path.dtype,
        scheduler=path.schedule and [path.schedule(one) for one in optimizers],
        channels_last=False,
        capture=capture,
        **path.options,
    )
    if prepare is not None:
        prepare(step)
    torch.manual_seed(1)
    losses, beside = [], _Beside()
    has_outputs = path.loss is not None or "keep_outputs" in path.options
    for inputs, target in data:
        losses.append(path.call(step, inputs, target))
        if device == "cuda":
            torch.cuda.synchronize()
        beside.add(step.outputs if has_outputs else None, step.grad_norm)
    return Trajectory(
        torch.stack(losses).double().cpu(),
        state_of(model) | beside.outputs,
        step.metrics.skipped_steps,
        step.scale,
        step.captured,
        step.eager_reason,
        beside.norms,
    )


def by_hand(path: Path, device: str) -> Trajectory:
    """Train with the loop that TrainStep replaces."""
    model, optimizers = path.make(device)
    data, options = path.batches(device), path.options
    schedulers = [path.schedule and path.schedule(one) for one in optimizers]
    mezzo.decorate(
        model, optimizers, path.level, dtype=path.dtype, clip_norm=options.get("clip_norm")
    )
    scaler = mezzo.GradScaler(device, enabled=path.dtype == "float16")
    losses, beside, skips, norm, before = [], _Beside(), 0, 0.0, []
    torch.manual_seed(1)
    for call, (inputs, target) in enumerate(data):
        if call % path.accumulate == 0:
            before = [buffer.clone() for buffer in model.buffers()]
        with mezzo.autocast(path.level, device_type=device, dtype=path.dtype):
            padded = mezzo.pad_batch(inputs, options["pad_to"]) if "pad_to" in options else inputs
            outputs = _called(model, padded)
            loss, aux = (
                (outputs.loss, outputs)
                if path.loss is None
                else _split(path.loss(outputs, *target))
            )
        if call == 0:
            scaler.find_scale(loss / path.accumulate, optimizers)
        scaler.scale(loss / path.accumulate).backward()
        losses.append(loss.detach())
        if (call + 1) % path.accumulate == 0:
            norm = _norm(model, scaler)
            results = [
                scaler.step(one, scheduler=scheduler)
                for one, scheduler in zip(optimizers, schedulers, strict=True)
            ]
            scaler.update()
            for one in optimizers:
                one.zero_grad()
            skips += any(result.skipped for result in results)
            if any(result.skipped for result in results):
                for buffer, old in zip(model.buffers(), before, strict=True):
                    buffer.copy_(old)
        beside.add(
            aux if path.loss is not None or "keep_outputs" in options else None,
            norm if {"grad_norm", "clip_norm"} & options.keys() else None,
        )
    return Trajectory(
        torch.stack(losses).double().cpu(),
        state_of(model) | beside.outputs,
        skips,
        scaler.get_scale(),
        captured=False,
        norms=beside.norms,
    )


class _Beside:
    """What a run computes beside its losses."""

    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.norms: list[float] = []
        self._calls = 0

    def add(self, outputs: Any, norm: float | None) -> None:
        self._calls += 1
        if outputs is not None:
            self.outputs |= {
                f"output {name} {self._calls}": value.detach().clone()
                for name, value in outputs.items()
                if isinstance(value, torch.Tensor)
            }
        if norm is not None:
            self.norms.append(norm)


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _split(returned: Any) -> tuple[torch.Tensor, Any]:
    return returned if isinstance(returned, tuple) else (returned, None)


def _norm(model: nn.Module, scaler: mezzo.GradScaler) -> float:
    gradients = [one.grad.double() for one in model.parameters() if one.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients)) / scaler.get_scale()
    return norm if isfinite(norm) else inf


# -- models and optimizers -------------------------------------------------------------------------


class Reading(nn.Module):
    """Reads from the device in its forward pass, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        return self.head(hidden if float(hidden.detach().abs().sum()) > 0 else hidden + 1)


class SignDescent(torch.optim.Optimizer):
    """An optimizer that is neither torch's nor mezzo's.

    It counts on the host and keeps the last gradient, which it does not copy.
    """

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                gradient = parameter.grad + state.get("last", 0.0)
                state["average"].lerp_(gradient.to(parameter.dtype), 0.1)
                state["last"] = parameter.grad
                rate = group["lr"] / state["step"] ** 0.5
                parameter.add_(state["average"].sign(), alpha=-rate)


def _muon_and_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    found = list(parameters)
    matrices = [one for one in found if one.dim() == 2]
    others = [one for one in found if one.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]


_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "RAdam": partial(torch.optim.RAdam, lr=1e-3, weight_decay=0.1),
    "Adamax": partial(torch.optim.Adamax, lr=1e-3),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "Muon and AdamW": _muon_and_adamw,
}


def _with_outputs(outputs: torch.Tensor, target: torch.Tensor, factor: torch.Tensor) -> Any:
    correct = (outputs.argmax(-1) == target).float().mean()
    return F.cross_entropy(outputs, target) * factor, {"logits": outputs, "accuracy": correct}


def _by_keyword(step: Any, inputs: dict[str, Any], target: Any) -> torch.Tensor:
    return step(**inputs)


def _as_one(step: Any, inputs: dict[str, Any], target: Any) -> torch.Tensor:
    return step(inputs)


def _numbers(generator: torch.Generator) -> tuple[Any, tuple[torch.Tensor, ...]]:
    target = torch.randint(CLASSES, (8,), generator=generator)
    return torch.randn(8, 8, generator=generator), (target,)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, CLASSES))


_MLP = Row("mlp", _mlp, _numbers, F.cross_entropy)
_READING = Row("host read", Reading, _numbers, F.cross_entropy)


def _halving(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


# -- the paths -------------------------------------------------------------------------------------


def _changed(name: str, change: Callable[[Any], Any]) -> Row:
    row = _ZOO[name]
    return Row(row.name, lambda: change(row.build()), row.batch, row.loss)


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def _adapted(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(model.to(torch.bfloat16), config)


def _classifier() -> Row:
    """Return an image model that computes its loss from `labels`."""
    row = _ZOO["hf-vit"]

    def batch(generator: torch.Generator) -> tuple[Any, tuple[torch.Tensor, ...]]:
        images, (target,) = row.batch(generator)
        return {"pixel_values": images, "labels": target}, ()

    return Row(row.name, row.build, batch, row.loss)


def _language() -> list[Path]:
    bert, gpt2 = _ZOO["bert padded"], _ZOO["gpt2 padded"]
    lengths = (16, 9, 12, 14)
    adapted = [
        Path("lora", _changed("llama padded", _adapted), level, "bfloat16", _by_keyword)
        for level in ("O1", "O2")
        if importlib.util.find_spec("peft")
    ]
    return [
        Path("bert", bert, "O2", "float16", _by_keyword, options={"clip_norm": 1.0}),
        Path("bert", bert, "O1", "bfloat16", _as_one, options={"grad_norm": True}),
        Path("llama", _ZOO["llama padded"], "O1", "float16", _by_keyword, schedule=_halving),
        Path("llama", _ZOO["llama"], "O2", "bfloat16", _by_keyword),
        Path("t5", _ZOO["t5 padded"], "O2", "bfloat16", _as_one, options={"accumulate": 2}),
        Path("gpt2", gpt2, "O2", "float16", _by_keyword, options={"keep_outputs": True}),
        Path("vit", _classifier(), "O2", "bfloat16", _by_keyword, options={"keep_outputs": True}),
        Path(
            "lengths",
            bert,
            "O2",
            "bfloat16",
            _by_keyword,
            lengths=lengths,
            options={"max_graphs": 2},
            updates=16,
        ),
        Path("lengths", gpt2, "O1", "float16", _by_keyword, lengths=lengths, updates=14),
        Path("padding", bert, "O2", "float16", _by_keyword, lengths=lengths, options={"pad_to": 8}),
        Path("padding", gpt2, "O1", "bfloat16", _as_one, lengths=lengths, options={"pad_to": 16}),
        Path("checkpointing", _changed("gpt2", _checkpointed), "O2", "float16", _by_keyword),
        Path("checkpointing", _changed("llama", _checkpointed), "O1", "bfloat16", _by_keyword),
        *adapted,
    ]


def _optimizers() -> list[Path]:
    made = [
        Path(name, _MLP, level, dtype, loss=_with_outputs, optimizers=make, schedule=schedule)
        for place, (name, make) in enumerate(_OPTIMIZERS.items())
        for level, dtype in (
            [("O1", "float16"), ("O2", "bfloat16")],
            [("O1", "bfloat16"), ("O2", "float16")],
        )[place % 2]
        for schedule in (_halving if level == "O2" else None,)
    ]
    foreign = partial(
        Path, "third-party", _MLP, loss=_with_outputs, optimizers=SignDescent, captures="body"
    )
    return [
        *made,
        foreign(level="O1", dtype="float16", schedule=_halving),
        foreign(level="O2", dtype="bfloat16"),
        foreign(level="O2", dtype="float16", options={"clip_norm": 0.1}),
    ]


def _others() -> list[Path]:
    return [
        Path(
            "outputs",
            _ZOO["u-net"],
            "O2",
            "float16",
            loss=_with_outputs,
            options={"grad_norm": True},
        ),
        Path(
            "outputs",
            _MLP,
            "O1",
            "bfloat16",
            loss=_with_outputs,
            options={"grad_norm": True, "accumulate": 2},
        ),
        *(
            Path(
                "host read",
                _READING,
                level,
                dtype,
                loss=_with_outputs,
                schedule=_halving,
                options={"grad_norm": True},
                captures="update",
                updates=12,
            )
            for level, dtype in (("O2", "float16"), ("O1", "bfloat16"))
        ),
    ]


PATHS = [*_others(), *_optimizers(), *(_language() if TRANSFORMERS else [])]


def compiled_path() -> Path:
    """Return a model that is compiled: for a GPU, since compiling for a CPU takes long."""
    return Path(
        "compiled", _ZOO["llama padded"], "O2", "bfloat16", _by_keyword, options={"compile": True}
    )
