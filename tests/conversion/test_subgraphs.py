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
        x = torch.cond(
            x.sum() > 0, lambda y: F.relu(self.left(y)), lambda y: torch.tanh(self.right(y)), (x,)
        )
        return self.after(x)

    model, converted = _converted(
        function,
        before=nn.Linear(4, 4),
        left=nn.Linear(4, 4),
        right=nn.Linear(4, 4),
        after=nn.Linear(4, 4),
    )
    # One for the input, one for the sum that decides, one for the output.
    assert converted.casts.after.count == 3
    assert relative_error(converted(X), model(X)) < 0.05
    assert {
        tensor.dtype for tensor in converted._converted.programs[0].exported.state_dict.values()
    } == {HALF}


def test_a_branch_that_gives_float32_has_the_others_do_so():
    def function(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: y * 2, (x,))

    model, converted = _converted(function, left=nn.Linear(4, 4))
    for sign in (1, -1):
        assert relative_error(converted(sign * X.abs()), model(sign * X.abs())) < 0.05


def test_bodies_have_rows_under_their_own_names():
    _, converted = _converted(
        lambda self, x: torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: y * 2, (x,)),
        left=nn.Linear(4, 4),
    )
    assert converted.plan.row("true_graph_0.linear").dtype == "bfloat16"
    assert converted.plan.row("false_graph_0.mul").dtype == "float32"


def test_nodes_in_a_body_can_be_excluded():
    model = Calls(
        lambda self, x: torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: y * 2, (x,)),
        left=nn.Linear(4, 4),
    )
    converted = mezzo.convert(model, (X,), dtype=HALF, exclude="true_graph_0.linear")
    assert converted.plan.row("true_graph_0.linear").dtype == "float32"


def test_branches_inside_branches():
    def inner(self, y):
        return torch.cond(y.mean() > 0, lambda z: self.left(z), lambda z: self.right(z), (y,))

    model, converted = _converted(
        lambda self, x: torch.cond(
            x.sum() > 0, lambda y: inner(self, y), lambda y: self.left(y), (x,)
        ),
        left=nn.Linear(4, 4),
        right=nn.Linear(4, 4),
    )
    for sign in (1, -1):
        assert relative_error(converted(sign * X.abs()), model(sign * X.abs())) < 0.05


def _turns(body, *carried):
    return while_loop(
        lambda i, *_: i < 3, lambda i, *values: (i + 1, *body(*values)), (torch.tensor(0), *carried)
    )[1:]


def test_a_loop_hands_on_16_bits_and_borrows_16_bit_weights():
    model, converted = _converted(
        lambda self, x: self.last(_turns(lambda y: (torch.tanh(self.body(y)),), self.first(x))[0]),
        first=nn.Linear(4, 4),
        body=nn.Linear(4, 4),
        last=nn.Linear(4, 4),
    )
    assert relative_error(converted(X), model(X)) < 0.05
    # One for the input and one for the output.
    assert converted.casts.after.count == 2
    assert converted._converted.programs[0].exported.state_dict["body.weight"].dtype is HALF


def test_a_loop_hands_on_float32_where_a_turn_makes_it_or_the_model_passes_it():
    def function(self, x):
        return _turns(
            lambda y, total, kept: (self.body(y), total + y.sum(), self.body(kept)),
            self.first(x),
            torch.zeros(()),
            x,
        )

    model, converted = _converted(function, first=nn.Linear(4, 4), body=nn.Linear(4, 4))
    assert all(
        relative_error(found, expected) < 0.05
        for found, expected in zip(converted(X), model(X), strict=True)
    )
    body = converted._converted.programs[0].exported.graph_module.while_loop_body_graph_0
    assert [one.meta["val"].dtype for one in body.graph.find_nodes(op="placeholder")][:4] == [
        torch.int64,
        HALF,
        torch.float32,
        torch.float32,
    ]


def test_a_loop_without_a_turn_gives_what_it_was_passed():
    _, converted = _converted(
        lambda self, x: while_loop(
            lambda i, y: i < 0, lambda i, y: (i + 1, self.body(y)), (torch.tensor(0), x)
        )[1],
        body=nn.Linear(4, 4),
    )
    assert torch.equal(converted(X), X)


def test_bodies_of_bodies_take_what_the_ones_around_them_hand_on():
    def turn(self, y):
        return (
            torch.cond(y[0, 0] > 0, lambda z: self.left(z), lambda z: F.relu(self.right(z)), (y,)),
        )

    layers = {name: nn.Linear(4, 4) for name in ("first", "left", "right", "last")}
    model, converted = _converted(
        lambda self, x: self.last(_turns(lambda y: turn(self, y), self.first(x))[0]), **layers
    )
    assert relative_error(converted(X), model(X)) < 0.05
    inner = converted._converted.programs[
        0
    ].exported.graph_module.while_loop_body_graph_0.true_graph_0
    assert HALF in {one.meta["val"].dtype for one in inner.graph.find_nodes(op="placeholder")}
    assert converted.casts.after.count == 2
