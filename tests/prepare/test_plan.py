"""A plan says what will happen and why, and changes nothing."""

import copy
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

import mezzo
from mezzo.policy.types import Master


def block():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def plan(model, policy="O2", **words):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mezzo.plan(model, optimizer, policy, **{"dtype": "bfloat16", **words})


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


def test_o2_converts_all_but_norms_and_their_buffers():
    halves = {name for name, dtype in after(plan(block())).items() if dtype is torch.bfloat16}
    assert halves == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_o3_converts_everything_without_masters():
    planned = plan(block(), "O3")
    assert set(after(planned).values()) == {torch.bfloat16}
    assert planned.master is Master.NONE
    assert "small updates are lost" in reasons(planned)["0.weight"]


def test_o3_keeps_what_is_named_and_the_master_that_is_named():
    planned = plan(block(), "O3", keep_full=mezzo.NORMS, master="split")
    assert after(planned)["1.weight"] is torch.float32
    assert planned.master is Master.SPLIT


@pytest.mark.parametrize("level", ["O0", "O1", "OD"])
def test_other_levels_keep_parameters(level):
    words = {"half": {"linear"}} if level == "OD" else {}
    planned = plan(block(), level, **words)
    assert set(after(planned).values()) == {torch.float32}
    assert planned.master is Master.NONE
    assert not planned.converts


def test_buffers_that_are_not_floating_are_not_listed():
    assert "1.num_batches_tracked" not in after(plan(block()))


def test_tied_parameters_have_one_row_and_are_kept_if_one_place_keeps():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    assert after(plan(model)) == {"a.weight": torch.bfloat16}
    assert "tied with b.weight" in reasons(plan(model))["a.weight"]
    kept = plan(model, keep_full="b")
    assert after(kept) == {"a.weight": torch.float32}
    assert "'b' (b.weight)" in reasons(kept)["a.weight"]


def test_a_module_that_is_used_twice_has_one_row_for_each_tensor():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    planned = plan(model)
    assert [row.name for row in planned.rows] == ["0.weight", "0.bias"]
    assert "tied with 2.weight" in reasons(planned)["0.weight"]


def test_float64_complex_and_16_bit_tensors_are_left_alone_and_listed():
    model = block()
    model.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.turned = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.narrow = nn.Parameter(torch.ones(2, dtype=torch.float16))
    planned = plan(model)
    assert [after(planned)[name] for name in ("wide", "turned", "narrow")] == [
        torch.float64,
        torch.complex64,
        torch.float16,
    ]
    assert "left alone" in reasons(planned)["wide"]
    assert "left alone" in reasons(planned)["turned"]
    assert "float16 already" in reasons(planned)["narrow"]


def test_who_has_no_master_says_so():
    model = block()
    model[0].weight.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)
    planned = mezzo.plan(model, optimizer, dtype="bfloat16")
    assert reasons(planned)["0.weight"] == "no master while requires_grad is False"
    assert reasons(planned)["0.bias"] == "no master: it is in no optimizer"
    assert reasons(planned)["2.weight"] == "float32 master"
    assert {row.name for row in planned.rows if row.master} == {"2.weight"}


@pytest.mark.parametrize(
    ("master", "beside"),
    [("float32", 4), ("split", 2), ("kahan", 2), ("stochastic", 0), ("none", 0)],
)
def test_bytes_are_those_of_tensors_and_what_lies_beside_them(master, beside):
    planned = plan(nn.Linear(10, 10, bias=False), master=master)
    assert (planned.bytes_before, planned.bytes_after, planned.master_bytes) == (
        400,
        200,
        100 * beside,
    )


@pytest.mark.parametrize("master", ["float32", "split", "kahan", "none"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_bytes_are_what_decorate_then_takes(master, level):
    model = block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planned = mezzo.plan(model, optimizer, level, dtype="bfloat16", master=master)
    mezzo.decorate(model, optimizer, level, dtype="bfloat16", master=master)
    taken = sum(
        one.numel() * one.element_size()
        for one in (*model.parameters(), *model.buffers())
        if one.is_floating_point()
    )
    assert planned.bytes_after == taken
    beside = [
        held["mezzo_master"] for held in optimizer.state_dict().get("mezzo_masters", {}).values()
    ]
    buffers = 8 * 2 * 4 if level == "O3" and master in ("float32", "split") else 0
    assert planned.master_bytes == sum(one.numel() * one.element_size() for one in beside) + buffers


def test_auto_takes_the_dtype_of_the_device_and_says_why():
    found = mezzo.hardware("cpu")
    planned = plan(block(), dtype="auto", on_unsupported="ignore")
    assert planned.dtype is (found.preferred.dtype if found.preferred else None)
    assert planned.dtype_reason in str(planned)


def test_what_the_device_lacks_stays_float32_and_says_why(monkeypatch):
    from dataclasses import replace

    from mezzo.prepare import plan as subject

    found = mezzo.hardware("cpu")
    nothing = replace(
        found, bfloat16=replace(found.bfloat16, supported=False, reason="the test forbids it")
    )
    monkeypatch.setattr(subject, "hardware", lambda device: nothing)
    planned = plan(block(), on_unsupported="ignore")
    assert planned.dtype is None
    assert set(after(planned).values()) == {torch.float32}
    assert reasons(planned)["0.weight"] == "stays float32: the test forbids it"
    with pytest.raises(mezzo.UnsupportedError, match="the test forbids it"):
        plan(block(), on_unsupported="error")


def test_several_models_are_told_apart():
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    assert [row.name for row in mezzo.plan([one, other], optimizer, dtype="bfloat16").rows] == [
        "models[0].weight",
        "models[1].weight",
    ]


def test_the_text_shows_every_row_aligned_and_the_totals():
    text = str(plan(block()))
    lines = text.splitlines()
    assert lines[0].startswith("O2 on cpu: bfloat16, ")
    table = lines[2:-2]
    place = table[0].index("dtype")
    assert len(table) == 1 + 8
    assert all(
        line[place:].startswith("float32") and line[place - 2 : place] == "  " for line in table[1:]
    )
    assert (
        lines[-1]
        == "4 of 8 tensors change: 360 bytes → 244 bytes + 232 bytes beside them (master='float32')"
    )


def test_a_policy_and_a_file_are_read(tmp_path):
    policy = mezzo.Policy("O2", "float16", keep_full=["2"], master="kahan")
    policy.save(tmp_path / "policy.toml")
    for words in (policy, tmp_path / "policy.toml"):
        model = block()
        planned = mezzo.plan(model, torch.optim.SGD(model.parameters(), lr=0.1), words)
        assert planned.policy == policy
        assert after(planned)["2.weight"] is torch.float32
        assert after(planned)["0.weight"] is torch.float16
        assert planned.master is Master.KAHAN


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_words_that_make_no_sense_are_refused_before_anything_changes(words, message):
    model = block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for function in (mezzo.plan, mezzo.decorate):
        with pytest.raises(mezzo.PolicyError, match=message):
            function(model, optimizer, **{"dtype": "bfloat16", **words})
    assert model[0].weight.dtype is torch.float32
    assert "forward" not in model.__dict__


def test_without_an_optimizer_there_is_nothing_to_clip_and_nothing_exact_to_save():
    with pytest.raises(mezzo.PolicyError, match="no optimizer was given"):
        mezzo.plan(block(), dtype="bfloat16", clip_norm=1.0)
    with pytest.raises(mezzo.PolicyError, match="without an optimizer there are none"):
        mezzo.plan(block(), dtype="bfloat16", save_dtype="float32")


def test_float32_weights_are_saved_at_o1_without_more_ado():
    assert (
        mezzo.plan(block(), policy="O1", dtype="bfloat16", save_dtype="float32").save_dtype
        is torch.float32
    )
