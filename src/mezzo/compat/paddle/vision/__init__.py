"""`paddle.vision`: transforms of images, and data sets that are read from local files."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.vision import datasets, transforms

__all__ = ["datasets", "transforms"]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
