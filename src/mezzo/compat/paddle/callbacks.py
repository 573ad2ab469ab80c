"""`paddle.callbacks`: what wants to hear of a model's passes."""

from mezzo.compat.paddle.hapi._callbacks import Callback

__all__ = ["Callback"]
