"""Paddle's high-level interface: `Model`."""

from mezzo.compat.paddle.hapi._callbacks import Callback
from mezzo.compat.paddle.hapi._model import Model

__all__ = ["Callback", "Model"]
