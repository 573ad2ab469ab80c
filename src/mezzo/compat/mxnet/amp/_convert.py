"""`mxnet.amp.convert_*`, with the signatures of MXNet 1 and of MXNet 2."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from mezzo.compat.mxnet._block import Block, ConvertRequest
from mezzo.compat.mxnet._bucketing import BucketingModule
from mezzo.compat.mxnet._ndarray import as_ndarray, as_tensor
from mezzo.compat.mxnet.amp._init import PRESET
from mezzo.compat.mxnet.amp._lists import (
    check_excluded_names,
    check_lists,
    list_conditional_fp32_ops,
    list_fp32_ops,
    list_lp16_ops,
    list_widest_type_cast,
    parse_target_dtype,
    policy_fields,
)
from mezzo.compat.mxnet.symbol import Symbol
from mezzo.compat.mxnet.symbol._casts import CastLists, insert_casts
from mezzo.policy.policy import Policy

Params = Mapping[str, torch.Tensor]

_log = logging.getLogger()


def convert_model(
    sym: nn.Module | Symbol,
    arg_params: Params,
    aux_params: Params,
    *args: Any,
    data_example: Any = None,
    **kwargs: Any,
) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Convert a symbol or a module; return it and its parameters in their stored dtypes.

    A symbol gets MXNet's cast nodes, which `save_checkpoint(..., remove_amp_cast=False)` keeps. Its
    parameters stay float32 and are cast at every call; with `cast_optional_params=True` those that
    only 16-bit ops use are stored in 16 bits. The dicts that were passed are not changed.

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
    if not isinstance(sym, nn.Module | Symbol):
        raise AssertionError(
            "First argument to convert_model should be Symbol: here also a torch.nn.Module, got"
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
    if isinstance(sym, Symbol):
        options = _parse_arguments("convert_model", args, kwargs)
        return _convert_symbol(sym, arg_params, aux_params, options)
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


def convert_symbol(
    sym: Symbol,
    target_dtype: Any = "float16",
    target_dtype_ops: list[str] | None = None,
    fp32_ops: list[str] | None = None,
    conditional_fp32_ops: list[Any] | None = None,
    excluded_sym_names: list[str] | None = None,
    data_names: list[str] | None = None,
    cast_optional_params: bool = False,
) -> Symbol:
    """Return a symbol with MXNet's cast nodes, without its parameters.

    All variables but the `data_names` are float32 parameters. By default the data are `data` and
    the labels.
    """
    if not isinstance(sym, Symbol):
        raise AssertionError(
            f"First argument to convert_symbol should be Symbol, got {type(sym).__name__}."
        )
    data = {"data", *sym.label_names()} if data_names is None else set(data_names)
    options = _ConvertArgs(
        target_dtype,
        target_dtype_ops,
        fp32_ops,
        conditional_fp32_ops,
        excluded_sym_names,
        cast_optional_params,
    )
    dtypes = {name: torch.float32 for name in sym.list_inputs() if name not in data}
    return _convert_graph(sym, dtypes, options)[0]


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
    _check_device(device)
    request = _parse_request("convert_hybrid_block", args[:_DEVICE_POSITION], kwargs)
    converted = Block(block, request, device=device)
    _prepare(converted, data_example)
    return converted


def _check_device(device: Any) -> None:
    """Raise `ValueError` for a string that names no device."""
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"ctx={device!r} is no device. Pass mx.cpu() or mx.gpu(0).") from error


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
    options = _parse_arguments("convert_bucketing_module", args, kwargs)
    if isinstance(bucketing_mod.symbol, Symbol):
        return _convert_symbols(bucketing_mod, options)
    request = options.to_request()
    blocks: dict[nn.Module, Block] = {}

    def convert(network: nn.Module) -> Block:
        # Buckets that share a network share the converted one and its weights.
        if network not in blocks:
            blocks[network] = Block(network, request)
        return blocks[network]

    return bucketing_mod.map_networks(convert)


def _convert_symbols(module: BucketingModule, options: _ConvertArgs) -> BucketingModule:
    """Convert the symbols of a bucketing module, which share their parameters."""
    arg_params, aux_params = module.get_params()
    converted = module.map_networks(
        lambda symbol: _convert_symbol(symbol, arg_params, aux_params, options)[0]
    )
    _, stored_args, stored_aux = _convert_symbol(module.symbol, arg_params, aux_params, options)
    converted.copy_binding(module, stored_args, stored_aux)
    return converted


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

    @property
    def cast_params(self) -> bool:
        """Whether parameters are stored in 16 bits: the option of MXNet 1 or of MXNet 2."""
        return self.cast_optional_params or self.cast_params_offline

    def check_lists(self) -> torch.dtype:
        """Check the dtype and the op lists; return the dtype."""
        dtype = parse_target_dtype(
            self.target_dtype, "Only target_dtype float16 and bfloat16 are supported currently"
        )
        check_lists(dtype, self.target_dtype_ops, self.fp32_ops, self.conditional_fp32_ops)
        return dtype

    def to_cast_lists(self) -> CastLists:
        """Check the arguments and return MXNet's op lists; those not passed are the defaults."""
        dtype = self.check_lists()
        target, full, conditions = (
            self.target_dtype_ops,
            self.fp32_ops,
            self.conditional_fp32_ops,
        )
        return CastLists(
            dtype,
            frozenset(list_lp16_ops(dtype) if target is None else target),
            frozenset(list_fp32_ops(dtype) if full is None else full),
            frozenset(list_widest_type_cast(dtype)),
            list_conditional_fp32_ops(dtype) if conditions is None else conditions,
            frozenset(check_excluded_names(self.excluded_sym_names)),
        )

    def to_request(self) -> ConvertRequest:
        """Check the arguments and return the conversion options."""
        dtype = self.check_lists()
        lists = policy_fields(
            dtype, self.target_dtype_ops, self.fp32_ops, self.conditional_fp32_ops
        )
        policy = Policy("O1", dtype, preset=PRESET, **lists)
        return ConvertRequest(
            policy,
            check_excluded_names(self.excluded_sym_names),
            self.cast_params,
        )


def _parse_request(call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ConvertRequest:
    """Return the options of a conversion."""
    return _parse_arguments(call, args, kwargs).to_request()


def _parse_arguments(call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _ConvertArgs:
    """Return the arguments; raise `TypeError` in the name of the public call."""
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
    return _ConvertArgs(*args, **kwargs)


def _convert_graph(
    symbol: Symbol, dtypes: Mapping[str, torch.dtype], options: _ConvertArgs
) -> tuple[Symbol, set[str]]:
    """Return the converted symbol, and the parameters that are stored in 16 bits."""
    lists = options.to_cast_lists()
    missing = lists.excluded - {node.name for node in symbol.graph.nodes}
    if missing:
        _log.warning(
            "excluded_sym_names are not present in the network. Missing nodes: %s", sorted(missing)
        )
    graph, stored = insert_casts(symbol.graph, lists, dtypes, cast_params=options.cast_params)
    return Symbol(graph, symbol.param_order), stored


def _convert_symbol(
    symbol: Symbol, arg_params: Params, aux_params: Params, options: _ConvertArgs
) -> tuple[Symbol, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    params = {**arg_params, **aux_params}
    dtypes = {name: as_tensor(value).dtype for name, value in params.items()}
    converted, stored = _convert_graph(symbol, dtypes, options)
    dtype = options.check_lists()

    def cast_stored(values: Params) -> dict[str, torch.Tensor]:
        return {
            name: as_ndarray(as_tensor(value).to(dtype)) if name in stored else value
            for name, value in values.items()
        }

    return converted, cast_stored(arg_params), cast_stored(aux_params)


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
    state = network.state_dict()
    for name, value in params.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape != tuple(state[name].shape):
            raise AssertionError(
                f"The parameter {name!r} of the network has shape {tuple(state[name].shape)}, got"
                f" {shape}. Pass the parameters of this network."
            )
    copied = copy.deepcopy(network)
    copied.load_state_dict(dict(params), strict=False)
    return copied
