"""`keep_full` names types, instances and globs; a match keeps its whole subtree."""

import pytest
import torch
from torch import nn

import mezzo


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("scale", torch.ones(4))


def model():
    return nn.ModuleDict({"first": Part(), "second": nn.Sequential(Part(), nn.Linear(4, 2))})


ALL = {
    *(
        f"{part}.{name}"
        for part in ("first", "second.0")
        for name in ("scale", "linear.weight", "linear.bias", "norm.weight", "norm.bias")
    ),
    "second.1.weight",
    "second.1.bias",
}
NORMS = {name for name in ALL if ".norm." in name}


def kept(net, keep_full, level="O2"):
    words = {} if keep_full is None else {"keep_full": keep_full}
    rows = mezzo.plan(net, policy=level, dtype="bfloat16", **words).rows
    assert {row.name for row in rows} == ALL
    return {row.name for row in rows if row.after is torch.float32}


def under(*prefixes):
    return {name for name in ALL if name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, NORMS),
        ((), set()),
        (Part, under("first", "second.0")),
        ({nn.LayerNorm}, NORMS),
        ("first", under("first")),
        ("second", under("second")),
        ("*.linear", under("first.linear", "second.0.linear")),
        ("*.bias", {name for name in ALL if name.endswith("bias")}),
        ("first.scale", {"first.scale"}),
        ("second.1.weight", {"second.1.weight"}),
        (
            ["*.bias", nn.LayerNorm, "second.1"],
            {name for name in ALL if name.endswith("bias")} | NORMS | under("second.1"),
        ),
        ("", ALL),
        ("*", ALL),
        ([*mezzo.NORMS, "second.1"], NORMS | under("second.1")),
    ],
)
def test_words_replace_the_default_and_keep_subtrees(words, expected):
    assert kept(model(), words) == expected


def test_an_instance_keeps_its_subtree_and_nothing_of_the_same_type():
    net = model()
    assert kept(net, net["second"][0]) == under("second.0")
    assert kept(net, [net["first"], nn.LayerNorm]) == under("first") | NORMS
    assert kept(net, net) == ALL


def test_an_instance_of_one_model_keeps_nothing_of_another():
    one, other = model(), model()
    rows = mezzo.plan([one, other], dtype="bfloat16", keep_full=[one["first"]]).rows
    assert {row.name for row in rows if row.after is torch.float32} == {
        f"models[0].{name}" for name in under("first")
    }


def test_an_instance_is_named_in_the_policy_of_the_plan():
    net = model()
    policy = mezzo.plan(net, dtype="bfloat16", keep_full=net["second"][0]).policy
    assert [selector.text for selector in policy.keep_full] == ["second.0"]
    assert kept(model(), policy.keep_full) == under("second.0")


def test_an_instance_whose_name_looks_like_a_glob_is_found_by_it():
    net = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "a0": nn.Linear(2, 2)})
    policy = mezzo.plan(net, dtype="bfloat16", keep_full=net["a[0]"]).policy
    rows = mezzo.plan(net, policy=policy).rows
    assert {row.name for row in rows if row.after is torch.float32} == {"a[0].weight", "a[0].bias"}


def test_reasons_name_what_kept():
    net = model()
    reasons = {
        row.name: row.reason
        for row in mezzo.plan(
            net, dtype="bfloat16", keep_full=[net["first"], "second.1", nn.LayerNorm, "*.bias"]
        ).rows
    }
    assert reasons["first.scale"] == "keep_full has this Part"
    assert reasons["second.1.weight"] == "keep_full has 'second.1'"
    assert reasons["second.0.norm.weight"] == "LayerNorm is a normalisation layer"
    assert reasons["second.0.linear.bias"] == "keep_full has '*.bias'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("frist", "keep_full='frist' matches nothing in ModuleDict. Did you mean 'first'?"),
        ("*.wieght", "matches nothing"),
        (nn.Conv2d, "Conv2d' matches nothing"),
        ([nn.Linear(1, 1)], "a Linear that is no part of the model"),
        (3, "3"),
    ],
)
def test_what_matches_nothing_is_refused(words, message):
    with pytest.raises(mezzo.PolicyError) as caught:
        kept(model(), words)
    assert message in str(caught.value)


def test_a_policy_that_names_what_is_not_there_is_refused_too():
    with pytest.raises(mezzo.PolicyError, match="matches nothing"):
        mezzo.plan(model(), policy=mezzo.Policy("O2", "bfloat16", keep_full=["nowhere"]))


def test_what_the_policy_runs_in_float32_is_kept_whole():
    rows = mezzo.plan(
        model(), dtype="bfloat16", keep_full=(), modules={"second": "full", "first.linear": "half"}
    ).rows
    assert {row.name for row in rows if row.after is torch.float32} == under("second")
    assert {row.reason for row in rows if row.name == "second.1.weight"} == {
        "modules= runs this Sequential in float32"
    }


def test_by_apexs_lists_only_batch_norms_stay_float32():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4))
    rows = mezzo.plan(net, policy="O2", preset="apex", dtype="float16").rows
    assert {row.name.partition(".")[0] for row in rows if row.after is torch.float32} == {"1"}
    assert {
        row.name.partition(".")[0]
        for row in mezzo.plan(net, policy="O2", preset="apex", keep_full=nn.LayerNorm).rows
        if row.after is torch.float32
    } == {"2"}
