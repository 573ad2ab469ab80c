"""`paddle.callbacks`: callbacks for `paddle.Model`."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.hapi._training_loop import Callback, LRScheduler

__all__ = ["Callback", "LRScheduler"]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
