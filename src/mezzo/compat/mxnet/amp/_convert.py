"""`convert_model`, `convert_hybrid_block` and `convert_bucketing_module`, in the call shapes of MXNet 1 and 2."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from mezzo.compat.mxnet._block import Block, ConvertRequest
from mezzo.compat.mxnet.amp._init import PRESET
from mezzo.compat.mxnet.amp._lists import check_lists, check_names, overrides, read_dtype
from mezzo.compat.mxnet.mod import BucketingModule
from mezzo.policy.policy import Policy

Params = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _ConvertArgs:
    """The words of a conversion after those that differ, in the order of both generations."""

    target_dtype: Any = "float16"
    target_dtype_ops: list[str] | None = None
    fp32_ops: list[str] | None = None
    conditional_fp32_ops: list[Any] | None = None
    excluded_sym_names: list[str] | None = None
    cast_optional_params: bool = False
    cast_params_offline: bool = False

    def wishes(self) -> ConvertRequest:
        """What is asked for, checked."""
        dtype = read_dtype(
            self.target_dtype, "Only target_dtype float16 and bfloat16 are supported currently"
        )
        check_lists(dtype, self.target_dtype_ops, self.fp32_ops, self.conditional_fp32_ops)
        lists = overrides(dtype, self.target_dtype_ops, self.fp32_ops, self.conditional_fp32_ops)
        policy = Policy("O1", dtype, preset=PRESET, **lists)
        return ConvertRequest(
            policy,
            check_names(self.excluded_sym_names),
            self.cast_optional_params or self.cast_params_offline,
        )


def _read(call: str, words: tuple[Any, ...], named: dict[str, Any]) -> ConvertRequest:
    """What a call asks for. What it has beyond its words is refused in its own name."""
    known = [field.name for field in fields(_ConvertArgs)]
    strange = sorted(named.keys() - set(known))
    twice = sorted(set(known[: len(words)]) & named.keys())
    if strange or twice or len(words) > len(known):
        problem = (
            f"an unexpected keyword argument {strange[0]!r}"
            if strange
            else f"{twice[0]!r} twice"
            if twice
            else f"{len(words) - len(known)} arguments too many"
        )
        raise TypeError(f"{call}() got {problem}. After the network it takes: {', '.join(known)}.")
    return _ConvertArgs(*words, **named).wishes()


def convert_model(
    sym: nn.Module,
    arg_params: Params,
    aux_params: Params,
    *words: Any,
    data_example: Any = None,
    **named: Any,
) -> tuple[Block, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A module with its parameters and buffers, converted: a callable, and both again in the dtypes in which they are stored.

    `(sym, arg_params, aux_params, target_dtype="float16", target_dtype_ops=None, fp32_ops=None,
    conditional_fp32_ops=None, excluded_sym_names=None, cast_optional_params=False)`; MXNet 2 has
    `input_dtypes` before `target_dtype`, and `cast_params_offline` at the end. With a
    `data_example` it is converted at once, without one at the first call.

    >>> net = nn.Sequential(nn.Linear(4, 2))
    >>> converted, args, aux = convert_model(net, dict(net.named_parameters()), {}, cast_optional_params=True)
    >>> args["0.weight"].dtype, converted(torch.ones(1, 4)).dtype
    (torch.float16, torch.float32)
    """
    if not isinstance(sym, nn.Module):
        raise AssertionError(
            "First argument to convert_model should be Symbol: here a torch.nn.Module, got"
            f" {type(sym).__name__}."
        )
    for place, params in (("Second", arg_params), ("Third", aux_params)):
        if not isinstance(params, dict):
            raise AssertionError(
                f"{place} argument to convert_model should be a dict of name to ndarray, got"
                f" {type(params).__name__}."
            )
    if words and isinstance(words[0], Mapping):
        words = words[1:]
    named.pop("input_dtypes", None)
    block = Block(_with(sym, {**arg_params, **aux_params}), _read("convert_model", words, named))
    _prepare(block, data_example)
    stored = block.params
    return (
        block,
        {name: stored[name] for name in arg_params},
        {name: stored[name] for name in aux_params},
    )


def convert_hybrid_block(
    block: nn.Module,
    *words: Any,
    data_example: Any = None,
    ctx: Any = None,
    device: Any = None,
    **named: Any,
) -> Block:
    """A module, converted: a callable with `forward`, `export` and `params`.

    MXNet 1: `(block, target_dtype="float16", target_dtype_ops=None, fp32_ops=None,
    conditional_fp32_ops=None, excluded_sym_names=None, ctx, cast_optional_params=False)`. MXNet 2:
    `(block, data_example, target_dtype, ..., device, cast_params_offline=False)`, converted at
    once.

    >>> convert_hybrid_block(nn.Linear(4, 2), target_dtype="bfloat16").forward(torch.ones(1, 4)).dtype
    torch.float32
    """
    if not isinstance(block, nn.Module):
        raise AssertionError(
            "block input should be a HybridBlock: here a torch.nn.Module, got"
            f" {type(block).__name__}."
        )
    if words and _is_example(words[0]):
        data_example, *rest = words
        words = tuple(rest)
    before, place, after = words[:_PLACE], words[_PLACE : _PLACE + 1], words[_PLACE + 1 :]
    if after:
        named["cast_optional_params"] = after[0]
    where = place[0] if place else device if device is not None else ctx
    made = Block(block, _read("convert_hybrid_block", before, named), device=where)
    _prepare(made, data_example)
    return made


def convert_bucketing_module(
    bucketing_mod: BucketingModule, *words: Any, **named: Any
) -> BucketingModule:
    """A bucketing module whose networks are converted, each for the sizes that its bucket is called with.

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
    wishes = _read("convert_bucketing_module", words, named)
    made: dict[nn.Module, Block] = {}

    def converted(network: nn.Module) -> Block:
        # Buckets that are one network there are one here, with its weights once.
        if network not in made:
            made[network] = Block(network, wishes)
        return made[network]

    return bucketing_mod.mapped(converted)


_PLACE = 5
"""Where `ctx` or `device` stands among the words."""


def _prepare(block: Block, example: Any) -> None:
    if example is not None:
        block.prepare(*(example if isinstance(example, list | tuple) else [example]))


def _is_example(word: Any) -> bool:
    several = word if isinstance(word, list | tuple) else [word]
    return bool(several) and all(isinstance(one, torch.Tensor) for one in several)


def _with(network: nn.Module, params: Params) -> nn.Module:
    """A network with these parameters and buffers; those that are not given stay its own."""
    unknown = params.keys() - network.state_dict().keys()
    if unknown:
        raise AssertionError(
            f"The network has no parameters or buffers {sorted(unknown)}. It has:"
            f" {', '.join(network.state_dict())}."
        )
    made = copy.deepcopy(network)
    made.load_state_dict(dict(params), strict=False)
    return made
