"""`mxnet.amp.convert_*`, with the signatures of MXNet 1 and of MXNet 2."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from mezzo.compat.mxnet._block import Block, ConvertRequest
from mezzo.compat.mxnet.amp._init import PRESET
from mezzo.compat.mxnet.amp._lists import (
    check_excluded_names,
    check_lists,
    parse_target_dtype,
    policy_fields,
)
from mezzo.compat.mxnet.mod import BucketingModule
from mezzo.policy.policy import Policy

Params = Mapping[str, torch.Tensor]


def convert_model(
    sym: nn.Module,
    arg_params: Params,
    aux_params: Params,
    *args: Any,
    data_example: Any = None,
    **kwargs: Any,
) -> tuple[Block, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Convert a module; return a callable and its parameters and buffers in their stored dtypes.

    `(sym, arg_params, aux_params, target_dtype="float16", target_dtype_ops=None, fp32_ops=None,
    conditional_fp32_ops=None, excluded_sym_names=None, cast_optional_params=False)`; MXNet 2 has
    `input_dtypes` before `target_dtype`, and `cast_params_offline` at the end. With a
    `data_example` the module is converted immediately, otherwise on its first call.

    >>> net = nn.Sequential(nn.Linear(4, 2))
    >>> params = dict(net.named_parameters())
    >>> converted, params, _ = convert_model(net, params, {}, cast_optional_params=True)
    >>> params["0.weight"].dtype, converted(torch.ones(1, 4)).dtype
    (torch.float16, torch.float32)
    """
    if not isinstance(sym, nn.Module):
        raise AssertionError(
            "First argument to convert_model should be Symbol: here a torch.nn.Module, got"
            f" {type(sym).__name__}."
        )
    for position, params in (("Second", arg_params), ("Third", aux_params)):
        if not isinstance(params, dict):
            raise AssertionError(
                f"{position} argument to convert_model should be a dict of name to ndarray, got"
                f" {type(params).__name__}."
            )
    if args and isinstance(args[0], Mapping):
        args = args[1:]
    kwargs.pop("input_dtypes", None)
    block = Block(
        _with_params(sym, {**arg_params, **aux_params}),
        _parse_request("convert_model", args, kwargs),
    )
    _prepare(block, data_example)
    stored = block.params
    return (
        block,
        {name: stored[name] for name in arg_params},
        {name: stored[name] for name in aux_params},
    )


def convert_hybrid_block(
    block: nn.Module,
    *args: Any,
    data_example: Any = None,
    ctx: Any = None,
    device: Any = None,
    **kwargs: Any,
) -> Block:
    """Convert a module; return a callable with `forward`, `export` and `params`.

    MXNet 1: `(block, target_dtype="float16", target_dtype_ops=None, fp32_ops=None,
    conditional_fp32_ops=None, excluded_sym_names=None, ctx, cast_optional_params=False)`. MXNet 2:
    `(block, data_example, target_dtype, ..., device, cast_params_offline=False)`, which converts
    immediately.

    >>> block = convert_hybrid_block(nn.Linear(4, 2), target_dtype="bfloat16")
    >>> block.forward(torch.ones(1, 4)).dtype
    torch.float32
    """
    if not isinstance(block, nn.Module):
        raise AssertionError(
            "block input should be a HybridBlock: here a torch.nn.Module, got"
            f" {type(block).__name__}."
        )
    if args and _is_example(args[0]):
        data_example, args = args[0], args[1:]
    if len(args) > _DEVICE_POSITION:
        device = args[_DEVICE_POSITION]
    elif device is None:
        device = ctx
    if len(args) > _DEVICE_POSITION + 1:
        kwargs["cast_optional_params"] = args[_DEVICE_POSITION + 1]
    request = _parse_request("convert_hybrid_block", args[:_DEVICE_POSITION], kwargs)
    converted = Block(block, request, device=device)
    _prepare(converted, data_example)
    return converted


def convert_bucketing_module(
    bucketing_mod: BucketingModule, *args: Any, **kwargs: Any
) -> BucketingModule:
    """Convert the networks of a bucketing module, each for the input shapes of its buckets.

    `(bucketing_mod, target_dtype="float16", target_dtype_ops=None, fp32_ops=None,
    conditional_fp32_ops=None, excluded_sym_names=None, cast_optional_params=False)`.
    """
    if not isinstance(bucketing_mod, BucketingModule):
        raise AssertionError(
            f"module should be instance of bucketing module, got {type(bucketing_mod).__name__}."
        )
    if not bucketing_mod.buckets:
        raise AssertionError(
            "Bucketing Module should not be empty. Run it on a batch, or call switch_bucket(key),"
            " before it is converted."
        )
    request = _parse_request("convert_bucketing_module", args, kwargs)
    blocks: dict[nn.Module, Block] = {}

    def convert(network: nn.Module) -> Block:
        # Buckets that share a network share the converted one and its weights.
        if network not in blocks:
            blocks[network] = Block(network, request)
        return blocks[network]

    return bucketing_mod.map_networks(convert)


_DEVICE_POSITION = 5
"""Position of `ctx` or `device` among the arguments after the network."""


@dataclass(frozen=True)
class _ConvertArgs:
    """The arguments that follow those in which MXNet 1 and 2 differ, in the order of both."""

    target_dtype: Any = "float16"
    target_dtype_ops: list[str] | None = None
    fp32_ops: list[str] | None = None
    conditional_fp32_ops: list[Any] | None = None
    excluded_sym_names: list[str] | None = None
    cast_optional_params: bool = False
    cast_params_offline: bool = False

    def to_request(self) -> ConvertRequest:
        """Check the arguments and return the conversion options."""
        dtype = parse_target_dtype(
            self.target_dtype, "Only target_dtype float16 and bfloat16 are supported currently"
        )
        check_lists(dtype, self.target_dtype_ops, self.fp32_ops, self.conditional_fp32_ops)
        lists = policy_fields(
            dtype, self.target_dtype_ops, self.fp32_ops, self.conditional_fp32_ops
        )
        policy = Policy("O1", dtype, preset=PRESET, **lists)
        return ConvertRequest(
            policy,
            check_excluded_names(self.excluded_sym_names),
            self.cast_optional_params or self.cast_params_offline,
        )


def _parse_request(call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ConvertRequest:
    """Return the options of a conversion; raise `TypeError` in the name of the public call."""
    names = [field.name for field in fields(_ConvertArgs)]
    unexpected = sorted(kwargs.keys() - set(names))
    repeated = sorted(set(names[: len(args)]) & kwargs.keys())
    problem = None
    if unexpected:
        problem = f"an unexpected keyword argument {unexpected[0]!r}"
    elif repeated:
        problem = f"{repeated[0]!r} twice"
    elif len(args) > len(names):
        problem = f"{len(args) - len(names)} arguments too many"
    if problem is not None:
        raise TypeError(f"{call}() got {problem}. After the network it takes: {', '.join(names)}.")
    return _ConvertArgs(*args, **kwargs).to_request()


def _prepare(block: Block, example: Any) -> None:
    if example is not None:
        block.prepare(*(example if isinstance(example, list | tuple) else [example]))


def _is_example(argument: Any) -> bool:
    values = argument if isinstance(argument, list | tuple) else [argument]
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def _with_params(network: nn.Module, params: Params) -> nn.Module:
    """Return a copy of the network with these parameters and buffers loaded."""
    unknown = params.keys() - network.state_dict().keys()
    if unknown:
        raise AssertionError(
            f"The network has no parameters or buffers {sorted(unknown)}. It has:"
            f" {', '.join(network.state_dict())}."
        )
    copied = copy.deepcopy(network)
    copied.load_state_dict(dict(params), strict=False)
    return copied
