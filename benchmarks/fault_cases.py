"""Faults of precision, data and parameters, planted in small models; `faults.py` runs them.

Each fault states what `mezzo.trace_overflow` must report. The line that must be named has the
comment `# fault`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo

Batch = tuple[Any, Tensor]
INF = float("inf")


def policy(level: str = "O1", dtype: str = "float16", **fields: Any) -> mezzo.Policy:
    """Return a policy with torch's lists for CUDA, so that a CPU decides the same."""
    return mezzo.Policy(level, dtype, preset="torch-cuda", **fields)


@dataclass(frozen=True)
class Fault:
    """One fault, where it is planted, and what must be reported."""

    name: str
    op: str
    """The op; of a fault in the data or the parameters, the name of the tensor."""
    direction: str = "forward"
    module: str = "middle"
    cured: bool = True
    """Whether a cure must be found, run and verified."""
    precision: bool = True
    """Whether 16 bits are the cause."""
    middle: Callable[[], nn.Module] = nn.Identity
    """The module between two linear layers."""
    prepare: Callable[[nn.Sequential], object] = lambda _: None
    """Changes the new model."""
    change: Callable[[Tensor, Tensor], Batch] = lambda x, y: (x, y)
    """Changes the batch of the call that fails."""
    step: int = 1
    """The call that fails."""
    loss: Callable[..., Tensor] = F.mse_loss
    policy: mezzo.Policy = field(default_factory=policy)
    run: str = "eager"
    """`eager`, `compiled`, `captured` or `distributed`."""
    rate: float = 1e-3
    scaler: Any = None
    """As for `TrainStep`."""
    rank: int = 0
    """The rank whose batch is changed."""


def network(fault: Fault, device: str) -> nn.Sequential:
    """Return the model with its fault."""
    torch.manual_seed(0)
    middle = fault.middle()
    model = nn.Sequential(
        OrderedDict(enter=nn.Linear(16, 32), middle=middle, head=nn.Linear(32, 4))
    )
    fault.prepare(model)
    return model.to(device)


def batches(fault: Fault, device: str, rank: int = 0) -> list[Batch]:
    """Return the batches up to the one that fails."""
    generator = torch.Generator().manual_seed(1 + rank)
    made: list[Batch] = [
        (torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator))
        for _ in range(fault.step)
    ]
    if rank == fault.rank:
        made[-1] = fault.change(*made[-1])
    return [(_moved(x, device), y.to(device)) for x, y in made]


def _moved(value: Any, device: str) -> Any:
    return tuple(one.to(device) for one in value) if isinstance(value, tuple) else value.to(device)


# -- changes of models and batches -----------------------------------------------------------------


def biased(value: float, std: float = 0.1) -> Callable[[nn.Sequential], object]:
    """Give the outputs of the first layer an offset."""

    def prepare(model: nn.Sequential) -> None:
        nn.init.constant_(model.enter.bias, value)  # type: ignore[arg-type,union-attr]
        nn.init.normal_(model.enter.weight, std=std)  # type: ignore[arg-type,union-attr]

    return prepare


def scaled(factor: float) -> Callable[[Tensor, Tensor], Batch]:
    """Multiply the inputs."""
    return lambda x, y: (x * factor, y)


def filled(value: float, *, target: bool = False) -> Callable[[Tensor, Tensor], Batch]:
    """Put one value into the inputs or the target."""

    def change(x: Tensor, y: Tensor) -> Batch:
        (y if target else x)[3, 2] = value
        return x, y

    return change


def with_zero_rows(x: Tensor, y: Tensor) -> Batch:
    """Set two rows of the inputs to zero, as padding does."""
    return torch.cat([torch.zeros(2, 16), x[2:]]), y


def without_bias(model: nn.Sequential) -> None:
    """Let rows of zeros stay zero."""
    nn.init.zeros_(model.enter.bias)  # type: ignore[arg-type,union-attr]


# -- modules ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention whose logits are not divided by anything."""

    def __init__(self, std: float = 3.0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        for layer in (self.q, self.k):
            nn.init.normal_(layer.weight, std=std)

    def forward(self, h: Tensor) -> Tensor:
        scores = self.q(h) @ self.k(h).transpose(-1, -2)  # fault
        return scores.softmax(-1) @ self.v(h)


class Variance(nn.Module):
    """A norm over the batch with the variance by hand."""

    def forward(self, h: Tensor) -> Tensor:
        variance = (h * h).mean(0) - h.mean(0) ** 2  # fault
        return (h - h.mean(0)) / (variance.clamp(min=0.0) + 1e-3).sqrt()


class RootMeanSquare(nn.Module):
    """An RMS norm by hand."""

    def forward(self, h: Tensor) -> Tensor:
        return h * (h * h).mean(-1, keepdim=True).add(1e-6).rsqrt()  # fault


class SquareSum(nn.Module):
    """A division by the norm, whose sum of squares is in 16 bits."""

    def forward(self, h: Tensor) -> Tensor:
        squares = (h * h).sum(-1, keepdim=True)  # fault
        return h / squares.sqrt()


class MaxNorm(nn.Module):
    """A division by the largest value, with a bound that float16 does not have."""

    def forward(self, h: Tensor) -> Tensor:
        largest = h.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return h / largest  # fault


class CosineAttention(nn.Module):
    """Attention of normalised queries and keys, with the norm by hand."""

    def forward(self, h: Tensor) -> Tensor:
        normed = h / (h * h).sum(-1, keepdim=True).sqrt()  # fault
        return (10.0 * normed @ normed.transpose(-1, -2)).softmax(-1) @ h


class Softmax(nn.Module):
    """A softmax without subtracting the maximum."""

    def forward(self, h: Tensor) -> Tensor:
        weights = h.exp()  # fault
        return h * weights / weights.sum(-1, keepdim=True)


class RunningMean(nn.Module):
    """A mean over all features before."""

    def forward(self, h: Tensor) -> Tensor:
        sums = h.cumsum(-1)  # fault
        return sums / torch.arange(1, 33, device=h.device)


class Underflow(nn.Module):
    """A division by a product that float16 rounds to zero."""

    def forward(self, h: Tensor) -> Tensor:
        small = h.abs().clamp(min=0.1) * 1e-9  # fault
        return h * (1e-9 / small)


class LogOfZero(nn.Module):
    """A logarithm of numbers that can be zero."""

    def forward(self, h: Tensor) -> Tensor:
        return h.relu().log()  # fault


class RootOfZero(nn.Module):
    """A square root at zero, whose gradient is infinite."""

    def forward(self, h: Tensor) -> Tensor:
        return (h - h.detach()).abs().sqrt() + h  # fault


class MaskedLog(nn.Module):
    """A logarithm whose infinities are replaced, but not their gradients."""

    def forward(self, h: Tensor) -> Tensor:
        positive = h * (h > 0)
        logs = positive.log()  # fault
        return torch.where(positive > 0, logs, 0.0)


class MaskedRows(nn.Module):
    """A softmax over rows in which everything is masked."""

    def forward(self, h: Tensor) -> Tensor:
        hidden = torch.zeros_like(h, dtype=torch.bool)
        hidden[2] = True
        return h.masked_fill(hidden, -INF).softmax(-1)  # fault


class MaskProduct(nn.Module):
    """A mask that is multiplied by minus infinity, where zero times infinity is NaN."""

    def forward(self, h: Tensor) -> Tensor:
        hidden = torch.ones(32, 32, device=h.device).triu(1)
        mask = hidden * -INF  # fault
        return (h[:, None, :] + mask).softmax(-1).mean(1)


class Residual(nn.Module):
    """A residual stream that grows beyond the range of float16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + 2000.0 * layer(self.norm(h))
            h = h + 40.0 * h  # fault
        return self.norm(h)


class Reciprocal(torch.autograd.Function):
    """A custom op whose backward divides by zero."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h.relu())
        return h.relu()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        return gradient * (saved / saved)  # fault


class CustomOp(nn.Module):
    """Calls a custom op."""

    def forward(self, h: Tensor) -> Tensor:
        return Reciprocal.apply(h) + h  # type: ignore[no-any-return]


class HalfSquare(torch.autograd.Function):
    """A custom op that computes in float16 whatever it gets."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        half = h.half()
        return (half * half).mean(-1, keepdim=True).float()  # fault

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        return gradient * 2.0 * saved / saved.shape[-1]


class CustomHalfOp(nn.Module):
    """Calls a custom op that computes in float16."""

    def forward(self, h: Tensor) -> Tensor:
        return h / HalfSquare.apply(h).sqrt()  # type: ignore[no-any-return]


class Entropy(nn.Module):
    """A binary entropy, in which 1 - p rounds to zero."""

    def forward(self, h: Tensor) -> Tensor:
        p = h.sigmoid()
        rest = 1.0 - p  # fault
        return p * rest.log()


class Distances(nn.Module):
    """Squared distances between the rows of a batch."""

    def forward(self, h: Tensor) -> Tensor:
        difference = h[:, None] - h[None]
        squares = difference * difference  # fault
        return (-squares.mean(-1) / 1e6).softmax(-1) @ h


class Gram(nn.Module):
    """A Gram matrix, divided after the product."""

    def forward(self, h: Tensor) -> Tensor:
        gram = h.transpose(0, 1) @ h  # fault
        return h @ (gram / 1e6)


class Convolution(nn.Module):
    """A convolution with a large kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 5, padding=2)
        nn.init.constant_(self.conv.weight, 9000.0)

    def forward(self, h: Tensor) -> Tensor:
        return self.conv(h[:, None])[:, 0] / 9000.0  # fault


class Cubed(nn.Module):
    """A third power that is scaled down too late."""

    def forward(self, h: Tensor) -> Tensor:
        return h * h * h * 1e-6  # fault


class HalfSum(nn.Module):
    """A sum that is float16 by its own argument."""

    def forward(self, h: Tensor) -> Tensor:
        total = h.sum(-1, keepdim=True, dtype=torch.float16)  # fault
        return h / total


class BatchNorm(nn.Module):
    """A batch norm by hand, with an epsilon that float16 does not have."""

    def forward(self, h: Tensor) -> Tensor:
        centred = h - h.mean(0)
        deviation = centred.abs().mean(0) + 1e-9
        return centred / deviation  # fault


class Divergence(nn.Module):
    """A divergence of a distribution that has zeros."""

    def forward(self, h: Tensor) -> Tensor:
        p = h.relu() / 10.0
        return p * (p / 0.1).log()  # fault


class CausalMask(nn.Module):
    """Attention with a causal mask of infinities, which is no fault."""

    def forward(self, h: Tensor) -> Tensor:
        hidden = torch.ones(8, 8, dtype=torch.bool, device=h.device).triu(1)
        scores = (h @ h.transpose(-1, -2) / 32.0).masked_fill(hidden, -INF)
        return scores.softmax(-1) @ h


class Temperature(nn.Module):
    """A softmax whose logits are divided by a low temperature."""

    def forward(self, h: Tensor) -> Tensor:
        logits = h / 1e-4  # fault
        return logits.softmax(-1)


class Product(nn.Module):
    """A geometric mean by the product of all features."""

    def forward(self, h: Tensor) -> Tensor:
        product = h.abs().prod(-1, keepdim=True)  # fault
        return h / product ** (1 / 32)


class Outer(nn.Module):
    """An outer product by einsum."""

    def forward(self, h: Tensor) -> Tensor:
        outer = torch.einsum("bi,bj->ij", h, h)  # fault
        return h @ (outer / 1e6)


class ShiftedLog(nn.Module):
    """A logarithm of numbers that are positive for most batches."""

    def forward(self, h: Tensor) -> Tensor:
        return (h + 20.0).log()  # fault


class MultiplyAdd(nn.Module):
    """A fused product and sum."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.addcmul(h, h, h) * 1e-4  # fault


class Inverse(nn.Module):
    """A division by small numbers, whose gradient has their squares."""

    def forward(self, h: Tensor) -> Tensor:
        small = h.abs() * 1e-4 + 1e-3
        return torch.ones_like(h) / small * 1e-3 + h  # fault


class Hinge(nn.Module):
    """A squared hinge."""

    def forward(self, h: Tensor) -> Tensor:
        hinge = h.clamp(min=0.0)
        # Not square(), which runs as pow: torch's autocast on CUDA computes it in float32.
        return hinge * hinge * 1e-5  # fault


def with_bad_statistics(model: nn.Sequential) -> None:
    """Put NaN into the running mean of a batch norm."""
    model.middle.running_mean[3] = math.nan  # type: ignore[index,union-attr]
    model.middle.eval()


def tiny_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return a loss whose gradients are too small for float16 without a loss scale."""
    return F.mse_loss(outputs.float(), target) * 1e-8  # fault


def tiny_half_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is scaled down in float16."""
    return (outputs - target.half()).square().mean() * 1e-9  # fault


def exploding_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return a loss whose gradient leaves the range of float16 in backward."""
    return ((outputs.float() - target) * 1e12).sum() * 1e-5  # fault


def summed_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is summed, not averaged."""
    return F.mse_loss(outputs, target, reduction="sum")  # fault


FAULTS = [
    # -- eager
    Fault("attention logits", "matmul", middle=lambda: Attention(20.0)),
    Fault("sum of squares", "sum", middle=SquareSum, policy=policy("O3"), prepare=biased(100.0)),
    Fault("variance by hand", "mul", middle=Variance, prepare=biased(1000.0, 1.0)),
    Fault("variance by hand, O2", "mul", middle=Variance, prepare=biased(1000.0, 1.0),
          policy=policy("O2")),
    Fault("variance by hand, bfloat16", "sub", middle=Variance, prepare=biased(1000.0, 1.0),
          policy=policy(dtype="bfloat16")),
    Fault("cosine attention", "mul", middle=CosineAttention, prepare=biased(1000.0)),
    Fault("norm with clamp 1e-12", "div", middle=MaxNorm, prepare=without_bias,
          change=with_zero_rows),
    Fault("exp", "exp", middle=Softmax, policy=policy("O3"), prepare=biased(12.0)),
    Fault("cumsum", "cumsum", middle=RunningMean, policy=policy("O3"), prepare=biased(4000.0)),
    Fault("division by underflow", "mul", middle=Underflow),
    Fault("log of zero", "log", middle=LogOfZero, precision=False, cured=False),
    Fault("root of zero", "sqrt", "backward", middle=RootOfZero, precision=False, cured=False),
    Fault("masked log", "log", "backward", middle=MaskedLog, precision=False, cured=False),
    Fault("softmax of a masked row", "softmax", middle=MaskedRows, precision=False, cured=False),
    Fault("zero times infinity", "mul", middle=MaskProduct, precision=False, cured=False),
    Fault("infinity in the data", "argument 0", "data", "", change=filled(INF), step=3,
          precision=False, cured=False),
    Fault("NaN in the target", "argument 1", "data", "", change=filled(math.nan, target=True),
          step=2, precision=False, cured=False),
    Fault("learning rate", "head.weight", "parameters", "head", rate=1e25, step=2,
          precision=False, cured=False),
    Fault("learning rate, bfloat16", "enter.weight", "parameters", "enter", rate=1e25, step=2,
          policy=policy(dtype="bfloat16"), precision=False, cured=False),
    Fault("custom op with a wrong backward", "Reciprocal", "backward", middle=CustomOp,
          precision=False, cured=False),
    Fault("custom op in float16", "mul", middle=CustomHalfOp, prepare=biased(1000.0)),
    Fault("residual stream", "mul", middle=Residual, policy=policy("O2")),
    Fault("loss times 1e-9", "mul", module="", loss=tiny_half_loss, policy=policy("O3")),
    Fault("gradient underflow", "float", "backward", module="", loss=tiny_loss, scaler=False),
    Fault("gradient overflow", "float", "backward", module="", loss=exploding_loss),
    # -- compiled
    Fault("attention logits, compiled", "matmul", middle=Attention, change=scaled(30.0), step=2,
          run="compiled"),
    Fault("RMS norm, compiled", "mul", middle=RootMeanSquare, prepare=biased(500.0),
          run="compiled"),
    Fault("log of zero, compiled", "log", middle=LogOfZero, precision=False, cured=False,
          run="compiled"),
    Fault("entropy, compiled", "sub", middle=Entropy, prepare=biased(10.0, 0.02),
          run="compiled"),
    Fault("third power, compiled", "mul", middle=Cubed, change=scaled(100.0), step=2,
          run="compiled"),
    Fault("infinity in the data, compiled", "argument 0", "data", "", change=filled(INF), step=2,
          precision=False, cured=False, run="compiled"),
    # -- captured
    Fault("distances, captured", "mul", middle=Distances, change=scaled(400.0), step=8,
          run="captured"),
    Fault("Gram matrix, captured", "matmul", middle=Gram, change=scaled(200.0), step=8,
          run="captured", policy=policy("O2")),
    Fault("convolution, captured", "conv1d", module="middle.conv", middle=Convolution,
          change=scaled(30.0), step=8, run="captured"),
    Fault("minus infinity in the data, captured", "argument 0", "data", "", change=filled(-INF),
          step=8, precision=False, cured=False, run="captured"),
    Fault("summed loss, captured", "mse_loss", "backward", module="", loss=summed_loss,
          change=lambda x, y: (x, y * 1e3), step=8, run="captured"),
    # -- distributed
    Fault("infinity in the data of rank 1", "argument 0", "data", "", change=filled(INF), step=2,
          rank=1, precision=False, cured=False, run="distributed"),
    Fault("attention logits of rank 1", "matmul", middle=Attention, change=scaled(30.0), step=2,
          rank=1, run="distributed"),
    Fault("variance by hand, distributed", "mul", middle=Variance, prepare=biased(1000.0, 1.0),
          run="distributed", policy=policy("O2")),
    # -- written after the mechanism was finished
    Fault("temperature", "div", middle=Temperature, prepare=biased(10.0)),
    Fault("product", "prod", middle=Product, policy=policy("O3"), prepare=biased(2.0, 0.02)),
    Fault("NaN in a buffer", "middle.running_mean", "parameters", "middle",
          middle=lambda: nn.BatchNorm1d(32), prepare=with_bad_statistics, precision=False,
          cured=False),
    Fault("gradient of a division", "div", "backward", middle=Inverse),
    Fault("outer product, compiled", "einsum", middle=Outer, change=scaled(200.0), step=2,
          run="compiled"),
    Fault("hinge, compiled", "mul", middle=Hinge, change=scaled(4000.0), step=2,
          run="compiled"),
    Fault("logarithm of a negative number, captured", "log", middle=ShiftedLog,
          change=scaled(100.0), step=8, precision=False, cured=False, run="captured"),
    Fault("fused product and sum, captured", "addcmul", middle=MultiplyAdd, change=scaled(300.0),
          step=8, run="captured"),
    Fault("log of zero, distributed", "log", middle=LogOfZero, precision=False, cured=False,
          run="distributed"),
    Fault("NaN in the target of rank 1", "argument 1", "data", "",
          change=filled(math.nan, target=True), step=2, rank=1, precision=False, cured=False,
          run="distributed"),
    Fault("no fault, a causal mask", "", "none", "", middle=CausalMask, precision=False,
          cured=False),
]  # fmt: skip
