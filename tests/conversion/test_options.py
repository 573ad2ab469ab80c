import pytest
import torch
import torch.nn.functional as F
from support.graphs import Calls, graph, node, words
from torch import nn

import mezzo
from mezzo.conversion.options import (
    check_options,
    condition,
    exclusion,
    module_rule,
    out_of_range,
    read_exclude,
    read_lists,
)
from mezzo.policy.types import Conditional, Rule

X = torch.randn(2, 4)


def _checked(module, said):
    nodes = list(module.graph.nodes)
    check_options(said, nodes, [one.name for one in nodes])


def test_lists_that_overlap_are_refused():
    with pytest.raises(mezzo.PolicyError, match="half= and full= both list 'softmax'"):
        read_lists({"softmax"}, {"softmax"}, ())


def test_an_op_that_is_not_in_the_graph_is_refused_with_those_that_are():
    module = graph(nn.Linear(4, 4), X)
    with pytest.raises(
        mezzo.PolicyError,
        match=(
            r"half= lists 'bilinear', and no such op is in the graph\. Did you mean 'linear'\? Its"
            r" ops: linear"
        ),
    ):
        _checked(module, words(half=frozenset({"bilinear"})))
    with pytest.raises(mezzo.PolicyError, match="conditional= lists 'softmax'"):
        _checked(module, words(conditional=(Conditional("softmax", "dim", (-1,)),)))


def test_an_exclusion_that_matches_nothing_is_refused():
    module = graph(Calls(lambda self, x: self.head(x), head=nn.Linear(4, 4)), X)
    _checked(module, words(exclude=("head", "he*", "linear")))
    with pytest.raises(
        mezzo.PolicyError, match="exclude= has 'heads', which is no node and no module"
    ):
        _checked(module, words(exclude=("heads",)))
    with pytest.raises(mezzo.PolicyError, match="got 3"):
        read_exclude([3])


def test_nodes_and_modules_are_excluded_by_name_path_and_glob():
    module = graph(Calls(lambda self, x: self.head(x), head=nn.Sequential(nn.Linear(4, 4))), X)
    linear = node(module, "linear")
    for pattern in ("linear", "head", "head.0", "head.*", "lin*"):
        assert exclusion(words(exclude=(pattern,)), linear, "linear") == pattern
    assert exclusion(words(exclude=("body.*",)), linear, "linear") is None


def test_a_condition_looks_at_the_arguments_given_or_left_out():
    module = graph(lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), x.sum([-1])), X)
    conditions = (Conditional("gelu", "approximate", ("none",)), Conditional("sum", "dim", (-1,)))
    assert (
        condition(conditions, "gelu", node(module, "gelu"))
        == "approximate='none': listed for these values by the user"
    )
    assert condition(conditions, "gelu", node(module, "gelu_1")) is None
    assert condition(conditions, "sum", node(module, "sum_1"))


def test_of_the_policys_module_rules_the_innermost_module_decides():
    model = Calls(lambda self, x: self.body(x), body=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    module, modules = graph(model, X), dict(model.named_modules())
    said = words(mezzo.Policy("O1", "bfloat16", modules={"body": "full", "body.1": "half"}))
    assert module_rule(said, node(module, "linear"), modules)[0] is Rule.FULL
    assert module_rule(said, node(module, "relu"), modules)[0] is Rule.HALF
    assert module_rule(words(), node(module, "relu"), modules) is None


def test_numbers_in_a_call_have_to_fit():
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


@pytest.mark.parametrize("price", [-1, float("inf"), float("nan"), "dear", None], ids=str)
def test_a_price_is_a_finite_number(price):
    with pytest.raises(
        mezzo.PolicyError,
        match=r"cast_cost= gave .* from float32 to bfloat16. A price is a finite number",
    ):
        words(cast_cost=lambda *_: price).cast_cost_of(8, torch.float32, torch.bfloat16)
