import pytest
import torch
import torch.nn.functional as F
from support.graphs import Calls, convert_options, graph, node
from torch import nn

import mezzo
from mezzo.conversion.options import (
    check_options,
    matching_condition,
    matching_exclusion,
    module_rule,
    out_of_range,
    read_exclude,
    read_lists,
)
from mezzo.policy.types import Conditional, Rule

X = torch.randn(2, 4)


def _checked(module, options):
    nodes = list(module.graph.nodes)
    check_options(options, nodes, [one.name for one in nodes])


def test_overlapping_lists_raise():
    with pytest.raises(mezzo.PolicyError, match="half= and full= both list 'softmax'"):
        read_lists({"softmax"}, {"softmax"}, ())


def test_an_op_that_is_not_in_the_graph_raises_with_those_that_are():
    module = graph(nn.Linear(4, 4), X)
    with pytest.raises(
        mezzo.PolicyError,
        match=(
            r"half= lists 'bilinear', and no such op is in the graph\. Did you mean 'linear'\? Its"
            r" ops: linear"
        ),
    ):
        _checked(module, convert_options(half=frozenset({"bilinear"})))
    with pytest.raises(mezzo.PolicyError, match="conditional= lists 'softmax'"):
        _checked(module, convert_options(conditional=(Conditional("softmax", "dim", (-1,)),)))


def test_an_exclusion_that_matches_nothing_raises():
    module = graph(Calls(lambda self, x: self.head(x), head=nn.Linear(4, 4)), X)
    _checked(module, convert_options(exclude=("head", "he*", "linear")))
    with pytest.raises(
        mezzo.PolicyError, match="exclude= has 'heads', which matches no node and no module"
    ):
        _checked(module, convert_options(exclude=("heads",)))
    with pytest.raises(mezzo.PolicyError, match="got 3"):
        read_exclude([3])


def test_nodes_and_modules_are_excluded_by_name_path_and_glob():
    module = graph(Calls(lambda self, x: self.head(x), head=nn.Sequential(nn.Linear(4, 4))), X)
    linear = node(module, "linear")
    for pattern in ("linear", "head", "head.0", "head.*", "lin*"):
        assert matching_exclusion(convert_options(exclude=(pattern,)), linear, "linear") == pattern
    assert matching_exclusion(convert_options(exclude=("body.*",)), linear, "linear") is None


def test_a_condition_matches_explicit_and_default_arguments():
    module = graph(lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), x.sum([-1])), X)
    conditions = (Conditional("gelu", "approximate", ("none",)), Conditional("sum", "dim", (-1,)))
    assert (
        matching_condition(conditions, "gelu", node(module, "gelu"))
        == "approximate='none': listed for these values by the user"
    )
    assert matching_condition(conditions, "gelu", node(module, "gelu_1")) is None
    assert matching_condition(conditions, "sum", node(module, "sum_1"))


def test_the_rule_of_the_innermost_module_applies():
    model = Calls(lambda self, x: self.body(x), body=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    module, modules = graph(model, X), dict(model.named_modules())
    options = convert_options(
        mezzo.Policy("O1", "bfloat16", modules={"body": "full", "body.1": "half"})
    )
    assert module_rule(options, node(module, "linear"), modules)[0] is Rule.FULL
    assert module_rule(options, node(module, "relu"), modules)[0] is Rule.HALF
    assert module_rule(convert_options(), node(module, "relu"), modules) is None


def test_numbers_in_a_call_must_fit_the_16_bit_dtype():
    module = graph(
        lambda x: (
            x.masked_fill(x > 0, -1e9),
            x + 1e-12,
            x.masked_fill(x > 0, float("-inf")),
            F.layer_norm(x, [4], eps=1e-12),
            x.expand(100000, 2, 4),
        ),
        X,
    )
    assert (
        out_of_range(node(module, "masked_fill"), torch.float16)
        == "-1e+09 is beyond the range of float16"
    )
    assert out_of_range(node(module, "masked_fill"), torch.bfloat16) is None
    assert out_of_range(node(module, "add"), torch.float16) == "1e-12 is too small for float16"
    for fine in ("masked_fill_1", "layer_norm", "expand"):
        assert out_of_range(node(module, fine), torch.float16) is None


@pytest.mark.parametrize("cost", [-1, float("inf"), float("nan"), "high", None], ids=str)
def test_a_cast_cost_must_be_a_finite_number(cost):
    with pytest.raises(
        mezzo.PolicyError,
        match=r"cast_cost= returned .* from float32 to bfloat16. Return a finite number",
    ):
        convert_options(cast_cost=lambda *_: cost).cast_cost_of(8, torch.float32, torch.bfloat16)
