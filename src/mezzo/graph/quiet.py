"""torch's loggers held back while mezzo says the same in a line, or knows better."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*names: str, below: int = logging.ERROR) -> Iterator[None]:
    """Hold back what some loggers say below a level; afterwards they speak as before.

    >>> with quiet("torch.export"):
    ...     logging.getLogger("torch.export").isEnabledFor(logging.WARNING)
    False
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(below)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
