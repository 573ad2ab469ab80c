"""`paddle.nn`, as far as an optimizer needs it: gradient clipping. Layers are torch's."""

from typing import NoReturn

from mezzo.compat.paddle._clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from mezzo.compat.paddle._substitutions import refuse

__all__ = ["ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue"]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    refuse("nn", name)
