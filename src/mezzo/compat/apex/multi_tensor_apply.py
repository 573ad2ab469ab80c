"""`apex.multi_tensor_apply`: importable, and reports that Apex's kernels are not available."""

from __future__ import annotations

from typing import NoReturn

from mezzo._errors import UnsupportedError
from mezzo.compat._missing import module_getattr
from mezzo.compat.apex._substitutions import SUBSTITUTIONS

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Stand in for Apex's launcher of kernels over lists of tensors; `available` is False.

    >>> MultiTensorApply(2048 * 32).available
    False
    """

    available = False
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, *_: object) -> NoReturn:
        """Raise: torch's `_foreach` functions and mezzo's fused steps replace these kernels."""
        raise UnsupportedError(
            "Apex's multi-tensor kernels are not available here. Use torch's foreach functions"
            " or an optimizer's own step."
        )


multi_tensor_applier = MultiTensorApply(2048 * 32)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
