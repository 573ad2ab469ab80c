"""Models and optimizers that cannot be decorated are refused; `keep_full` keeps tensors float32."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import mezzo
from mezzo.prepare.arguments import models_of, optimizers_of


def sgd(*models):
    return torch.optim.SGD(
        [parameter for model in models for parameter in model.parameters()], lr=0.1
    )


def refused(*args, error=mezzo.PolicyError, **options):
    with pytest.raises(error) as caught:
        mezzo.decorate(*args, **{"dtype": "bfloat16", **options})
    return str(caught.value)


def test_nested_lists_are_flattened_without_duplicates():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert models_of([one, (other, [one])]) == (one, other)
    first = sgd(one)
    assert optimizers_of([first, [first]]) == (first,)
    assert optimizers_of(None) == ()


@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_a_wrapped_model_is_refused(wrapper):
    inner = nn.Linear(2, 2)
    wrapped = wrapper.__new__(wrapper)
    nn.Module.__init__(wrapped)
    wrapped.module = inner
    for model in (wrapped, nn.Sequential(wrapped)):
        message = refused(model, sgd(inner), error=mezzo.UnsupportedError)
        assert "First decorate, then wrap" in message
        assert wrapper.__name__ in message


def test_fsdp1_is_refused_with_a_pointer_to_fsdp2():
    inner = nn.Linear(2, 2)
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = inner
    for model, where in ((wrapped, "The model"), (nn.Sequential(wrapped), "The submodule '0'")):
        message = refused(model, sgd(inner), error=mezzo.UnsupportedError)
        assert message.startswith(f"{where} is wrapped by FullyShardedDataParallel (FSDP1)")
        assert "torch.distributed.fsdp.fully_shard(model), then create the optimizer" in message


def test_a_model_without_floating_point_parameters_is_refused():
    assert "no parameters" in refused(nn.ReLU())
    model = nn.Module()
    model.count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    assert "only parameters of torch.int64" in refused(model)


def test_a_parameter_on_the_meta_device_is_refused():
    message = refused(
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), error=mezzo.UnsupportedError
    )
    assert "'1.weight' is on the meta device" in message


def test_a_lazy_parameter_is_refused():
    message = refused(nn.Sequential(nn.LazyLinear(3)), error=mezzo.UnsupportedError)
    assert "'0.weight' is lazy and has no shape yet" in message


def test_an_optimizer_over_other_parameters_is_refused():
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    assert (
        "SGD has 2 parameters, of which 2 are not the model's (the first of shape (3, 2))."
        " Create it with model.parameters() of this model, or" in refused(one, sgd(other))
    )
    message = refused(one, sgd(one, other))
    assert "SGD has 4 parameters, of which 2 are not" in message
    assert "). Pass every model that it updates: decorate([model, other], optimizer)." in message


def test_a_parameter_of_no_module_is_passed_in_a_list():
    model, temperature = nn.Linear(2, 3), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature])
    assert "is passed as nn.ParameterList([parameter])" in refused(model, optimizer)
    mezzo.decorate([model, nn.ParameterList([temperature])], optimizer, "O2", dtype="bfloat16")
    assert temperature.dtype is torch.bfloat16


def test_a_parameter_in_two_optimizers_is_refused():
    model = nn.Linear(2, 2)
    assert "in two of the optimizers" in refused(model, [sgd(model), sgd(model)])


def test_arguments_that_are_not_models_or_optimizers_are_refused():
    assert "model=3 is not a torch.nn.Module" in refused(3)
    assert "model=SGD is not" in refused(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    assert "model=[] holds no model" in refused([])
    assert "optimizer=3 is not" in refused(nn.Linear(1, 1), 3)
    assert "policy='O2'" in refused(nn.Linear(1, 1), "O2")


def test_a_scripted_model_is_refused():
    class Scripted(torch.jit.ScriptModule):
        pass

    assert "scripted" in refused(Scripted(), error=mezzo.UnsupportedError)


def test_parameters_on_two_device_types_are_refused(monkeypatch):
    from mezzo.prepare import arguments

    monkeypatch.setattr(arguments, "_refuse_without_values", lambda model: None)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    assert "are on cpu and meta" in refused(model, error=mezzo.UnsupportedError)


# -- keep_full -------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))


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
    options = {} if keep_full is None else {"keep_full": keep_full}
    rows = mezzo.plan(net, policy=level, dtype="bfloat16", **options).rows
    assert {row.name for row in rows} == ALL
    return {row.name for row in rows if row.after is torch.float32}


def under(*prefixes):
    return {name for name in ALL if name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("keep_full", "expected"),
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
def test_keep_full_replaces_the_default_and_keeps_submodules(keep_full, expected):
    assert kept(model(), keep_full) == expected


def test_a_module_keeps_its_submodules_and_nothing_of_the_same_type():
    net = model()
    assert kept(net, net["second"][0]) == under("second.0")
    assert kept(net, [net["first"], nn.LayerNorm]) == under("first") | NORMS
    assert kept(net, net) == ALL


def test_a_module_of_one_model_keeps_nothing_of_another():
    one, other = model(), model()
    rows = mezzo.plan([one, other], dtype="bfloat16", keep_full=[one["first"]]).rows
    assert {row.name for row in rows if row.after is torch.float32} == {
        f"models[0].{name}" for name in under("first")
    }


def test_the_policy_of_a_plan_has_the_name_of_a_module():
    net = model()
    policy = mezzo.plan(net, dtype="bfloat16", keep_full=net["second"][0]).policy
    assert [selector.text for selector in policy.keep_full] == ["second.0"]
    assert kept(model(), policy.keep_full) == under("second.0")


def test_the_name_of_a_module_is_escaped_if_it_looks_like_a_glob():
    net = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "a0": nn.Linear(2, 2)})
    policy = mezzo.plan(net, dtype="bfloat16", keep_full=net["a[0]"]).policy
    rows = mezzo.plan(net, policy=policy).rows
    assert {row.name for row in rows if row.after is torch.float32} == {"a[0].weight", "a[0].bias"}


def test_reasons_name_the_entry_that_matched():
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
    ("keep_full", "message"),
    [
        ("frist", "keep_full='frist' matches nothing in ModuleDict. Did you mean 'first'?"),
        ("*.wieght", "matches nothing"),
        (nn.Conv2d, "Conv2d' matches nothing"),
        ([nn.Linear(1, 1)], "a Linear that is not in the model"),
        (3, "3"),
    ],
)
def test_an_entry_that_matches_nothing_is_refused(keep_full, message):
    with pytest.raises(mezzo.PolicyError) as caught:
        kept(model(), keep_full)
    assert message in str(caught.value)


def test_a_policy_with_an_entry_that_matches_nothing_is_refused():
    with pytest.raises(mezzo.PolicyError, match="matches nothing"):
        mezzo.plan(model(), policy=mezzo.Policy("O2", "bfloat16", keep_full=["nowhere"]))


def test_modules_that_a_rule_runs_in_float32_are_kept():
    rows = mezzo.plan(
        model(), dtype="bfloat16", keep_full=(), modules={"second": "full", "first.linear": "half"}
    ).rows
    assert {row.name for row in rows if row.after is torch.float32} == under("second")
    assert {row.reason for row in rows if row.name == "second.1.weight"} == {
        "modules= runs this Sequential in float32"
    }


def test_with_the_apex_preset_only_batch_norms_stay_float32():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4))
    rows = mezzo.plan(net, policy="O2", preset="apex", dtype="float16").rows
    assert {row.name.partition(".")[0] for row in rows if row.after is torch.float32} == {"1"}
    assert {
        row.name.partition(".")[0]
        for row in mezzo.plan(net, policy="O2", preset="apex", keep_full=nn.LayerNorm).rows
        if row.after is torch.float32
    } == {"2"}
