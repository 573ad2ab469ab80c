"""`mxnet.model`: converted networks to files and back."""

from __future__ import annotations

import os
from typing import Any

import torch

from mezzo.compat.mxnet._block import Block, Loaded, file_name

Params = dict[str, torch.Tensor]


def save_checkpoint(
    prefix: str | os.PathLike[str],
    epoch: int,
    symbol: Block,
    arg_params: Any = None,
    aux_params: Any = None,
    remove_amp_cast: bool = False,
) -> None:
    """Write a converted network to a file, with its casts. MXNet drops them unless `remove_amp_cast=False` is said; here they stay unless `True` is."""
    symbol.save(file_name(prefix, epoch), remove_amp_cast=remove_amp_cast)


def load_checkpoint(prefix: str | os.PathLike[str], epoch: int) -> tuple[Loaded, Params, Params]:
    """The network of a file, its parameters and its buffers."""
    network = Loaded(file_name(prefix, epoch))
    stored = network.params
    trained = set(network.converted._converted.programs[0].exported.graph_signature.parameters)
    return (
        network,
        {name: value for name, value in stored.items() if name in trained},
        {name: value for name, value in stored.items() if name not in trained},
    )
