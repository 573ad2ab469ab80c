"""MXNet's mixed precision on torch: `amp`, `gluon.Trainer`, `autograd`, and output layers.

>>> from mezzo.compat.mxnet import amp, gluon
>>> amp.list_lp16_ops("bfloat16")
['Convolution', 'Deconvolution', 'FullyConnected']
"""

from mezzo.compat.mxnet import amp, autograd, contrib, gluon, io, mod, model, nd

__all__ = ["amp", "autograd", "contrib", "gluon", "io", "mod", "model", "nd"]
