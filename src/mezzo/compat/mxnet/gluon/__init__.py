"""`mxnet.gluon`, as far as loss scaling needs it: the `Trainer`. Blocks are torch's modules."""

from mezzo.compat.mxnet.gluon.trainer import Trainer

__all__ = ["Trainer"]
