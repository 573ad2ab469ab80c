import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, names, node, planned
from torch import nn

from mezzo.conversion.pipeline import apply_plan

X = torch.randn(2, 4)


def _applied(model, *args):
    module, plan = planned(model, *args)
    apply_plan(module, plan, {})
    return module


def test_a_value_is_cast_once_for_all_who_read_it():
    module = _applied(
        Calls(
            lambda self, x: self.first(x) @ self.second(x).t(),
            first=nn.Linear(4, 4),
            second=nn.Linear(4, 4),
        ),
        X,
    )
    assert names(module).count("aten.to.dtype") == 2
    assert node(module, "args_0_bfloat16").args == (node(module, "args_0"), HALF)


def test_what_is_written_between_two_reads_is_cast_for_each():
    def function(self, x):
        made = torch.zeros(2, 4)
        view = made.view(8)
        before = self.first(made)
        view += 1
        return before, self.first(made)

    module = _applied(Calls(function, first=nn.Linear(4, 4)), X)
    casts = [
        one
        for one in module.graph.nodes
        if one.target is torch.ops.aten.to.dtype and one.args[0].name == "zeros"
    ]
    assert len(casts) == 2


def test_what_the_model_widens_is_read_as_it_was_by_those_who_would_cast_it_back():
    def function(self, x):
        wide = self.first(x).float()
        return self.first(wide), wide.softmax(-1), self.first(self.first(x).float())

    module = _applied(Calls(function, first=nn.Linear(4, 4)), X)
    first, second, third, last = (
        one for one in module.graph.nodes if one.target is torch.ops.aten.linear.default
    )
    assert second.args[0] is first
    # Who wants it wide still has it, and what nobody wants is gone.
    assert node(module, "softmax").args[0].args[:2] == (first, torch.float32)
    assert last.args[0] is third
    assert names(module).count("aten.to.dtype") == 1 + 1 + 2


def test_what_the_model_widens_and_then_writes_is_cast():
    def function(self, x):
        wide = self.first(x).float()
        view = wide.view(8)
        view += 1
        return self.first(wide)

    module = _applied(Calls(function, first=nn.Linear(4, 4)), X)
    second = [one for one in module.graph.nodes if one.target is torch.ops.aten.linear.default][1]
    assert second.args[0].target is torch.ops.aten.to.dtype


def test_example_values_are_brought_up_to_date():
    module = _applied(
        Calls(lambda self, x: F.relu(self.first(x)).chunk(2, -1)[0], first=nn.Linear(4, 4)), X
    )
    assert node(module, "relu").meta["val"].dtype is HALF
    assert [one.dtype for one in node(module, "chunk").meta["val"]] == [HALF, HALF]
    assert node(module, "p_first_weight").meta["val"].dtype is HALF
    assert node(module, "args_0").meta["val"].dtype is torch.float32


def test_a_tensor_of_one_number_is_made_in_its_dtype():
    module = _applied(
        Calls(lambda self, x: self.first(torch.zeros(2, 4)), first=nn.Linear(4, 4)), X
    )
    assert node(module, "zeros").kwargs["dtype"] is HALF


def test_what_is_written_after_the_model_widened_it_is_not_read_in_its_place():
    def function(self, x):
        narrow = self.first(x)
        wide = narrow.float()
        narrow.zero_()
        return self.second(wide), narrow

    module = _applied(Calls(function, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), X)
    assert node(module, "linear_1").args[0] is not node(module, "linear")
