"""Which step an optimizer gets."""

from __future__ import annotations

import pytest
import torch

from mezzo.optim.attach import bind_optimizer
from mezzo.optim.binding import OptimizerBinding
from mezzo.optim.fused_algorithms import ALGORITHMS
from mezzo.optim.fused_step import FusedBinding
from mezzo.optim.master_weights import MasterWeights


class Careful(torch.optim.SGD):
    """A subclass that may do something else in its step."""


class Renamed(torch.optim.SGD):
    """A subclass that says that it does nothing else."""

    steps_as = torch.optim.SGD


class Inherits(Renamed):
    """A subclass of that one, which says nothing."""


@pytest.mark.parametrize("kind", [*ALGORITHMS, Renamed], ids=lambda kind: kind.__name__)
def test_known_optimizers_get_the_fused_step(kind: type[torch.optim.Optimizer]) -> None:
    assert (
        type(bind_optimizer(kind([torch.nn.Parameter(torch.ones(2))], lr=0.1), MasterWeights()))
        is FusedBinding
    )


@pytest.mark.parametrize(
    "kind",
    [torch.optim.RMSprop, torch.optim.NAdam, Careful, Inherits],
    ids=lambda kind: kind.__name__,
)
def test_others_and_subclasses_get_their_own_over_stand_ins(
    kind: type[torch.optim.Optimizer],
) -> None:
    assert (
        type(bind_optimizer(kind([torch.nn.Parameter(torch.ones(2))], lr=0.1), MasterWeights()))
        is OptimizerBinding
    )
