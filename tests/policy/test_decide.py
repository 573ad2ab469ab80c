"""What a policy decides for one op, and why."""

import pytest
import torch

from mezzo import Policy, PolicyError
from mezzo.policy import missing_kernels
from mezzo.policy.decide import (
    COMPOSED_OF,
    Decision,
    all_entries,
    effective_lists,
    entry_of,
    explain,
    uncast_decision,
)
from mezzo.policy.registry import registry
from mezzo.policy.types import Entry, Rule

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def mine():
    """An op of the user's own, for one test."""
    registry().register("mine", (), Entry(Rule.FULL, "registered by the user"))
    yield "mine"
    registry().unregister("mine")


@pytest.fixture
def learning(monkeypatch):
    """Lets a test learn of a missing kernel without telling the others."""
    monkeypatch.setattr(missing_kernels, "_recorded", set())
    effective_cache_clear()
    yield
    effective_cache_clear()


def effective_cache_clear():
    from mezzo.policy import decide

    decide._effective.cache_clear()


def decided(policy, op, *inputs, dtype=F16, device="cuda", **arguments):
    return explain(policy, op, inputs, dtype=dtype, device=device, arguments=arguments)


@pytest.mark.parametrize(
    ("rule", "inputs", "dtype"),
    [
        ("half", [F32], F16),
        ("half", [F32, BF16], F16),
        ("half", [], F16),
        ("half", [F64], F64),
        ("half", [F32, F64], F64),
        ("half", [torch.int64, F32], F16),
        ("half", [torch.int64], torch.int64),
        ("half", [torch.complex64], torch.complex64),
        ("half", [torch.float8_e4m3fn], torch.float8_e4m3fn),
        ("half", [torch.float8_e4m3fn, F32], F32),
        ("full", [F16], F32),
        ("full", [F16, F64], F64),
        ("full", [torch.bool], torch.bool),
        ("promote", [F16, F32], F32),
        ("promote", [F16, BF16], F32),
        ("promote", [F16, F16], F16),
        ("promote", [F16, torch.int64], F16),
        ("keep", [F16], F16),
        ("keep", [], F32),
        ("keep", ["bfloat16"], BF16),
        ("refuse", [F32], None),
        ("refuse", [F64], None),
    ],
)
def test_a_rule_and_the_inputs_give_the_dtype(rule, inputs, dtype):
    decision = decided(Policy("O1", **{rule: {"relu"}}), "relu", *inputs)
    assert (decision.rule, decision.dtype) == (Rule.parse(rule), dtype)


@pytest.mark.parametrize(("op", "inputs"), [("linear", [F64]), ("softmax", [F32, F64])])
def test_what_is_never_cast_is_the_reason(op, inputs):
    assert decided(Policy(), op, *inputs).reason == "float64 inputs are never cast"


@pytest.mark.parametrize("word", [3, torch.ones(1), "float33", None, float])
def test_an_input_that_is_no_dtype_is_refused(word):
    with pytest.raises(
        PolicyError,
        match=(
            r"^The inputs of an op are told by their dtypes, such as torch.float32 or 'float32',"
            r" got "
        ),
    ):
        decided(Policy(), "linear", word)
    with pytest.raises(PolicyError, match=r"^The inputs of an op are told by their dtypes"):
        uncast_decision("linear", [word], "why")


@pytest.mark.parametrize("spelling", ["softmax", "_softmax", "F.softmax", "aten::softmax.int"])
def test_a_decision_is_the_same_however_the_op_is_spelled(spelling):
    assert decided(Policy(), spelling, F16) == decided(Policy(), "softmax", F16)


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (Decision("exp", Rule.FULL, F32, "it overflows"), "exp runs in float32: it overflows."),
        (Decision("exp", Rule.REFUSE, None, "use log"), "exp is refused: use log."),
    ],
)
def test_a_decision_is_a_sentence(decision, said):
    assert str(decision) == said


def test_the_users_words_beat_the_presets():
    assert decided(Policy(), "linear", F32).rule is Rule.HALF
    assert decided(Policy(full={"linear"}), "linear", F32).reason == "listed full by the user"


@pytest.mark.parametrize("rule", list(Rule))
def test_an_unlisted_op_follows_the_policy_before_the_preset(rule):
    assert decided(Policy(default_rule=rule), "relu", F32).rule is rule
    assert decided(Policy(default_rule=rule), "linear", F32).rule is Rule.HALF


def test_a_conditional_entry_beats_the_list_only_for_its_values():
    policy = Policy(half={"softmax"}, conditional=[("softmax", "dim", [-1, None])])
    for value, rule in ((-1, Rule.FULL), (None, Rule.FULL), (1, Rule.HALF), ([-1], Rule.HALF)):
        assert decided(policy, "softmax", F32, dim=value).rule is rule
    assert decided(policy, "softmax", F32).rule is Rule.HALF
    assert (
        decided(policy, "softmax", F32, dim=-1).reason
        == "dim=-1: listed for these values by the user"
    )


def test_a_presets_conditions_hold_beside_the_users():
    theirs = effective_lists(Policy(preset="oneflow"), F16, "cpu").conditional
    ours = effective_lists(
        Policy(preset="oneflow", conditional=[("softmax", "dim", [-1])]), F16, "cpu"
    ).conditional
    assert theirs
    assert set(ours) - set(theirs) == set(
        Policy(conditional=[("softmax", "dim", [-1])]).conditional
    )


def test_an_exemption_replaces_the_presets_for_its_op_alone():
    lists = effective_lists(Policy("O2", exempt_args={"batch_norm": []}), F16, "cpu")
    assert lists.exempt_args["batch_norm"] == ()
    assert lists.exempt_args["instance_norm"] == ("weight", "bias", "running_mean", "running_var")


def test_an_argument_that_the_op_lacks_is_refused():
    with pytest.raises(PolicyError, match=r"^linear has no argument 'dim'"):
        decided(Policy(), "linear", F32, dim=-1)


def test_an_op_of_the_users_own_brings_its_rule_which_a_policy_overrides(mine):
    assert decided(Policy(), mine, F16) == Decision(
        "mine", Rule.FULL, F32, "registered by the user"
    )
    assert decided(Policy(keep={mine}), mine, F16).reason == "listed keep by the user"


def test_lists_that_were_made_before_an_op_was_registered_are_made_again():
    policy = Policy(default_rule="half")
    assert "late" not in all_entries(policy, F16, "cpu")
    registry().register("late", (), Entry(Rule.FULL, "registered by the user"))
    assert all_entries(policy, F16, "cpu")["late"].rule is Rule.FULL
    registry().unregister("late")
    assert "late" not in all_entries(policy, F16, "cpu")


def test_lists_are_made_once_for_equal_policies():
    assert effective_lists(Policy(half={"add"}), F16, "cpu") is effective_lists(
        Policy(half=["add_"]), F16, "cpu"
    )


@pytest.mark.parametrize(
    ("whole", "part"), [(whole, part) for whole, parts in COMPOSED_OF.items() for part in parts]
)
def test_an_op_made_of_others_follows_what_the_user_says_of_its_parts(whole, part):
    assert {whole, part} <= registry().names
    entry = entry_of(effective_lists(Policy(full={part}), BF16, "cpu"), whole, BF16, "cpu")
    assert entry == Entry(Rule.FULL, f"computed by {part}, which is listed full by the user")
    assert (
        entry_of(
            effective_lists(Policy(full={part}, keep={whole}), BF16, "cpu"), whole, BF16, "cpu"
        ).rule
        is Rule.KEEP
    )


def test_an_op_without_a_kernel_runs_in_float32_and_says_so():
    decision = decided(Policy("O3"), "linalg_qr", F32, dtype=BF16, device="cpu")
    assert (decision.rule, decision.dtype) == (Rule.FULL, F32)
    assert "torch has no 16-bit kernel" in decision.reason
    decision = decided(Policy(half={"linalg_qr"}), "linalg_qr", F32, dtype=BF16, device="cpu")
    assert decision.reason == "listed half by the user, but it has no bfloat16 kernel on cpu"
    assert (
        decided(Policy(refuse={"linalg_qr"}), "linalg_qr", F32, dtype=BF16, device="cpu").rule
        is Rule.REFUSE
    )


@pytest.mark.usefixtures("learning")
def test_an_op_that_was_found_to_lack_a_kernel_runs_in_float32_where_it_is_in_no_list():
    policy = Policy("O1", default_rule="half")
    assert decided(policy, "relu", F32, dtype=BF16, device="cpu").dtype is BF16
    missing_kernels.record_missing("relu", BF16, "cpu")
    assert decided(policy, "relu", F32, dtype=BF16, device="cpu").dtype is F32
    assert decided(policy, "relu", F32, dtype=F16, device="cpu").dtype is F16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "OD"])
def test_every_op_has_an_entry_with_a_reason_at_every_level(level):
    entries = all_entries(Policy(level), BF16, "cpu")
    assert list(entries) == sorted(registry().names)
    assert all(entry.reason for entry in entries.values())


def test_nothing_is_cast_at_o0_whatever_else_the_policy_says():
    entries = all_entries(Policy("O0", half={"add"}, default_rule="full"), BF16, "cpu")
    assert {entry.rule for entry in entries.values()} == {Rule.KEEP}


@pytest.mark.parametrize(
    ("level", "rule"), [("O1", Rule.KEEP), ("O2", Rule.HALF), ("O3", Rule.HALF), ("OD", Rule.FULL)]
)
def test_a_level_decides_for_what_is_in_no_list(level, rule):
    assert decided(Policy(level), "relu", F32).rule is rule


def test_no_cast_gives_the_dtype_that_torch_promotes_to():
    assert uncast_decision("add", [F16, F32], "why") == Decision("add", Rule.KEEP, F32, "why")
