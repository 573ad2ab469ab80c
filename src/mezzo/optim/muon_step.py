"""Muon: the step of `torch.optim.Muon`, with matrices of equal shape orthogonalized together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mezzo._torch import foreach_copy_
from mezzo.optim.capturable_step import Batch, CapturableBinding
from mezzo.optim.flat_values import FlatValues, kept_if, views_like

_MATRIX = 2
"""Dimensions of a matrix."""


class MuonBinding(CapturableBinding):
    """A bound Muon. Momentum and weights are float32, Newton-Schulz iterations bfloat16.

    torch steps matrix after matrix; here matrices of one shape share their launches. Both round
    alike except where a batched product of bfloat16 sums in another order.
    """

    device_types = ("cuda", "cpu")

    def _is_supported(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> bool:
        return parameter.dim() == _MATRIX and super()._is_supported(parameter, gradient, group)

    def _batch_key(self, parameter: torch.Tensor) -> tuple[Any, ...]:
        return *super()._batch_key(parameter), parameter.shape, parameter.stride()

    def _update(
        self,
        batch: Batch,
        values: FlatValues,
        gradients: torch.Tensor,
        rates: Sequence[torch.Tensor],
        skipped: torch.Tensor | None,
    ) -> None:
        group, rate = self.optimizer.param_groups[batch.group], rates[batch.group]
        update = self._momentum(batch, gradients, group, skipped)
        shape = batch.parameters[0].shape
        # In memory order: a parameter may be stored as its transpose, whose result is transposed.
        stored = shape if batch.parameters[0].is_contiguous() else shape[::-1]
        orthogonal = orthogonalize(
            update.view(-1, *stored), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        weights = values.flat.view(-1, *stored)
        weights.mul_(1 - rate * group["weight_decay"])
        ratio = rate_ratio(shape, group["adjust_lr_fn"])
        weights.addcmul_(orthogonal.float(), rate * ratio, value=-1)

    def _momentum(
        self,
        batch: Batch,
        gradients: torch.Tensor,
        group: dict[str, Any],
        skipped: torch.Tensor | None,
    ) -> torch.Tensor:
        """Update the momentum buffers of a batch; return the update to orthogonalize."""
        states = [self.optimizer.state[parameter] for parameter in batch.parameters]
        for state, parameter in zip(states, batch.parameters, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
        buffers = [state["momentum_buffer"] for state in states]
        before = torch.empty_like(gradients)
        # A loaded buffer may have other strides than its parameter.
        foreach_copy_(views_like(before, batch.parameters), buffers)
        after = before.lerp(gradients, 1 - group["momentum"])
        foreach_copy_(buffers, views_like(kept_if(skipped, before, after), batch.parameters))
        return gradients.lerp(after, group["momentum"]) if group["nesterov"] else after


def orthogonalize(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Orthogonalize stacked matrices by Newton-Schulz iterations in bfloat16, as torch's Muon does.

    Singular values become roughly 1.

    >>> coefficients = (3.4445, -4.7750, 2.0315)
    >>> _ = torch.manual_seed(0)
    >>> result = orthogonalize(torch.randn(2, 8, 4), coefficients, 5, 1e-7)
    >>> values = torch.linalg.svdvals(result.float())
    >>> 0.6 < values.min() < values.max() < 1.3
    tensor(True)
    """
    a, b, c = coefficients
    result = matrices.bfloat16()
    if matrices.shape[-2] > matrices.shape[-1]:
        # The smaller Gram matrix.
        result = result.mT
    norm = torch.linalg.vector_norm(result, dim=(-2, -1), keepdim=True)
    result = result / norm.clamp(min=eps)
    for _ in range(steps):
        gram = result @ result.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        result = torch.baddbmm(result, polynomial, result, beta=a)
    return result.mT if matrices.shape[-2] > matrices.shape[-1] else result


def rate_ratio(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Return the factor of the learning rate for a matrix of this shape.

    >>> rate_ratio((8, 2), None), rate_ratio((2, 8), "original")
    (2.0, 1.0)
    >>> round(rate_ratio((4, 16), "match_rms_adamw"), 6)
    0.8
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
