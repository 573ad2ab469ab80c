"""`mxnet.contrib.amp`: MXNet 1's path of `mxnet.amp`."""

import sys

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet import amp
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = ["amp"]

# For `import mxnet.contrib.amp`: the same module under its other name.
sys.modules[f"{__name__}.amp"] = amp
__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
