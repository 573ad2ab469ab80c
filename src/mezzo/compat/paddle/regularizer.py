"""`paddle.regularizer`: the weight decay of an optimizer, or of one parameter."""

from __future__ import annotations

from dataclasses import dataclass

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS

__all__ = ["L2Decay"]


@dataclass(frozen=True)
class L2Decay:
    """`paddle.regularizer.L2Decay`: add `coeff` times the weight to its gradient.

    >>> L2Decay(1e-4).coeff
    0.0001
    """

    coeff: float = 0.0
    """Factor of the weight."""

    @property
    def _coeff(self) -> float:
        return self.coeff


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
