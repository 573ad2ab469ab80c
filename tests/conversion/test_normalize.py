import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls, graph, names, node
from torch import nn

from mezzo.conversion.nodes import OUTPUT_DTYPES
from mezzo.conversion.normalize import REGION_META

X = torch.randn(2, 4)


def test_an_in_place_op_without_aliases_becomes_functional():
    def function(x):
        y = x * 2
        y += x
        return F.relu_(y).view(8)

    assert names(graph(function, X)) == [
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.relu.default",
        "aten.view.default",
    ]


def test_the_functional_form_of_an_in_place_op_takes_the_same_arguments():
    def function(x):
        return (x * 2).pow_(-0.5), (x * 2).pow_(x), (x * 2).floor_divide_(x)

    assert names(graph(function, X))[1::2] == [
        "aten.pow.Tensor_Scalar",
        "aten.pow.Tensor_Tensor",
        "aten.floor_divide.default",
    ]


def test_an_in_place_op_on_an_aliased_tensor_stays():
    def function(x):
        y = x * 2
        seen = y.view(8)
        y += 1
        return seen

    assert "aten.add_.Tensor" in names(graph(function, X))


def test_an_in_place_op_on_a_buffer_stays():
    model = Calls(lambda self, x: x + self.norm.running_mean.add_(1), norm=nn.BatchNorm1d(4))
    assert "aten.add_.Tensor" in names(graph(model, X))


def test_dtype_asserts_are_dropped():
    assert names(graph(lambda x: x.float(), X)) == ["aten.to.dtype"]


def test_type_as_becomes_a_cast_to_an_explicit_dtype():
    found = node(graph(lambda x, y: x.type_as(y), X, X.double()), "type_as")
    assert found.target is torch.ops.aten.to.dtype
    assert found.args[1] is torch.float64


def test_a_region_of_the_same_dtype_is_inlined_and_its_values_become_float32():
    def function(self, x):
        with torch.autocast("cpu", dtype=HALF):
            return self.linear(x) + 1

    found = graph(Calls(function, linear=nn.Linear(4, 4)), X)
    assert names(found) == ["aten.linear.default", "aten.add.Tensor"]
    assert node(found, "linear").meta["val"].dtype is torch.float32
    assert node(found, "linear").meta[REGION_META] == "on"
    assert found.graph.output_node().meta[OUTPUT_DTYPES] == (HALF,)


def test_a_disabled_region_inside_an_enabled_one_is_marked_off():
    def function(self, x):
        with torch.autocast("cpu", dtype=HALF):
            x = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float())

    found = graph(Calls(function, linear=nn.Linear(4, 4)), X)
    assert [
        one.meta[REGION_META]
        for one in found.graph.nodes
        if one.target is torch.ops.aten.linear.default
    ] == ["on", "off"]


def test_a_region_of_another_dtype_is_not_inlined():
    def function(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.linear(x)

    assert "wrap_with_autocast" in names(graph(Calls(function, linear=nn.Linear(4, 4)), X))


def test_a_branch_inside_a_region_is_inlined_with_it():
    def function(_, x):
        with torch.autocast("cpu", enabled=False):
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    found = graph(Calls(function), X)
    assert "cond" in names(found)
    assert not [one for one in names(found) if "wrap" in one]
