"""`paddle.callbacks`: what wants to hear of a model's passes."""

from mezzo.compat.paddle.hapi._training_loop import Callback

__all__ = ["Callback"]
