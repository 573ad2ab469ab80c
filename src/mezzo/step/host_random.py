"""Random numbers that a model draws on the host: a captured graph would repeat their effect.

Models with a layer drop draw a number for each layer and skip the layer if the number is less than
their probability. Most have a probability of 0: the number is drawn and has no effect. Such draws
are recorded in a capture and made again at each replay, so that the host's generator stays where an
eager run has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mezzo.prepare import rng_state

_LESS = {torch.Tensor.lt, torch.Tensor.__lt__, torch.lt, torch.less, torch.Tensor.less}


class HostDraws(TorchFunctionMode):
    """Records `torch.rand` on the host, and whether a number has an effect.

    >>> with HostDraws() as draws:
    ...     drops = bool(torch.rand([]) < 0.0), bool(torch.rand([]) < 0.5)
    >>> draws.shapes, draws.have_effect
    ([torch.Size([]), torch.Size([])], True)
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        """Shapes of the draws, in order."""
        self.have_effect = False
        """Whether a number was used for more than a comparison that is always false, such as
        `number < 0.0`."""
        self._drawn: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.device.type == "cpu" and "generator" not in (kwargs or {}):
            self.shapes.append(result.shape)
            self._drawn.append(result)
        elif self._uses_draw(args, kwargs or {}):
            self.have_effect = self.have_effect or not (func in _LESS and _is_never_less(args))
        return result

    def explain(self, before: dict[str, Any]) -> bool:
        """Return whether the draws had no effect, and nothing else has moved the generators.

        Restores the generators to the given state.
        """
        after = rng_state.capture_host_rng_state()
        rng_state.restore_rng_state(before)
        draw_again(tuple(self.shapes))
        explained = not rng_state.host_rng_has_moved(after)
        rng_state.restore_rng_state(before)
        return explained and not self.have_effect

    def _uses_draw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        values = (*args, *kwargs.values())
        return any(value is drawn for value in values for drawn in self._drawn)


def _is_never_less(args: tuple[Any, ...]) -> bool:
    """Return whether a draw from [0, 1) is compared with a number that is at most 0."""
    _, *others = args
    return len(others) == 1 and isinstance(others[0], int | float) and others[0] <= 0


def draw_again(shapes: tuple[torch.Size, ...]) -> None:
    """Move the host's generator as recorded draws did."""
    for shape in shapes:
        torch.rand(shape)
