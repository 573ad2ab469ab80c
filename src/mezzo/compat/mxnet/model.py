"""`mxnet.model`: checkpoints in MXNet's two files, and of converted torch networks in one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mezzo._errors import CheckpointError
from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._block import Block, LoadedBlock, file_name
from mezzo.compat.mxnet._ndarray import as_ndarray, as_tensor
from mezzo.compat.mxnet._params import read_params, write_params
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet.symbol import Symbol
from mezzo.compat.mxnet.symbol import load as load_symbol

__all__ = ["load_checkpoint", "load_params", "save_checkpoint"]

Params = dict[str, Any]
"""Arrays by name; tensors for a torch network."""
Path_ = str | os.PathLike[str]

_KINDS = ("arg", "aux")
_log = logging.getLogger()


def save_checkpoint(
    prefix: Path_,
    epoch: int,
    symbol: Symbol | Block | None,
    arg_params: Mapping[str, torch.Tensor] | None = None,
    aux_params: Mapping[str, torch.Tensor] | None = None,
    remove_amp_cast: bool | None = None,
) -> None:
    """Write `prefix-symbol.json` and `prefix-0000.params`, for a torch network `prefix-0000.pt2`.

    `remove_amp_cast=False` keeps the casts of a conversion. By default a symbol loses them, as in
    MXNet, with a line in the log; a converted torch network keeps them. Parameters that are stored
    in 16 bits stay so. A converted torch network has its parameters in its file.
    """
    if isinstance(symbol, Block):
        symbol.save(file_name(prefix, epoch), remove_amp_cast=bool(remove_amp_cast))
        return
    if symbol is not None and not isinstance(symbol, Symbol):
        raise TypeError(
            f"save_checkpoint got a symbol of type {type(symbol).__name__}. Pass what"
            " load_checkpoint or amp.convert_model returned, or None for the parameters only."
        )
    if symbol is not None:
        symbol.save(_symbol_file(prefix), remove_amp_cast is not False)
    named = {
        f"{kind}:{name}": as_tensor(value)
        for kind, params in zip(_KINDS, (arg_params, aux_params), strict=True)
        for name, value in (params or {}).items()
    }
    # A checkpoint that was loaded is written in the order that its file had.
    order = symbol.param_order if symbol is not None else ()
    names = dict.fromkeys([*(name for name in order if name in named), *named])
    write_params(_params_file(prefix, epoch), {name: named[name] for name in names})
    _log.info('Saved checkpoint to "%s"', _params_file(prefix, epoch))


def load_checkpoint(prefix: Path_, epoch: int) -> tuple[Any, Params, Params]:
    """Return the symbol, its parameters and its moving averages, by MXNet's names.

    Where there is no `prefix-symbol.json` but the `prefix-0000.pt2` of a converted torch network,
    that network and its tensors are returned; it runs as it is.
    """
    symbol_file = _symbol_file(prefix)
    if not Path(symbol_file).exists():
        network_file = file_name(prefix, epoch)
        if not Path(network_file).exists():
            raise FileNotFoundError(
                f"There is neither {symbol_file!r}, a symbol of MXNet, nor {network_file!r}, a"
                " converted torch network."
            )
        return _load_network(network_file)
    symbol = load_symbol(symbol_file)
    arrays = read_params(_params_file(prefix, epoch))
    arg_params, aux_params = _by_kind(arrays, _params_file(prefix, epoch))
    return Symbol(symbol.graph, tuple(arrays)), arg_params, aux_params


def load_params(prefix: Path_, epoch: int) -> tuple[Params, Params]:
    """Return the parameters and the moving averages of `prefix-0000.params`."""
    path = _params_file(prefix, epoch)
    return _by_kind(read_params(path), path)


def _by_kind(arrays: Mapping[str, torch.Tensor], path: str) -> tuple[Params, Params]:
    params: dict[str, Params] = {kind: {} for kind in _KINDS}
    for key, value in arrays.items():
        kind, separator, name = key.partition(":")
        if kind not in params or not separator:
            raise CheckpointError(
                f"{path!r} has an array {key!r}, expected names that start with arg: or aux:, as"
                " save_checkpoint writes them."
            )
        params[kind][name] = as_ndarray(value)
    return params["arg"], params["aux"]


def _load_network(path: str) -> tuple[LoadedBlock, Params, Params]:
    network = LoadedBlock(path)
    exported = network.converted._converted.programs[0].exported
    parameters = set(exported.graph_signature.parameters)
    tensors = network.params
    return (
        network,
        {name: value for name, value in tensors.items() if name in parameters},
        {name: value for name, value in tensors.items() if name not in parameters},
    )


def _symbol_file(prefix: Path_) -> str:
    return f"{os.fspath(prefix)}-symbol.json"


def _params_file(prefix: Path_, epoch: int) -> str:
    if not isinstance(epoch, int):
        raise TypeError(f"epoch should be an integer, got {epoch!r}.")
    return f"{os.fspath(prefix)}-{epoch:04d}.params"


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
