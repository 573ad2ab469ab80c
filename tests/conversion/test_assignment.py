import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, node, planned
from torch import nn

from mezzo.conversion.assignment import carrier, maker
from mezzo.conversion.nodes import Read, deciding

X = torch.randn(2, 4)


def test_a_promoting_op_in_float32_takes_16_bits_beside_float32():
    module, plan = planned(Calls(lambda self, x: x + self.linear(x), linear=nn.Linear(4, 4)), X)
    add, linear, x = (node(module, name) for name in ("add", "linear", "args_0"))
    assert plan.choice.dtype_of(linear) is HALF
    assert plan.choice.input_dtype(add, Read("other", linear)) is None
    assert plan.choice.input_dtype(add, Read("self", x)) is torch.float32
    assert plan.choice.input_dtype(linear, Read("input", x)) is HALF


def test_norm_parameters_are_read_in_float32_beside_16_bits():
    module, plan = planned(
        nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)).eval(), torch.randn(2, 4, 3)
    )
    norm, weight = node(module, "batch_norm"), node(module, "p_1_weight")
    assert plan.choice.dtype_of(norm) is HALF
    assert plan.choice.input_dtype(norm, Read("weight", weight)) is torch.float32
    assert plan.choice.stored(weight) == (torch.float32,)


def test_one_result_of_several_has_the_dtype_of_its_op():
    module, plan = planned(
        Calls(
            lambda self, x: F.softmax(self.linear(x).chunk(2, -1)[1], -1), linear=nn.Linear(4, 4)
        ),
        X,
    )
    element = next(one for one in module.graph.nodes if "getitem" in one.name)
    assert maker(element).name == "chunk"
    assert plan.choice.dtype_of(element) is HALF


def test_a_weight_whose_readers_disagree_is_stored_twice():
    module, plan = planned(
        Calls(lambda self, x: (self.linear(x), self.linear.weight.exp()), linear=nn.Linear(4, 4)), X
    )
    weight = next(one for one in module.graph.nodes if one.name.endswith("weight"))
    assert plan.choice.stored(weight) == (torch.float32, HALF)


def test_a_weight_that_nobody_reads_is_not_worth_four_bytes():
    module, plan = planned(Calls(lambda self, x: x + 1, linear=nn.Linear(4, 4)), X)
    assert plan.choice.stored(node(module, "p_linear_weight")) == (HALF,)


def test_a_promoting_op_comes_to_float32_through_a_weight_rather_than_a_cast():
    module, plan = planned(
        Calls(
            lambda self, x: F.softmax(self.linear(x) + self.linear.bias, -1), linear=nn.Linear(4, 4)
        ),
        X,
    )
    add = node(module, "add")
    assert carrier(add, plan.choice.roles, {}).node.name.endswith("bias")
    assert len(deciding(add)) == 2


def test_a_tensor_whose_shape_alone_is_read_is_not_cast():
    module, plan = planned(
        Calls(
            lambda self, x: x.sum(-1, keepdim=True).expand_as(self.linear(x)),
            linear=nn.Linear(4, 4),
        ),
        X,
    )
    expand, linear = node(module, "expand_as"), node(module, "linear")
    assert plan.choice.dtype_of(expand) is torch.float32
    assert plan.choice.input_dtype(expand, Read("other", linear)) is None
