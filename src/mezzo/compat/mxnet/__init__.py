"""MXNet on torch: arrays and contexts, `gluon`, `autograd`, `amp`, modules and metrics.

>>> import mezzo.compat.mxnet as mx
>>> mx.nd.ones((2, 3), ctx=mx.cpu()).sum().asscalar()
6.0
>>> mx.amp.list_lp16_ops("bfloat16")
['Convolution', 'Deconvolution', 'FullyConnected']
"""

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet import (
    amp,
    autograd,
    contrib,
    gluon,
    initializer,
    io,
    lr_scheduler,
    metric,
    mod,
    model,
    nd,
    random,
    symbol,
    test_utils,
)
from mezzo.compat.mxnet import initializer as init
from mezzo.compat.mxnet import mod as module
from mezzo.compat.mxnet import nd as ndarray
from mezzo.compat.mxnet import symbol as sym
from mezzo.compat.mxnet._context import (
    Context,
    cpu,
    cpu_pinned,
    current_context,
    gpu,
    num_gpus,
)
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

waitall = nd.waitall

__all__ = [
    "Context",
    "amp",
    "autograd",
    "contrib",
    "cpu",
    "cpu_pinned",
    "current_context",
    "gluon",
    "gpu",
    "init",
    "initializer",
    "io",
    "lr_scheduler",
    "metric",
    "mod",
    "model",
    "module",
    "nd",
    "ndarray",
    "num_gpus",
    "random",
    "sym",
    "symbol",
    "test_utils",
    "waitall",
]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
