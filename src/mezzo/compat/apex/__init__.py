"""NVIDIA Apex's mixed precision, which was deleted upstream, on mezzo: `from mezzo.compat.apex import amp, optimizers`.

`install()` lets an unchanged `from apex import amp` work where Apex is not installed. What differs, and why, is in docs/coming-from/apex.md.
"""

from mezzo.compat.apex import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel
from mezzo.compat.apex._install import install, is_installed, uninstall

__all__ = ["amp", "fp16_utils", "install", "is_installed", "multi_tensor_apply", "normalization", "optimizers", "parallel", "uninstall"]
