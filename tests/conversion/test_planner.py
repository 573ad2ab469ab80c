import pytest
import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, convert_options, node, planned, relative_error
from torch import nn
from torch._higher_order_ops import while_loop

import mezzo

X = torch.randn(2, 4)


def _in_half(model, *args, options=None):
    module, plan = planned(model, *args, options=options)
    return lambda name: plan.assignment.in_half[node(module, name)]


def test_an_undecided_op_between_16_bit_ops_runs_in_16_bits():
    in_half = _in_half(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), X)
    assert in_half("tanh")


def test_casts_are_placed_where_the_tensor_is_smallest():
    # Pooling makes the tensor smaller, so the cast to float32 comes after it. Repeating makes it
    # larger, so the cast comes before.
    pooled = _in_half(
        Calls(
            lambda self, x: F.softmax(F.max_pool1d(torch.tanh(self.conv(x)), 4), -1),
            conv=nn.Conv1d(4, 4, 1),
        ),
        torch.randn(2, 4, 8),
    )
    repeated = _in_half(
        Calls(
            lambda self, x: F.softmax(torch.tanh(self.conv(x)).repeat(1, 1, 4), -1),
            conv=nn.Conv1d(4, 4, 1),
        ),
        torch.randn(2, 4, 8),
    )
    assert (pooled("tanh"), pooled("max_pool1d")) == (True, True)
    assert repeated("repeat") is False


def test_a_custom_cost_function_moves_the_cut():
    def model():
        return Calls(
            lambda self, x: F.softmax(torch.tanh(self.linear(x)).repeat(1, 2), -1),
            linear=nn.Linear(4, 4),
        )

    costs = []

    def cost(count, source, target):
        costs.append((count, source, target))
        return 1.0

    assert _in_half(model(), X)("repeat") is False
    # If all casts cost the same, ties go to 16 bits.
    assert _in_half(model(), X, options=convert_options(cast_cost=cost))("repeat") is True
    assert (8 * 6, HALF, torch.float32) in costs


def test_inputs_may_be_16_bit_with_keep_io_dtypes_false():
    kept, free = (
        _in_half(nn.Linear(4, 4), X),
        _in_half(nn.Linear(4, 4), X, options=convert_options(keep_io_dtypes=False)),
    )
    assert kept("input") is False
    assert free("input") is True


def test_a_fill_has_the_dtype_in_which_it_is_read():
    in_half = _in_half(
        Calls(
            lambda self, x: (self.linear(torch.zeros(2, 4)), torch.ones(2, 4) + x),
            linear=nn.Linear(4, 4),
        ),
        X,
    )
    assert in_half("zeros") is True
    assert in_half("ones") is False


def test_matrices_of_a_recurrent_layer_are_rounded_and_its_vectors_are_not():
    module, plan = planned(
        Calls(lambda self, x: self.layer(x)[0], layer=nn.GRU(16, 64)), torch.randn(2, 16)
    )
    stored = {
        len(one.meta["val"].shape): plan.assignment.stored(one)
        for one in module.graph.find_nodes(op="placeholder")
        if "layer" in one.name
    }
    assert stored == {2: (HALF,), 1: (torch.float32,)}


def test_an_excluded_recurrent_layer_keeps_float32_weights():
    module, plan = planned(
        Calls(lambda self, x: self.layer(x)[0], layer=nn.GRU(16, 64)),
        torch.randn(2, 16),
        options=convert_options(exclude=("layer",)),
    )
    assert {
        plan.assignment.stored(one)
        for one in module.graph.find_nodes(op="placeholder")
        if "layer" in one.name
    } == {(torch.float32,)}


def test_parameters_that_are_only_added_and_multiplied_stay_float32():
    module, plan = planned(
        Calls(lambda self, x: x * self.norm.weight + self.norm.bias, norm=nn.LayerNorm(8)),
        torch.randn(2, 8),
    )
    assert {
        plan.assignment.stored(one)
        for one in module.graph.find_nodes(op="placeholder")
        if "norm" in one.name
    } == {(torch.float32,)}


# Branches and loops


# torch reads .grad of non-leaf tensors when it runs a branch.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


def _converted(function, **modules):
    model = Calls(function, **modules)
    return model, mezzo.convert(model, (X,), dtype=HALF)


def test_branches_take_and_return_16_bits_if_all_of_them_do():
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


def test_branches_return_float32_if_one_of_them_does():
    def function(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.left(y), lambda y: y * 2, (x,))

    model, converted = _converted(function, left=nn.Linear(4, 4))
    for sign in (1, -1):
        assert relative_error(converted(sign * X.abs()), model(sign * X.abs())) < 0.05


def test_nodes_in_a_body_have_rows_with_the_name_of_the_body():
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


def test_nested_branches_are_converted():
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


def _loop(body, *carried):
    return while_loop(
        lambda i, *_: i < 3, lambda i, *values: (i + 1, *body(*values)), (torch.tensor(0), *carried)
    )[1:]


def test_a_loop_carries_16_bits_and_reads_16_bit_weights():
    model, converted = _converted(
        lambda self, x: self.last(_loop(lambda y: (torch.tanh(self.body(y)),), self.first(x))[0]),
        first=nn.Linear(4, 4),
        body=nn.Linear(4, 4),
        last=nn.Linear(4, 4),
    )
    assert relative_error(converted(X), model(X)) < 0.05
    # One for the input and one for the output.
    assert converted.casts.after.count == 2
    assert converted._converted.programs[0].exported.state_dict["body.weight"].dtype is HALF


def test_a_loop_carries_float32_if_an_iteration_computes_it_or_the_model_passes_it():
    def function(self, x):
        return _loop(
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


def test_a_loop_without_iterations_returns_its_operands():
    _, converted = _converted(
        lambda self, x: while_loop(
            lambda i, y: i < 0, lambda i, y: (i + 1, self.body(y)), (torch.tensor(0), x)
        )[1],
        body=nn.Linear(4, 4),
    )
    assert torch.equal(converted(X), X)


def test_a_branch_inside_a_loop_takes_16_bits():
    def iteration(self, y):
        return (
            torch.cond(y[0, 0] > 0, lambda z: self.left(z), lambda z: F.relu(self.right(z)), (y,)),
        )

    layers = {name: nn.Linear(4, 4) for name in ("first", "left", "right", "last")}
    model, converted = _converted(
        lambda self, x: self.last(_loop(lambda y: iteration(self, y), self.first(x))[0]), **layers
    )
    assert relative_error(converted(X), model(X)) < 0.05
    inner = converted._converted.programs[
        0
    ].exported.graph_module.while_loop_body_graph_0.true_graph_0
    assert HALF in {one.meta["val"].dtype for one in inner.graph.find_nodes(op="placeholder")}
    assert converted.casts.after.count == 2
