from collections import Counter

import pytest
import torch
from support.graphs import HALF, planned
from support.zoo import ZOO
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.conversion.constraints import autocast_dtypes, moved_bytes
from mezzo.conversion.nodes import Role
from mezzo.conversion.plan import CastBytes


class _Casts(TorchDispatchMode):
    """Counts what torch.autocast really casts."""

    def __init__(self):
        super().__init__()
        self.seen = CastBytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and out.dtype is not args[0].dtype
            and out.is_floating_point()
            and args[0].is_floating_point()
        ):
            self.seen += CastBytes(1, args[0].nbytes + out.nbytes)
        return out


@pytest.mark.parametrize("name", ["mlp", "resnet50", "mobilenet", "gpt-tied", "vit"])
def test_the_casts_of_autocast_are_counted_as_torch_makes_them(name):
    import mezzo

    animal = ZOO[name]()
    # A weight is remembered only where it wants gradients.
    with _Casts() as casts, torch.autocast("cpu", dtype=HALF):
        animal.model(*animal.args)
    assert mezzo.convert(animal.model, animal.args, dtype=HALF).casts.before == casts.seen


def test_values_follow_their_inputs_and_the_lists():
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.ReLU())
    _, plan = planned(model, torch.randn(2, 4))
    listed = {"linear": True, "layer_norm": False}
    found = autocast_dtypes(plan.choice.roles, lambda node: listed.get(node.name), HALF)
    assert {
        node.name: half for node, half in found.items() if plan.choice.roles[node] is Role.OP
    } == {
        "relu": False,
        "linear": True,
        "relu_1": True,
        "layer_norm": False,
        "relu_2": False,
    }


def test_a_cast_reads_and_writes():
    assert moved_bytes(torch.empty(3, 5), torch.float32, HALF) == 15 * 6


def test_counts_add_up_and_print():
    assert CastBytes(1, 10) + CastBytes(2, 5) == CastBytes(3, 15)
    assert str(CastBytes(3, 1_500_000)) == "3 casts, 1.5 MB"
    assert Counter([CastBytes(), CastBytes()]) == {CastBytes(0, 0): 2}
