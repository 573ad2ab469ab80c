"""`mxnet.model`: save and load converted networks."""

from __future__ import annotations

import os
from typing import Any

import torch

from mezzo.compat.mxnet._block import Block, LoadedBlock, file_name

Params = dict[str, torch.Tensor]


def save_checkpoint(
    prefix: str | os.PathLike[str],
    epoch: int,
    symbol: Block,
    arg_params: Any = None,
    aux_params: Any = None,
    remove_amp_cast: bool = False,
) -> None:
    """Save a converted network.

    Differs from MXNet: `remove_amp_cast` defaults to False, so that the casts are saved.
    """
    symbol.save(file_name(prefix, epoch), remove_amp_cast=remove_amp_cast)


def load_checkpoint(
    prefix: str | os.PathLike[str], epoch: int
) -> tuple[LoadedBlock, Params, Params]:
    """Return the saved network, its parameters and its buffers."""
    network = LoadedBlock(file_name(prefix, epoch))
    tensors = network.params
    parameters = set(network.converted._converted.programs[0].exported.graph_signature.parameters)
    arg_params = {name: value for name, value in tensors.items() if name in parameters}
    aux_params = {name: value for name, value in tensors.items() if name not in parameters}
    return network, arg_params, aux_params
