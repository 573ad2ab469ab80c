"""Norm of gradients that are sharded over processes: compute it with the check, and clip by it.

One all-reduce carries the sum of squares and the flag of the scaler. Nothing synchronizes with the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch

from mezzo._torch import foreach_mul_
from mezzo.scaling.gradients import Flags, check_sorted, parameters
from mezzo.scaling.loss_scales import share_flags
from mezzo.scaling.mesh import ProcessMesh, local_gradients
from mezzo.scaling.step_result import FlaggedSource


class CheckedNorm(NamedTuple):
    """Norm of sharded gradients over all processes, as it was computed with their check."""

    gradients: list[torch.Tensor]
    """The local gradients that were checked."""
    norm: torch.Tensor

    def is_current(self, gradients: list[torch.Tensor]) -> bool:
        """Return whether no step hook has replaced a gradient since."""
        return len(gradients) == len(self.gradients) and all(map(is_, gradients, self.gradients))


def check_with_norm(
    optimizer: torch.optim.Optimizer,
    mesh: ProcessMesh,
    scale: torch.Tensor,
    flags: Flags,
    source: FlaggedSource,
) -> CheckedNorm | None:
    """Check the gradients of an optimizer, which are multiplied by `scale`, and return their norm.

    The flags hold for all processes of the mesh. None, with nothing checked, if there are no
    gradients.
    """
    owners = [parameter for parameter in parameters(optimizer) if parameter.grad is not None]
    if not owners:
        return None
    check_sorted(optimizer, None, flags, source, mesh=mesh)
    gradients = local_gradients(owners)
    total = share_flags(mesh, flags, mesh.square_sum(owners, gradients))
    return CheckedNorm(gradients, (total.sqrt() / scale.double()).float())


def clip_over(
    mesh: ProcessMesh,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    clip_norm: float | None,
    checked: CheckedNorm | None,
) -> torch.Tensor:
    """Clip gradients in place by their norm over all processes of a mesh; return the norm.

    Of each pair the second tensor has the unscaled gradient, if there is one, and the first tensor
    shows how many processes hold it. `checked` is the norm that the check has computed.
    """
    with_gradient = [pair for pair in pairs if pair[1].grad is not None]
    owners = [owner for owner, _ in with_gradient]
    gradients = local_gradients(unscaled for _, unscaled in with_gradient)
    if checked is not None and checked.is_current(local_gradients(owners)):
        norm = checked.norm
    else:
        squares = mesh.square_sum(owners, gradients) if owners else None
        norm = mesh.reduce(squares, None, pairs[0][0].device)[0].sqrt().float()
    if clip_norm is not None and gradients:
        # As torch's clip_grads_with_norm_, which does not take DTensors of several meshes.
        foreach_mul_(gradients, (clip_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
