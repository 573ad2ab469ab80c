"""`mezzo.convert`: convert a trained model to a graph in 16 bits with the fewest casts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mezzo._errors import UnsupportedError
from mezzo._torch import fsdp_groups, require
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
    """Convert a trained model for inference in float16 or bfloat16.

    The model is exported with `torch.export`. The policy's op lists decide which ops run in 16 bits
    and which in float32; a minimum cut over the bytes cast decides the remaining ops, without
    making any of them less precise than under `torch.autocast`. Weights are stored in the dtype in
    which they are read. The model itself is not changed, and the result shares no memory with it.

    Args:
        model: The model, in the mode (`train` or `eval`) in which it will run. Wrappers of
            `torch.compile` and of data parallel training are removed.
        args: Example inputs as a tuple, as the model takes them. A list of tuples makes one
            program per example; the programs share their weights.
        kwargs: Example keyword arguments: one mapping, or a sequence with one mapping per example.
        policy: A level, a `Policy`, or a TOML file.
        dynamic_shapes: The sizes that may change, as in `torch.export.export`.
        dtype: The 16-bit dtype; overrides that of the policy.
        half: Ops to run in 16 bits; overrides the policy's lists.
        full: Ops to keep in float32; overrides the policy's lists.
        conditional: Ops to keep in float32 for some values of an argument, each as
            `(op, argument, values)`; overrides `half` and `full`.
        exclude: Nodes and modules to keep in float32, by name or glob (`"encoder.*"`); overrides
            every list.
        cast_params: Whether to store weights in 16 bits where they are read so. False keeps them in
            float32 and casts them in each call.
        keep_io_dtypes: Whether inputs and outputs keep the dtypes of the model. False lets them be
            16-bit.
        cast_cost: A function of `(bytes, source dtype, target dtype)` that returns the cost of a
            cast, for instance a measured time. By default the cost is the number of bytes.

    Raises:
        ConversionError: `torch.export` cannot trace the model, or the examples do not fit it.
        UnsupportedError: The model is sharded.
        PolicyError: An op in a list is not in the graph, or an exclusion matches nothing.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> converted = convert(model, (torch.randn(3, 8),), dtype="bfloat16", exclude="2")
    >>> [(row.node, row.dtype) for row in converted.plan if row.op in ("linear", "relu")]
    [('linear', 'bfloat16'), ('relu', 'bfloat16'), ('linear_1', 'float32')]
    """
    require("conversion")
    if isinstance(model, nn.Module) and fsdp_groups(model):
        raise UnsupportedError(
            "The model is sharded by FSDP2, and a conversion needs whole weights. Convert a model"
            " that is not sharded, with the weights of get_model_state_dict(model,"
            " options=StateDictOptions(full_state_dict=True))."
        )
    # Imported late: torch.export would add a second to `import mezzo`.
    from mezzo.conversion.pipeline import convert_model  # noqa: PLC0415

    return convert_model(
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
