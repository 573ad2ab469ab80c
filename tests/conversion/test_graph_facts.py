import pytest
import torch
import torch.nn.functional as F
from support.graphs import Calls, node, planned, words
from torch import nn

import mezzo
from mezzo.conversion.constraints import AS_AUTOCAST, UNDECIDED
from mezzo.conversion.nodes import Role

X = torch.randn(2, 4)


def _survey(function, *args, said=None, **modules):
    module, plan = planned(Calls(function, **modules), *(args or (X,)), said=said)
    return plan, lambda name: node(module, name)


def test_nothing_runs_in_fewer_bits_than_under_autocast():
    # autocast adds float32 to 16-bit numbers in float32, and so does this; a byte-counting cut
    # alone would round the sum.
    plan, named = _survey(
        lambda self, x: self.second(x + self.first(x)),
        first=nn.Linear(4, 4),
        second=nn.Linear(4, 4),
    )
    assert plan.pins[named("add")] is AS_AUTOCAST
    assert plan.pins[named("linear")].half is True


def test_an_exact_op_that_everybody_rounds_is_open():
    plan, named = _survey(
        lambda self, x: self.first(F.relu(x.t())), torch.randn(4, 2), first=nn.Linear(4, 4)
    )
    assert plan.pins[named("relu")] is UNDECIDED
    assert plan.pins[named("t")] is UNDECIDED


def test_an_exact_op_that_somebody_reads_unrounded_is_not():
    plan, named = _survey(
        lambda self, x: (self.first(F.relu(x)), F.relu(x).sum()), first=nn.Linear(4, 4)
    )
    assert plan.pins[named("relu")] is UNDECIDED
    assert plan.pins[named("relu_1")] is AS_AUTOCAST


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["float64", "float16"])
def test_a_cast_of_the_model_to_another_dtype_than_the_program_s_reads_unrounded(dtype):
    plan, named = _survey(
        lambda self, x: (self.first(y := F.relu(x)), y.to(dtype)), first=nn.Linear(4, 4)
    )
    assert plan.pins[named("relu")] is AS_AUTOCAST


def test_weights_inputs_and_written_buffers_are_told_apart():
    model = nn.BatchNorm1d(4).train()
    module, plan = planned(model, X)
    found = {one.name: role for one, role in plan.choice.roles.items()}
    assert found["p_weight"] is Role.WEIGHT
    assert found["b_running_mean"] is Role.INPUT
    assert found["b_num_batches_tracked"] is Role.SILENT
    assert node(module, "b_running_mean") in plan.written


def test_what_is_written_through_a_view_keeps_its_dtype():
    def function(self, x):
        made = torch.zeros(2, 4)
        made[0] = self.first(x)[0]
        return self.first(made)

    plan, named = _survey(function, first=nn.Linear(4, 4))
    assert plan.choice.roles[named("zeros")] is Role.FIXED
    assert "written in place" in plan.pins[named("copy_")].reason


def test_weights_beyond_the_range_of_float16_keep_their_op_in_float32():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = 1e5
    module, plan = planned(model, X, said=words(mezzo.Policy("O1", "float16"), dtype=torch.float16))
    assert (
        plan.pins[node(module, "linear")].reason
        == "'0.weight' holds numbers beyond the range of float16"
    )
    assert plan.pins[node(module, "linear_1")].half is True


def test_an_unknown_op_and_a_foreign_dtype_are_fixed():
    plan, named = _survey(lambda _, x: x.double() + 1)
    assert plan.choice.roles[named("add")] is Role.FIXED
    assert plan.pins[named("add")].reason == "already float64: left alone"
    assert plan.pins[named("to")].reason == "the model's own cast"
