"""`mxnet.contrib.amp`: where `mxnet.amp` was in MXNet 1."""

from mezzo.compat.mxnet import amp

__all__ = ["amp"]
