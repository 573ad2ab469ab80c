"""`mxnet.symbol`: graphs of MXNet, from its `-symbol.json` files."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS
from mezzo.compat.mxnet.symbol._model import SymbolModel
from mezzo.compat.mxnet.symbol._symbol import Symbol, load, load_json

__all__ = ["Symbol", "SymbolModel", "load", "load_json"]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
