"""A plan has the dtype, master and reason of every tensor, and changes nothing."""

import copy
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import mezzo
from mezzo.policy.types import Level, Master
from mezzo.prepare.arguments import Targets
from mezzo.prepare.keep_full import KeepFull
from mezzo.prepare.plan_rows import (
    PlanRow,
    TensorRule,
    format_bytes,
    format_rows,
    list_tensors,
)


def block():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def plan(model, policy="O2", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mezzo.plan(model, optimizer, policy, **{"dtype": "bfloat16", **options})


def after(planned):
    return {row.name: row.after for row in planned.rows}


def reasons(planned):
    return {row.name: row.reason for row in planned.rows}


def test_planning_changes_nothing():
    model = block()
    before, keys = copy.deepcopy(model.state_dict()), set(model.__dict__)
    plan(model)
    assert set(model.__dict__) == keys
    assert all(
        value.dtype is before[name].dtype and torch.equal(value, before[name])
        for name, value in model.state_dict().items()
    )


def test_a_plan_is_frozen_and_equal_by_value():
    model = block()
    assert plan(model) == plan(model)
    with pytest.raises(FrozenInstanceError):
        plan(model).seed = 1


def test_o2_casts_all_but_norms_and_their_buffers():
    halves = {name for name, dtype in after(plan(block())).items() if dtype is torch.bfloat16}
    assert halves == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_o3_casts_everything_without_masters():
    planned = plan(block(), "O3")
    assert set(after(planned).values()) == {torch.bfloat16}
    assert planned.master is Master.NONE
    assert "small updates are lost" in reasons(planned)["0.weight"]


def test_o3_with_keep_full_and_a_master():
    planned = plan(block(), "O3", keep_full=mezzo.NORMS, master="split")
    assert after(planned)["1.weight"] is torch.float32
    assert planned.master is Master.SPLIT


@pytest.mark.parametrize("level", ["O0", "O1", "OD"])
def test_other_levels_keep_float32_parameters(level):
    options = {"half": {"linear"}} if level == "OD" else {}
    planned = plan(block(), level, **options)
    assert set(after(planned).values()) == {torch.float32}
    assert planned.master is Master.NONE
    assert not planned.converts


def test_integer_buffers_are_not_listed():
    assert "1.num_batches_tracked" not in after(plan(block()))


def test_tied_parameters_have_one_row_and_stay_float32_if_one_name_matches():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    assert after(plan(model)) == {"a.weight": torch.bfloat16}
    assert "tied with b.weight" in reasons(plan(model))["a.weight"]
    kept = plan(model, keep_full="b")
    assert after(kept) == {"a.weight": torch.float32}
    assert "'b' (b.weight)" in reasons(kept)["a.weight"]


def test_parameters_that_are_computed_with_buffers_stay_float32_at_o2():
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.utils.spectral_norm(nn.Linear(4, 4)),
        parametrizations.weight_norm(nn.Linear(4, 4)),
    )
    why = reasons(plan(model, keep_full=()))
    assert why["0.parametrizations.weight.original"] == (
        "SpectralNorm computes it with float32 buffers"
    )
    kept = {name for name in why if "buffers" in why[name] and "_u" not in name}
    assert {"1.parametrizations.weight.original", "2.weight_orig"} <= kept
    assert not any(name.startswith("3.") for name in kept)
    mezzo.decorate(model.eval(), dtype="bfloat16")
    assert model(torch.ones(2, 4)).isfinite().all()


class HandWrittenNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(4))
        self.register_buffer("beta", torch.zeros(4))

    def forward(self, x):
        return nn.functional.layer_norm(x, (4,), self.gamma, self.beta)


def test_hand_written_norms_with_buffers_stay_float32_at_o2():
    model = nn.Sequential(nn.Linear(4, 4), HandWrittenNorm(), nn.Linear(4, 2))
    why = reasons(plan(model))
    assert why["1.gamma"] == "HandWrittenNorm uses it with float32 buffers"
    assert after(plan(model, "O3"))["1.gamma"] is torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, "O2", dtype="bfloat16")
    assert step(torch.ones(2, 4), torch.ones(2, 2)).isfinite()


def test_a_module_that_is_used_twice_has_one_row_for_each_tensor():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    planned = plan(model)
    assert [row.name for row in planned.rows] == ["0.weight", "0.bias"]
    assert "tied with 2.weight" in reasons(planned)["0.weight"]


def test_float64_complex_and_16_bit_tensors_are_listed_and_not_cast():
    model = block()
    model.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.rotation = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.narrow = nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False)
    planned = plan(model)
    assert [after(planned)[name] for name in ("wide", "rotation", "narrow")] == [
        torch.float64,
        torch.complex64,
        torch.float16,
    ]
    assert "is not cast" in reasons(planned)["wide"]
    assert "is not cast" in reasons(planned)["rotation"]
    assert "float16 already" in reasons(planned)["narrow"]


def test_a_16_bit_parameter_that_is_trained_gets_a_master():
    model = block()
    model.narrow = nn.Parameter(torch.ones(2, dtype=torch.float16))
    planned = plan(model)
    assert after(planned)["narrow"] is torch.bfloat16
    assert reasons(planned)["narrow"] == "float32 master, from its float16 value"


def test_rows_without_a_master_have_the_reason():
    model = block()
    model[0].weight.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
    planned = mezzo.plan(model, optimizer, dtype="bfloat16")
    assert reasons(planned)["0.weight"] == "no master while requires_grad is False"
    assert reasons(planned)["0.bias"] == "no master: it is in no optimizer"
    assert reasons(planned)["2.weight"] == "float32 master"
    assert {row.name for row in planned.rows if row.master} == {"2.weight"}


@pytest.mark.parametrize(
    ("master", "companion_bytes"),
    [("float32", 4), ("split", 2), ("kahan", 2), ("stochastic", 0), ("none", 0)],
)
def test_bytes_are_those_of_tensors_and_companions(master, companion_bytes):
    planned = plan(nn.Linear(10, 10, bias=False), master=master)
    assert (planned.bytes_before, planned.bytes_after, planned.master_bytes) == (
        400,
        200,
        100 * companion_bytes,
    )


@pytest.mark.parametrize("master", ["float32", "split", "kahan", "none"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_bytes_equal_those_of_a_decorated_model(master, level):
    model = block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planned = mezzo.plan(model, optimizer, level, dtype="bfloat16", master=master)
    mezzo.decorate(model, optimizer, level, dtype="bfloat16", master=master)
    allocated = sum(
        one.numel() * one.element_size()
        for one in (*model.parameters(), *model.buffers())
        if one.is_floating_point()
    )
    assert planned.bytes_after == allocated
    companions = [
        entries["mezzo_master"]
        for entries in optimizer.state_dict().get("mezzo_masters", {}).values()
    ]
    buffers = 8 * 2 * 4 if level == "O3" and master in ("float32", "split") else 0
    assert (
        planned.master_bytes
        == sum(one.numel() * one.element_size() for one in companions) + buffers
    )


def test_auto_uses_the_preferred_dtype_of_the_device():
    found = mezzo.hardware("cpu")
    planned = plan(block(), dtype="auto", on_unsupported="ignore")
    assert planned.dtype is (found.preferred.dtype if found.preferred else None)
    assert planned.dtype_reason in str(planned)


def test_tensors_stay_float32_if_the_device_does_not_support_the_dtype(monkeypatch):
    from dataclasses import replace

    from mezzo.prepare import plan as subject

    found = mezzo.hardware("cpu")
    unsupported = replace(
        found, bfloat16=replace(found.bfloat16, supported=False, reason="the test forbids it")
    )
    monkeypatch.setattr(subject, "hardware", lambda device: unsupported)
    planned = plan(block(), on_unsupported="ignore")
    assert planned.dtype is None
    assert set(after(planned).values()) == {torch.float32}
    assert reasons(planned)["0.weight"] == "stays float32: the test forbids it"
    with pytest.raises(mezzo.UnsupportedError, match="the test forbids it"):
        plan(block(), on_unsupported="error")


def test_rows_of_several_models_have_a_prefix():
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    assert [row.name for row in mezzo.plan([one, other], optimizer, dtype="bfloat16").rows] == [
        "models[0].weight",
        "models[1].weight",
    ]


def test_the_text_has_aligned_rows_and_the_totals():
    text = str(plan(block()))
    lines = text.splitlines()
    assert lines[0].startswith("O2 on cpu: bfloat16, ")
    table = lines[2:-2]
    column = table[0].index("dtype")
    assert len(table) == 1 + 8
    assert all(
        line[column:].startswith("float32") and line[column - 2 : column] == "  "
        for line in table[1:]
    )
    assert (
        lines[-1]
        == "4 of 8 tensors change: 360 bytes → 244 bytes + 232 bytes of masters (master='float32')"
    )


def test_a_policy_and_a_file_are_accepted(tmp_path):
    policy = mezzo.Policy("O2", "float16", keep_full=["2"], master="kahan")
    policy.save(tmp_path / "policy.toml")
    for argument in (policy, tmp_path / "policy.toml"):
        model = block()
        planned = mezzo.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), argument)
        assert planned.policy == policy
        assert after(planned)["2.weight"] is torch.float32
        assert after(planned)["0.weight"] is torch.float16
        assert planned.master is Master.KAHAN


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float16", "master": "split"},
            "master='split' needs bfloat16 parameters, got float16",
        ),
        ({"save_dtype": "float16"}, "save_dtype='float16' is not a dtype"),
        (
            {"save_dtype": "float32", "master": "kahan"},
            "master='kahan' has none.*'float32' or 'split'",
        ),
        ({"save_dtype": "float32", "master": "stochastic"}, "master='stochastic' has none"),
        ({"save_dtype": "float32", "master": None}, "master='none' has none"),
        ({"output_dtype": "float64"}, "output_dtype='float64' is not a dtype"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 should be a positive number"),
        ({"clip_norm": float("inf")}, "clip_norm=inf should be a positive number"),
        ({"clip_norm": "1"}, "clip_norm='1' should be a positive number"),
        ({"keep_ful": "x"}, "keep_ful"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_anything_changes(options, message):
    model = block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for function in (mezzo.plan, mezzo.decorate):
        with pytest.raises(mezzo.PolicyError, match=message):
            function(model, optimizer, **{"dtype": "bfloat16", **options})
    assert model[0].weight.dtype is torch.float32
    assert "forward" not in model.__dict__


def test_clipping_and_exact_saving_need_an_optimizer():
    with pytest.raises(mezzo.PolicyError, match="no optimizer was given"):
        mezzo.plan(block(), dtype="bfloat16", clip_norm=1.0)
    with pytest.raises(mezzo.PolicyError, match="without an optimizer there are none"):
        mezzo.plan(block(), dtype="bfloat16", save_dtype="float32")


def test_float32_weights_may_be_saved_at_o1():
    assert (
        mezzo.plan(block(), policy="O1", dtype="bfloat16", save_dtype="float32").save_dtype
        is torch.float32
    )


# -- rows and tensors ------------------------------------------------------------------------------


def row(name, shape=(2, 3), after=torch.bfloat16):
    return PlanRow(name, "parameter", shape, torch.float32, after, master=True, reason="why not")


def test_a_row_has_its_size_and_its_change():
    assert row("a").numel == 6
    assert row("a", shape=()).numel == 1
    assert row("a", shape=(0, 4)).numel == 0
    assert row("a").change == "float32 → bfloat16"
    assert row("a", after=torch.float32).change == "float32"


def test_columns_are_aligned():
    lines = format_rows(
        (
            row("short"),
            row("a.much.longer.name", shape=(1024, 1024, 3, 3)),
            row("scalar", shape=(), after=torch.float32),
        )
    )
    assert len({line.index("why") for line in lines}) == 1
    assert "1024 × 1024 × 3 × 3" in lines[2]
    assert lines[3].split()[1] == "scalar"


def test_a_table_without_rows_is_a_heading():
    assert format_rows(()) == ["name  shape  dtype  why"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (5 * 2**30, "5.0 GiB"),
    ],
)
def test_bytes_are_formatted_in_the_largest_unit(count, text):
    assert format_bytes(count) == text


def test_a_tied_tensor_is_listed_once_with_all_its_names():
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.weight = one.weight
    (info,) = list_tensors(Targets((nn.Sequential(one, one), other), ()), KeepFull(()))
    assert info.names == ("models[0].0.weight", "models[0].1.weight", "models[1].weight")
    assert info.tensor is one.weight


def test_listed_tensors_have_their_optimizer_and_whether_they_are_buffers():
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    infos = {
        one.names[0]: one for one in list_tensors(Targets((model,), (optimizer,)), KeepFull(()))
    }
    assert infos.keys() == {"weight", "bias", "running_mean", "running_var"}
    assert infos["weight"].optimizer is optimizer
    assert infos["bias"].optimizer is None
    assert [name for name, one in infos.items() if one.is_buffer] == ["running_mean", "running_var"]


def test_a_buffer_keeps_its_exact_value_with_exact_masters():
    model = nn.BatchNorm1d(2)
    buffer = next(one for one in list_tensors(Targets((model,), ()), KeepFull(())) if one.is_buffer)
    has_master = {
        master: TensorRule(Level.O2, torch.bfloat16, "", master).row(buffer).master
        for master in Master
        if master is not Master.AUTO
    }
    assert {master for master, exact in has_master.items() if exact} == {
        Master.FLOAT32,
        Master.SPLIT,
    }
