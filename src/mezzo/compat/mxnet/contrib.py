"""`mxnet.contrib.amp`: MXNet 1's path of `mxnet.amp`."""

from mezzo.compat.mxnet import amp

__all__ = ["amp"]
