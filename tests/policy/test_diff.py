"""What two policies say differently."""

import pytest
import torch
from hypothesis import given, settings
from support.devices import NATIVE, NONE, SLOW, device
from support.policies import policies

from mezzo import Policy
from mezzo.policy.decide import PolicyDiff, diff

GPU = device()


@settings(max_examples=10)
@given(policies())
def test_a_policy_does_not_differ_from_itself(policy):
    assert diff(policy, policy, GPU) == PolicyDiff((), ())


def test_equal_policies_do_not_differ_and_say_so():
    difference = diff(Policy(half={"add"}), Policy(half=["add_"]), GPU)
    assert not difference
    assert str(difference) == "no difference"


def test_a_difference_names_the_fields_and_the_ops_that_end_up_under_another_rule():
    difference = diff(
        Policy("O1", "float16"),
        Policy("O1", "float16", full={"linear"}, keep={"softmax"}, default_rule="keep"),
        GPU,
    )
    assert difference
    assert difference.fields == (
        ("full", [], ["linear"]),
        ("keep", [], ["softmax"]),
        ("default_rule", None, "keep"),
    )
    assert ("linear", "half", "full") in difference.ops
    assert ("softmax", "full", "keep") in difference.ops
    assert "full: [] → ['linear']" in str(difference).splitlines()
    assert "op softmax: full → keep" in str(difference).splitlines()


def test_a_field_that_changes_no_op_is_a_difference():
    difference = diff(Policy(cache="off"), Policy(), GPU)
    assert difference == PolicyDiff((("cache", "off", "auto"),), ())
    assert difference


def test_swapping_the_two_swaps_the_sides():
    one, other = Policy("O1"), Policy("O2", half={"exp"})
    there, back = diff(one, other, GPU), diff(other, one, GPU)
    assert tuple((name, after, before) for name, before, after in there.ops) == back.ops
    assert tuple((name, after, before) for name, before, after in there.fields) == back.fields


def test_auto_is_compared_as_what_it_becomes_on_the_device():
    assert diff(Policy(), Policy(dtype="bfloat16"), device(SLOW, NATIVE, kind="cpu")).ops == ()
    assert diff(Policy(), Policy(dtype="float16"), device(NATIVE, NONE, kind="cpu")).ops == ()


def test_presets_can_be_compared_on_a_device_that_is_not_here():
    nothing = device(NONE, NONE)
    assert ("relu", "keep", "promote") in diff(
        Policy(), Policy(preset="paddle", on_unsupported="error"), nothing
    ).ops


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_difference_depends_on_the_device(kind):
    ops = {
        name: rules
        for name, *rules in diff(
            Policy("O1", "float16"), Policy("O1", "float16", preset="torch-cuda"), device(kind=kind)
        ).ops
    }
    assert ops.get("softmax") == (["keep", "full"] if kind == "cpu" else None)


def test_o0_keeps_every_op():
    assert {after for _, _, after in diff(Policy("O1"), Policy("O0", half={"add"}), GPU).ops} == {
        "keep"
    }


def test_a_difference_is_plain_data():
    difference = diff(Policy(), Policy(dtype=torch.float16, modules={"head": "half"}), GPU)
    assert difference.fields == (("dtype", None, "float16"), ("modules", [], {"head": "half"}))
