"""torch counterparts of the ops that were recorded with PaddlePaddle.

Where a Paddle function consists of several ops, so does its counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

NO_COUNTERPART = {
    "conv2d_depthwise": (
        "conv2d with as many groups as channels is an op of its own in Paddle, in no list; in torch"
        " it is conv2d"
    ),
    "log_loss": (
        "torch has no log_loss: binary_cross_entropy clamps the logarithm, and is another op in"
        " Paddle too"
    ),
    "increment_inplace_add": (
        "Paddle's in-place add gives its tensor the promoted dtype, and its clone is cast; torch's"
        " keep theirs"
    ),
}

VECTOR = (4,)
MATRIX = (4, 4)
IMAGE = (2, 4, 4, 4)
LABELS = torch.tensor([0, 1, 2, 3])


def kernel_output(loss: Tensor) -> Tensor:
    """Cast as Paddle's cross entropy, whose kernel returns float32 from bfloat16 logits."""
    return loss.float() if loss.dtype is torch.bfloat16 else loss


def normalize(x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.maximum(length, torch.tensor(1e-12, dtype=x.dtype))


def variance(x: Tensor) -> Tensor:
    """Compute the variance as Paddle: float16 divides in float32, and is cast back."""
    wide = torch.float32 if x.dtype is torch.float16 else x.dtype
    total = torch.pow(x - x.mean(), 2).sum().to(wide)
    count = torch.tensor(float(x.numel() - 1), dtype=wide)
    return (total / count).to(x.dtype)


@dataclass(frozen=True)
class Case:
    """A torch counterpart: a function and the shapes of its inputs."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    listed: tuple[str, ...] | None = None
    """Names in mezzo of the op in the custom list, where the preset's name map has others."""
    low: float = field(default=0.25)
    """The smallest input value, within the domain of all these ops."""


def unary(call: Callable[..., Tensor], **options: object) -> Case:
    return Case(call, (MATRIX,), **options)


def binary(call: Callable[..., Tensor]) -> Case:
    return Case(call, (MATRIX, MATRIX))


CASES = {
    "matmul": binary(torch.matmul),
    "matmul_operator": binary(lambda x, y: x @ y),
    "bmm": Case(torch.bmm, ((2, 4, 4), (2, 4, 4))),
    "einsum": binary(lambda x, y: torch.einsum("ij,jk->ik", x, y)),
    # Two ops in a build without CUDA.
    "linear_bias": Case(lambda x, w, b: torch.matmul(x, w) + b, (MATRIX, MATRIX, VECTOR)),
    "linear_v2_direct": Case(F.linear, (MATRIX, MATRIX, VECTOR)),
    "outer": Case(lambda x, y: x.reshape(-1, 1) * y.reshape(1, -1), (VECTOR, VECTOR)),
    "conv2d": Case(F.conv2d, (IMAGE, (4, 4, 3, 3))),
    "conv3d": Case(F.conv3d, ((1, 2, 4, 4, 4), (2, 2, 3, 3, 3))),
    "max_pool2d": Case(lambda x: F.max_pool2d(x, 2), (IMAGE,)),
    "softmax": unary(lambda x: torch.softmax(x, -1)),
    # A cast and a softmax in Paddle.
    "softmax_dtype_f32": unary(lambda x: torch.softmax(x.float(), -1)),
    "cross_entropy": unary(
        lambda x: kernel_output(F.cross_entropy(x, LABELS, reduction="none")).mean()
    ),
    "cross_entropy_soft": binary(
        lambda x, y: kernel_output(F.cross_entropy(x, y, reduction="none")).mean()
    ),
    "nll_loss": unary(lambda x: F.nll_loss(x, LABELS)),
    "mse_loss": binary(lambda x, y: torch.square(x - y).mean()),
    "l1_loss": binary(lambda x, y: torch.abs(x - y).mean()),
    "smooth_l1_loss": binary(lambda x, y: F.smooth_l1_loss(x, y, reduction="none").mean()),
    "bce_with_logits": binary(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none").mean()
    ),
    "log": unary(torch.log),
    "log1p": unary(torch.log1p),
    "rsqrt": unary(torch.rsqrt),
    "square": unary(torch.square),
    "reciprocal": unary(torch.reciprocal),
    "sin": unary(torch.sin),
    "tan": unary(torch.tan),
    "acos": unary(torch.acos),
    "atan": unary(torch.atan),
    "cosh": unary(torch.cosh),
    "erfinv": unary(torch.erfinv),
    "floor": unary(torch.floor),
    "F.relu": unary(F.relu),
    "F.gelu": unary(F.gelu),
    "F.silu": unary(F.silu),
    "F.softsign": unary(F.softsign),
    "F.tanhshrink": unary(F.tanhshrink),
    "F.selu": unary(F.selu),
    "F.celu": unary(F.celu),
    "F.hardswish": unary(F.hardswish),
    "F.log_sigmoid": unary(F.logsigmoid),
    "add": binary(torch.add),
    "multiply": binary(torch.mul),
    "divide": binary(torch.div),
    "maximum": binary(torch.maximum),
    "minimum": binary(torch.minimum),
    "add_scalar": unary(lambda x: x + 1.0, listed=("add",)),
    "pow_scalar": unary(lambda x: x**2.0),
    "equal": binary(torch.eq),
    "greater_than": binary(torch.gt),
    "sum": unary(torch.sum),
    "mean_axis": unary(lambda x: x.mean(-1)),
    "prod": unary(torch.prod),
    "var": unary(variance),
    "std": unary(lambda x: torch.sqrt(variance(x))),
    "logsumexp": unary(lambda x: torch.logsumexp(x, -1)),
    "norm_fro": unary(torch.norm),
    "cumsum": unary(lambda x: torch.cumsum(x, -1)),
    "renorm": unary(lambda x: torch.renorm(x, 2, 0, 1.0)),
    "trace": unary(torch.trace),
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, VECTOR, w, b), (MATRIX, VECTOR, VECTOR)),
    "layer_norm_nowb": unary(lambda x: F.layer_norm(x, VECTOR)),
    "batch_norm_eval": Case(F.batch_norm, (IMAGE, VECTOR, VECTOR, VECTOR, VECTOR)),
    "group_norm": Case(lambda x, w, b: F.group_norm(x, 2, w, b), (IMAGE, VECTOR, VECTOR)),
    "normalize": unary(normalize),
    "concat": binary(lambda x, y: torch.cat([x, y])),
    # Paddle calls split_with_num, and 'split' in a list does not reach it.
    "split": unary(lambda x: torch.chunk(x, 2)[0]),
    "gather": unary(lambda x: torch.index_select(x, 0, LABELS)),
    "scatter": binary(lambda x, y: torch.index_copy(x, 0, LABELS, y)),
    "tile": unary(lambda x: torch.tile(x, (2, 1))),
    "expand": Case(lambda x: x.expand(4, 4), ((1, 4),)),
    "dropout_eval": unary(lambda x: F.dropout(x, training=False)),
    "interp_bilinear": Case(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,)),
    "interp_nearest": Case(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), (IMAGE,)),
    "argmax": unary(torch.argmax),
    "tril": unary(torch.tril, listed=()),  # 'tril_triu' in a list does not reach Paddle's tril
    "cast_f32": unary(Tensor.float, listed=()),  # a cast is never cast
    # Paddle fixes the dtype before the op runs.
    "zeros_like": unary(lambda x: torch.zeros_like(x, dtype=x.dtype), listed=()),
    "pixel_shuffle": Case(lambda x: F.pixel_shuffle(x, 2), (IMAGE,)),
    "roll": unary(lambda x: torch.roll(x, 1)),
}


def dtype_code(dtype: torch.dtype, half: torch.dtype) -> str:
    return "h" if dtype is half else {torch.float32: "f", torch.bool: "b", torch.int64: "i"}[dtype]


def inputs_of(case: Case, row: Any) -> list[Tensor]:
    """Return inputs of the recorded dtypes."""
    # torch.manual_seed formats a stack trace for each device type: 2 ms a call.
    generator = torch.Generator().manual_seed(0)
    half = DTYPES[row.half]
    return [
        (torch.rand(shape, generator=generator) / 2 + case.low).to(
            half if dtype == "h" else torch.float32
        )
        for shape, dtype in zip(case.shapes, row.inputs, strict=True)
    ]


def is_usable(row, variant: str) -> bool:
    """Return whether torch can run a recorded row.

    Paddle's 16-bit norms take parameters of mixed dtypes; torch's kernels need all float32, or all
    of the input's dtype. torch 2.11 has no 16-bit `trace`.
    """
    if row.op == "trace" and row.results[variant][0] == "h" and torch.__version__ < "2.13":
        return False
    mixed_parameters = len(set(row.inputs[1:])) > 1
    return not (
        row.op in ("layer_norm", "batch_norm_eval")
        and mixed_parameters
        and row.results[variant][1] == "h"
    )
