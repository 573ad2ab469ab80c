"""`mezzo.ops`."""

import warnings

import pytest
import torch
from support.devices import NONE, device

import mezzo
from mezzo import Policy, PolicyError
from mezzo.policy import missing_kernels, ops
from mezzo.policy.ops import OpInfo, OpTable
from mezzo.policy.registry import registry
from mezzo.policy.types import Entry, Rule


def by_name(table):
    return {op.name: op for op in table}


def test_every_known_op_is_listed_once_in_order_with_rule_and_reason():
    table = mezzo.ops(device="cpu")
    assert [op.name for op in table] == sorted(registry().names)
    assert all(op.rule in {rule.value for rule in Rule} and op.reason for op in table)


def test_the_default_rules_are_those_of_the_device():
    assert by_name(mezzo.ops(device="cpu"))["softmax"].rule == "keep"
    assert by_name(mezzo.ops(device="cuda"))["softmax"].rule == "full"


def test_an_absent_device_is_listed_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = mezzo.ops(device="cuda", on_unsupported="error")
    assert by_name(table)["linear"].rule == "half"


def test_a_policy_and_overrides_change_the_rules(tmp_path):
    policy = Policy("O1", half={"exp"})
    policy.save(tmp_path / "policy.toml")
    for table in (
        mezzo.ops(policy, device="cpu"),
        mezzo.ops(tmp_path / "policy.toml", device="cpu"),
        mezzo.ops("O1", device="cpu", half={"exp"}),
    ):
        assert by_name(table)["exp"] == OpInfo("exp", "half", "listed half by the user", ())
    assert by_name(mezzo.ops("O3", device="cpu"))["relu"].rule == "half"


def test_nothing_is_cast_at_o0():
    assert {(op.rule, op.reason) for op in mezzo.ops("O0", device="cpu")} == {
        ("keep", "level O0: nothing is cast")
    }


def test_ops_without_a_kernel_are_listed_with_device_and_dtype():
    row = by_name(mezzo.ops("O1", device="cpu"))["linalg_qr"]
    assert row.rule == "full"
    assert {("cpu", "bfloat16"), ("cpu", "float16")} <= set(row.no_kernel)
    assert "(no kernel: bfloat16 on cpu, " in str(OpTable([row]))


def test_a_recorded_missing_kernel_is_listed(monkeypatch):
    monkeypatch.setattr(missing_kernels, "_recorded", set())
    missing_kernels.record_missing("relu", torch.float16, "xpu")
    assert by_name(mezzo.ops(device="cpu"))["relu"].no_kernel == (("xpu", "float16"),)


def test_a_registered_op_is_listed():
    registry().register("listed_here", (), Entry(Rule.FULL, "registered by the user"))
    try:
        assert by_name(mezzo.ops(device="cpu"))["listed_here"] == OpInfo(
            "listed_here", "full", "registered by the user", ()
        )
    finally:
        registry().unregister("listed_here")
    assert "listed_here" not in by_name(mezzo.ops(device="cpu"))


def test_the_rules_use_the_policys_dtype_on_a_device_without_16_bit_dtypes(monkeypatch):
    monkeypatch.setattr(ops, "hardware", lambda _device: device(NONE, NONE, kind="cpu"))
    assert by_name(mezzo.ops(dtype="bfloat16"))["rrelu"].rule == "keep"
    assert by_name(mezzo.ops(dtype="float16"))["rrelu"].rule == "full"


def test_the_result_is_a_sequence_that_prints_as_a_table():
    rows = [
        OpInfo("add", "keep", "why", ()),
        OpInfo("softmax", "full", "because", (("cpu", "float16"),)),
    ]
    table = OpTable(rows)
    assert (len(table), table[0], list(table)) == (2, rows[0], rows)
    assert isinstance(table[:1], OpTable)
    assert (
        str(table) == "add      keep     why\nsoftmax  full     because (no kernel: float16 on cpu)"
    )
    assert str(OpTable([])) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "O9"}, "Unknown level 'O9'"),
        ({"device": "gpu"}, "Unknown device 'gpu'"),
        ({"hlaf": {"add"}}, "Unknown policy field"),
    ],
)
def test_invalid_arguments_raise(fields, message):
    with pytest.raises(PolicyError, match=message):
        mezzo.ops(**fields)
