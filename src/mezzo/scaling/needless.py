"""bfloat16 has the range of float32: a scaler beside it works, and is told once to be needless."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from mezzo import _events

_NODES = 512
"""How much of a loss's history is looked at, once."""
_REASON = "bfloat16 has the range of float32, so its gradients do not underflow"

_said = False


def say_if_needless(loss: torch.Tensor) -> None:
    """Say once a process that a loss computed in bfloat16 needs no scaling. float16 anywhere in it makes scaling worth its while."""
    global _said
    if not _said and half_dtypes(loss) == {torch.bfloat16}:
        _said = True
        if _events.listening():
            _events.emit(_events.ScalingNeedless("bfloat16", _REASON))
        # Seen from the line that called scale().
        warnings.warn(
            f"This loss was computed in bfloat16, which needs no gradient scaling: {_REASON}. GradScaler(enabled=False) saves its cost.",
            UserWarning,
            stacklevel=5,
        )


def half_dtypes(loss: torch.Tensor) -> set[torch.dtype]:
    """The 16-bit dtypes that a loss was computed in, as far as its graph tells.

    >>> half_dtypes(torch.ones(2, requires_grad=True).bfloat16().sum().float())
    {torch.bfloat16}
    """
    found, waiting = {loss.dtype}, [loss.grad_fn]
    seen: set[Any] = set()
    while waiting and len(seen) < _NODES:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.update(made.dtype for made in node._input_metadata)
        waiting.extend(earlier for earlier, _ in node.next_functions)
    return found & {torch.float16, torch.bfloat16}
