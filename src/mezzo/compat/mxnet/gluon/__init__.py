"""`mxnet.gluon`: blocks, layers, losses, parameters and `Trainer`."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._parameter import Parameter, ParameterDict
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet._trainer import Trainer
from mezzo.compat.mxnet.gluon import data, loss, nn, utils
from mezzo.compat.mxnet.gluon.block import Block, HybridBlock
from mezzo.compat.mxnet.gluon.symbol_block import SymbolBlock

__all__ = [
    "Block",
    "HybridBlock",
    "Parameter",
    "ParameterDict",
    "SymbolBlock",
    "Trainer",
    "data",
    "loss",
    "nn",
    "utils",
]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
