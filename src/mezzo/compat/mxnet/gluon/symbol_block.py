"""`gluon.SymbolBlock`: a network from MXNet's exported files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._context import one_device
from mezzo.compat.mxnet._params import read_params
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet.gluon.block import HybridBlock
from mezzo.compat.mxnet.symbol import Symbol, SymbolModel, load

__all__ = ["SymbolBlock"]


class SymbolBlock(SymbolModel, HybridBlock):
    """`gluon.SymbolBlock`: a block that runs a symbol, from `HybridBlock.export` or a checkpoint.

    Its parameters have MXNet's names. It starts in evaluation mode.
    """

    def __init__(
        self, outputs: Symbol, inputs: str | Symbol | Sequence[Any], params: Mapping[str, Any]
    ) -> None:
        super().__init__(outputs.graph, params)
        given = [inputs] if isinstance(inputs, str | Symbol) else list(inputs)
        names = [entry.name if isinstance(entry, Symbol) else entry for entry in given]
        missing = [name for name in self.data_names if name not in names]
        if missing:
            raise RuntimeError(
                f"The symbol's variables {', '.join(missing)} have no parameters and are not among"
                f" the inputs {names}. Pass the .params file that belongs to the symbol."
            )
        self.data_names = [name for name in names if name in self.input_names]

    @staticmethod
    def imports(
        symbol_file: str | os.PathLike[str],
        input_names: str | Sequence[str],
        param_file: str | os.PathLike[str] | None = None,
        ctx: Any = None,
        **_: Any,
    ) -> SymbolBlock:
        """Load a network from the files that `export` or `save_checkpoint` of MXNet wrote.

        `net = SymbolBlock.imports("net-symbol.json", ["data"], "net-0000.params", ctx=mx.gpu(0))`.
        """
        arrays = {} if param_file is None else read_params(param_file)
        params: dict[str, torch.Tensor] = {
            name.removeprefix("arg:").removeprefix("aux:"): value for name, value in arrays.items()
        }
        block = SymbolBlock(load(symbol_file), input_names, params)
        return block.to(one_device(ctx))


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
