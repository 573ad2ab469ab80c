"""`megengine.functional`: MegEngine's functions on torch's ops, and its losses.

Arguments have MegEngine's names, and results its shapes: `F.max(x, axis=1)` returns the values
alone. A function that is not there raises with torch's function of the same name.

>>> import torch
>>> import mezzo.compat.megengine.functional as F
>>> F.max(F.relu(torch.tensor([[-1.0, 2.0]])), axis=1)
tensor([2.])
"""

from torch.nn import functional as _functional

from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.compat.megengine.functional import elemwise, loss, math, metric, nn, tensor
from mezzo.compat.megengine.functional.elemwise import *  # noqa: F403 - as MegEngine does
from mezzo.compat.megengine.functional.math import *  # noqa: F403
from mezzo.compat.megengine.functional.metric import *  # noqa: F403
from mezzo.compat.megengine.functional.nn import *  # noqa: F403
from mezzo.compat.megengine.functional.tensor import *  # noqa: F403

__all__ = ["elemwise", "loss", "math", "metric", "nn", "tensor"]
__all__ += elemwise.__all__ + math.__all__ + metric.__all__ + nn.__all__ + tensor.__all__

__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=_functional)
