import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, relative_error
from torch import nn
from torch._higher_order_ops import while_loop

import mezzo

# torch looks for gradients where there are none when it runs a branch.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

X = torch.randn(2, 4)


def _converted(function, **modules):
    model = Calls(function, **modules)
    return model, mezzo.convert(model, (X,), dtype=HALF)


def test_branches_take_and_give_16_bits_where_all_of_them_do():
    def function(self, x):
        x = self.before(x)
        x = torch.cond(x.sum() > 0, lambda y: F.relu(self.left(y)), lambda y: torch.tanh(self.right(y)), (x,))
        return self.after(x)

    model, converted = _converted(function, before=nn.Linear(4, 4), left=nn.Linear(4, 4), right=nn.Linear(4, 4), after=nn.Linear(4, 4))
    # One for the input, one for the sum that decides, one for the output.
    assert converted.casts.after.count == 3
    assert relative_error(converted(X), model(X)) < 0.05
    assert {tensor.dtype for tensor in converted.artefact.programs[0].exported.state_dict.values()} == {HALF}


def test_a_branch_that_gives_float32_has_the_others_do_so():
    def function(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: y * 2, (x,))

    model, converted = _converted(function, left=nn.Linear(4, 4))
    for sign in (1, -1):
        assert relative_error(converted(sign * X.abs()), model(sign * X.abs())) < 0.05


def test_bodies_have_rows_under_their_own_names():
    _, converted = _converted(lambda self, x: torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: y * 2, (x,)), left=nn.Linear(4, 4))
    assert converted.plan.row("true_graph_0.linear").dtype == "bfloat16"
    assert converted.plan.row("false_graph_0.mul").dtype == "float32"


def test_nodes_in_a_body_can_be_excluded():
    model = Calls(lambda self, x: torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: y * 2, (x,)), left=nn.Linear(4, 4))
    converted = mezzo.convert(model, (X,), dtype=HALF, exclude="true_graph_0.linear")
    assert converted.plan.row("true_graph_0.linear").dtype == "float32"


def test_branches_inside_branches():
    def inner(self, y):
        return torch.cond(y.mean() > 0, lambda z: self.left(z), lambda z: self.right(z), (y,))

    model, converted = _converted(
        lambda self, x: torch.cond(x.sum() > 0, lambda y: inner(self, y), lambda y: self.left(y), (x,)), left=nn.Linear(4, 4), right=nn.Linear(4, 4)
    )
    for sign in (1, -1):
        assert relative_error(converted(sign * X.abs()), model(sign * X.abs())) < 0.05


def test_a_loop_keeps_what_it_hands_on_and_borrows_16_bit_weights():
    def function(self, x):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, torch.tanh(self.body(y))), (torch.tensor(0), self.first(x)))[1]

    model, converted = _converted(function, first=nn.Linear(4, 4), body=nn.Linear(4, 4))
    assert relative_error(converted(X), model(X)) < 0.05
    assert converted.artefact.programs[0].exported.state_dict["body.weight"].dtype is HALF
