"""`paddle.callbacks`: the base class of callbacks for `paddle.Model`."""

from mezzo.compat.paddle.hapi._training_loop import Callback

__all__ = ["Callback"]
