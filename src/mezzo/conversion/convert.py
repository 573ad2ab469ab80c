"""`mezzo.convert`: a trained model in, a program with the fewest casts out."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mezzo._torch import require
from mezzo.conversion.converted import Converted
from mezzo.policy.parse import ConditionalArg
from mezzo.policy.policy import Policy
from mezzo.policy.types import Level


def convert(
    model: nn.Module,
    args: tuple[Any, ...] | list[tuple[Any, ...]],
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    policy: Policy | str | os.PathLike[str] | Level | None = "O1",
    dynamic_shapes: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    half: Collection[str] = (),
    full: Collection[str] = (),
    conditional: Collection[ConditionalArg] = (),
    exclude: Collection[str] | str = (),
    cast_params: bool = True,
    keep_io_dtypes: bool = True,
    cast_cost: Callable[[int, torch.dtype, torch.dtype], float] | None = None,
) -> Converted:
    """Convert a model for inference: 16 bits where the policy says so, and the fewest bytes cast between.

    `args` and `kwargs` are example inputs as the model takes them; a list of tuples makes one
    program for each size, which share their weights. Ops in `half` and `full`, and those in
    `conditional` for the values named there, beat the policy's own lists; nodes and modules in
    `exclude` stay float32 whatever is listed. `cast_params=False` keeps float32 weights,
    `keep_io_dtypes=False` lets inputs and outputs be 16-bit. `cast_cost` prices a cast of so many
    bytes from one dtype to another.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> converted = convert(model, (torch.randn(3, 8),), dtype="bfloat16", exclude="2")
    >>> [(row.node, row.dtype) for row in converted.plan if row.op in ("linear", "relu")]
    [('linear', 'bfloat16'), ('relu', 'bfloat16'), ('linear_1', 'float32')]
    """
    require("conversion")
    # Here, and not above: importing what traces a model would cast_cost every user of mezzo a
    # second.
    from mezzo.conversion.pipeline import convert_examples  # noqa: PLC0415

    return convert_examples(
        model,
        args,
        kwargs,
        Policy.parse(policy) if dtype is None else Policy.parse(policy, dtype=dtype),
        dynamic_shapes,
        half=half,
        full=full,
        conditional=conditional,
        exclude=exclude,
        cast_params=cast_params,
        keep_io_dtypes=keep_io_dtypes,
        cast_cost=cast_cost,
    )
