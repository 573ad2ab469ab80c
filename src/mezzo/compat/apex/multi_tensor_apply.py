"""Apex's `multi_tensor_apply` by name: programs import it, and ask whether its kernels are there."""

from __future__ import annotations

from typing import NoReturn

from mezzo._errors import UnsupportedError

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Runs a kernel of Apex's over lists of tensors; there is none here, and `available` says so.

    >>> MultiTensorApply(2048 * 32).available
    False
    """

    available = False
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, *_: object) -> NoReturn:
        """Refuse: what Apex's kernels do is done by torch's `_foreach` functions, and by mezzo's fused steps."""
        raise UnsupportedError(
            "Apex's multi-tensor kernels are not available here. Use torch's _foreach functions"
            " (torch._foreach_mul_, torch._foreach_norm), or an optimizer's own step."
        )


multi_tensor_applier = MultiTensorApply(2048 * 32)
