"""The losses of `megengine.functional.nn`."""

from mezzo.compat.megengine.functional.loss import (
    binary_cross_entropy,
    cross_entropy,
    hinge_loss,
    l1_loss,
    square_loss,
)

__all__ = ["binary_cross_entropy", "cross_entropy", "hinge_loss", "l1_loss", "square_loss"]
