"""`mxnet.mod`: `Module` for inference, and `BucketingModule` with one network per bucket."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._bucketing import BucketingModule
from mezzo.compat.mxnet._module import Module
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = ["BucketingModule", "Module"]

__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
