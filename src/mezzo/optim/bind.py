"""Which step an optimizer gets: the fused one where there is one for its type, else its own over stand-ins; none where it steps another optimizer."""

from __future__ import annotations

import torch

from mezzo._errors import UnsupportedError
from mezzo.optim.algorithms import ALGORITHMS, kind_of
from mezzo.optim.bound import Bound
from mezzo.optim.fused import FusedBound
from mezzo.optim.masters import Masters
from mezzo.scaling.wrapped import inner_optimizers

_WRAPPERS = {
    "AcceleratedOptimizer": "First decorate, then wrap: mezzo.decorate(model, optimizer, ...), then accelerator.prepare(model, optimizer).",
    "_FabricOptimizer": "First decorate, then wrap: mezzo.decorate(model, optimizer, ...), then fabric.setup(model, optimizer).",
    "ZeroRedundancyOptimizer": "Pass the one of this process: mezzo.decorate(model, optimizer.optim, ..., master='float32'), with parameters_as_bucket_view=False, "
    "and step the ZeroRedundancyOptimizer as before. Save optimizer.optim.state_dict() in every process: its own state_dict() leaves the master weights out.",
}
"""Wrappers that need more than the inner optimizer's name."""


def bind(optimizer: torch.optim.Optimizer, masters: Masters, *, clip_norm: float | None = None) -> Bound:
    """Let an optimizer's `step` run over exact weights."""
    refuse_wrapper(optimizer)
    kind = FusedBound if kind_of(optimizer) in ALGORITHMS else Bound
    return kind(optimizer, masters, clip_norm=clip_norm)


def refuse_wrapper(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps another one: that would update the 16-bit parameters, and not their master weights."""
    inner = inner_optimizers(optimizer)
    if not inner:
        return
    # Of wrappers in wrappers the innermost do the arithmetic.
    paths = [path for path, one in inner.items() if not inner_optimizers(one)]
    named = [f"optimizer{path}" for path in paths]
    known = next((remedy for kind in type(optimizer).__mro__ if (remedy := _WRAPPERS.get(kind.__name__))), None)
    passed = named[0] if len(named) == 1 else f"[{', '.join(named)}]"
    remedy = known or (
        f"Pass the inner one: mezzo.decorate(model, {passed}, ...), before it is wrapped where you make it yourself, and step the wrapper as before. Where the "
        "wrapper writes parameters too, as SAM does, leave master='float32': other masters start anew from what it writes. Where it averages parameters, as "
        "Lookahead does, use policy 'O1': its averages of 16-bit parameters would lose small updates."
    )
    raise UnsupportedError(
        f"{type(optimizer).__name__} steps another optimizer, {' and '.join(f'{path} ({type(inner[path]).__name__})' for path in paths)}, which would update the "
        f"parameters past what decorate binds to the step: master weights and clipping. {remedy}"
    )
