"""`paddle.optimizer`: torch's optimizers and mezzo's under Paddle's names and arguments."""

from typing import NoReturn

from mezzo.compat.paddle._substitutions import refuse
from mezzo.compat.paddle.optimizer._adagrad import Adadelta, Adagrad, RMSProp
from mezzo.compat.paddle.optimizer._adam import Adam, Adamax, AdamW, Lamb
from mezzo.compat.paddle.optimizer._base import Optimizer
from mezzo.compat.paddle.optimizer._plain import SGD, Momentum

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Lamb", "Momentum", "Optimizer", "RMSProp"]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    refuse("optimizer", name)
