"""Decide the rule of an op, resolve the dtype on a device, compare policies."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from support.devices import NATIVE, NONE, SLOW, device
from support.policies import DEFAULT_RULES, policies

import mezzo
from mezzo import Policy, PolicyError, UnsupportedError
from mezzo._events import PolicyDowngraded, PolicyResolved, listen
from mezzo.policy import decide as module
from mezzo.policy import missing_kernels
from mezzo.policy.decide import (
    COMPOSED_OF,
    Decision,
    PolicyDiff,
    ResolvedDtype,
    all_entries,
    diff,
    effective_lists,
    entry_of,
    explain,
    resolve_dtype,
    resolve_dtype_quietly,
    uncast_decision,
)
from mezzo.policy.registry import registry
from mezzo.policy.types import Entry, Rule

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def mine():
    """Register an op for one test."""
    registry().register("mine", (), Entry(Rule.FULL, "registered by the user"))
    yield "mine"
    registry().unregister("mine")


@pytest.fixture
def own_records(monkeypatch):
    """Keep missing kernels that a test records from the other tests."""
    monkeypatch.setattr(missing_kernels, "_recorded", set())
    clear_list_cache()
    yield
    clear_list_cache()


def clear_list_cache():
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
def test_the_rule_and_the_inputs_determine_the_dtype(rule, inputs, dtype):
    decision = decided(Policy("O1", **{rule: {"relu"}}), "relu", *inputs)
    assert (decision.rule, decision.dtype) == (Rule.parse(rule), dtype)


@pytest.mark.parametrize(("op", "inputs"), [("linear", [F64]), ("softmax", [F32, F64])])
def test_inputs_that_are_never_cast_are_the_reason(op, inputs):
    assert decided(Policy(), op, *inputs).reason == "float64 inputs are never cast"


@pytest.mark.parametrize("value", [3, torch.ones(1), "float33", None, float])
def test_an_input_that_is_not_a_dtype_raises(value):
    message = r" is not the dtype of an input\. Pass dtypes such as torch\.float32 or 'float32'\.$"
    with pytest.raises(PolicyError, match=message):
        decided(Policy(), "linear", value)
    with pytest.raises(PolicyError, match=message):
        uncast_decision("linear", [value], "why")


@pytest.mark.parametrize("spelling", ["softmax", "_softmax", "F.softmax", "aten::softmax.int"])
def test_a_decision_does_not_depend_on_the_spelling_of_the_op(spelling):
    assert decided(Policy(), spelling, F16) == decided(Policy(), "softmax", F16)


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (Decision("exp", Rule.FULL, F32, "it overflows"), "exp runs in float32: it overflows."),
        (Decision("exp", Rule.REFUSE, None, "use log"), "exp is refused: use log."),
    ],
)
def test_a_decision_prints_as_a_sentence(decision, expected):
    assert str(decision) == expected


def test_the_policy_overrides_its_preset():
    assert decided(Policy(), "linear", F32).rule is Rule.HALF
    assert decided(Policy(full={"linear"}), "linear", F32).reason == "listed full by the user"


@pytest.mark.parametrize("rule", DEFAULT_RULES)
def test_the_default_rule_of_the_policy_overrides_that_of_the_preset(rule):
    assert decided(Policy(default_rule=rule), "relu", F32).rule is rule
    assert decided(Policy(default_rule=rule), "linear", F32).rule is Rule.HALF


def test_a_conditional_entry_overrides_the_list_only_for_its_values():
    policy = Policy(half={"softmax"}, conditional=[("softmax", "dim", [-1, None])])
    for value, rule in ((-1, Rule.FULL), (None, Rule.FULL), (1, Rule.HALF), ([-1], Rule.HALF)):
        assert decided(policy, "softmax", F32, dim=value).rule is rule
    assert decided(policy, "softmax", F32).rule is Rule.HALF
    assert (
        decided(policy, "softmax", F32, dim=-1).reason
        == "dim=-1: listed for these values by the user"
    )


def test_conditional_entries_of_preset_and_policy_both_apply():
    preset = effective_lists(Policy(preset="oneflow"), F16, "cpu").conditional
    both = effective_lists(
        Policy(preset="oneflow", conditional=[("softmax", "dim", [-1])]), F16, "cpu"
    ).conditional
    assert preset
    assert set(both) - set(preset) == set(
        Policy(conditional=[("softmax", "dim", [-1])]).conditional
    )


def test_an_exemption_replaces_the_presets_for_its_op_only():
    lists = effective_lists(Policy("O3", exempt_args={"batch_norm": []}), F16, "cpu")
    assert lists.exempt_args["batch_norm"] == ()
    assert lists.exempt_args["instance_norm"] == ("weight", "bias", "running_mean", "running_var")


def test_an_unknown_argument_raises():
    with pytest.raises(PolicyError, match=r"^linear has no argument 'dim'"):
        decided(Policy(), "linear", F32, dim=-1)


def test_a_registered_op_has_its_rule_unless_a_policy_overrides_it(mine):
    assert decided(Policy(), mine, F16) == Decision(
        "mine", Rule.FULL, F32, "registered by the user"
    )
    assert decided(Policy(keep={mine}), mine, F16).reason == "listed keep by the user"


def test_registering_an_op_invalidates_cached_lists():
    policy = Policy(default_rule="half")
    assert "late" not in all_entries(policy, F16, "cpu")
    registry().register("late", (), Entry(Rule.FULL, "registered by the user"))
    assert all_entries(policy, F16, "cpu")["late"].rule is Rule.FULL
    registry().unregister("late")
    assert "late" not in all_entries(policy, F16, "cpu")


def test_equal_policies_share_cached_lists():
    assert effective_lists(Policy(half={"add"}), F16, "cpu") is effective_lists(
        Policy(half=["add_"]), F16, "cpu"
    )


@pytest.mark.parametrize(
    ("composite", "part"),
    [(composite, part) for composite, parts in COMPOSED_OF.items() for part in parts],
)
def test_a_composite_op_takes_the_rule_that_the_user_gives_to_a_part(composite, part):
    assert {composite, part} <= registry().names
    entry = entry_of(effective_lists(Policy(full={part}), BF16, "cpu"), composite, BF16, "cpu")
    assert entry == Entry(Rule.FULL, f"computed by {part}, which is listed full by the user")
    assert (
        entry_of(
            effective_lists(Policy(full={part}, keep={composite}), BF16, "cpu"),
            composite,
            BF16,
            "cpu",
        ).rule
        is Rule.KEEP
    )


def test_an_op_without_a_kernel_runs_in_float32_with_that_reason():
    decision = decided(Policy("O3"), "linalg_qr", F32, dtype=BF16, device="cpu")
    assert (decision.rule, decision.dtype) == (Rule.FULL, F32)
    assert "torch has no 16-bit kernel" in decision.reason
    decision = decided(Policy(half={"linalg_qr"}), "linalg_qr", F32, dtype=BF16, device="cpu")
    assert decision.reason == "listed half by the user, but it has no bfloat16 kernel on cpu"
    assert (
        decided(Policy(refuse={"linalg_qr"}), "linalg_qr", F32, dtype=BF16, device="cpu").rule
        is Rule.REFUSE
    )


@pytest.mark.usefixtures("own_records")
def test_an_unlisted_op_with_a_recorded_missing_kernel_runs_in_float32():
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


def test_nothing_is_cast_at_o0_with_any_other_field():
    entries = all_entries(Policy("O0", half={"add"}, default_rule="full"), BF16, "cpu")
    assert {entry.rule for entry in entries.values()} == {Rule.KEEP}


@pytest.mark.parametrize(
    ("level", "rule"), [("O1", Rule.KEEP), ("O2", Rule.KEEP), ("O3", Rule.HALF), ("OD", Rule.FULL)]
)
def test_the_level_decides_the_rule_of_unlisted_ops(level, rule):
    assert decided(Policy(level), "relu", F32).rule is rule


def test_an_uncast_decision_has_the_dtype_that_torch_promotes_to():
    assert uncast_decision("add", [F16, F32], "why") == Decision("add", Rule.KEEP, F32, "why")


F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def no_earlier_warnings(monkeypatch):
    """Forget the warnings of other tests."""
    monkeypatch.setattr(module, "_warned", set())


@pytest.mark.parametrize(
    ("float16", "bfloat16", "dtype"),
    [
        (NATIVE, NATIVE, BF16),
        (NATIVE, SLOW, F16),
        (NATIVE, NONE, F16),
        (SLOW, NATIVE, BF16),
        (SLOW, SLOW, BF16),
        (NONE, SLOW, BF16),
    ],
)
def test_auto_resolves_to_the_dtype_the_hardware_prefers(float16, bfloat16, dtype):
    hardware = device(float16, bfloat16)
    resolved = resolve_dtype(Policy("O1"), hardware)
    assert resolved == ResolvedDtype(dtype, hardware.preferred.reason)
    assert "Fake 100" in resolved.reason


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("support", [NATIVE, SLOW])
def test_a_supported_dtype_is_used_even_if_it_is_not_native(dtype, support):
    assert resolve_dtype(
        Policy("O1", dtype, on_unsupported="error"), device(support, support)
    ) == ResolvedDtype(dtype, support.reason)


@pytest.mark.parametrize("on_unsupported", ["error", "warn", "ignore"])
def test_o0_resolves_to_float32_on_every_device_without_a_warning(on_unsupported):
    assert resolve_dtype(
        Policy("O0", on_unsupported=on_unsupported), device(NONE, NONE)
    ) == ResolvedDtype(None, "level O0 runs everything in float32")


def test_an_unsupported_dtype_warns_once_with_device_reason_and_remedy():
    policy, hardware = Policy("O1", "bfloat16"), device(NATIVE, NONE)
    message = (
        r"^Fake 100 \(cuda\) cannot compute in bfloat16: it has no kernels for it\. Use"
        r" dtype='float16'\. Running in float32\.$"
    )
    with pytest.warns(UserWarning, match=message):
        assert resolve_dtype(policy, hardware) == ResolvedDtype(None, "it has no kernels for it")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_dtype(policy, hardware).dtype is None
        assert resolve_dtype(Policy("O2", "bfloat16"), hardware).dtype is None


def test_another_device_or_dtype_warns_again():
    for policy, hardware in (
        (Policy(dtype="bfloat16"), device(NATIVE, NONE)),
        (Policy(dtype="bfloat16"), device(NATIVE, NONE, name="Other")),
        (Policy(dtype="float16"), device(NONE, NATIVE)),
    ):
        with pytest.warns(UserWarning, match="cannot compute in"):
            resolve_dtype(policy, hardware)


def test_a_device_without_16_bit_dtypes_suggests_another_device():
    message = (
        r"^Fake 100 \(cuda\) cannot compute in a 16-bit dtype: it has no kernels for it\. Use"
        r" another device, or level O0\. Running in float32\.$"
    )
    with pytest.warns(UserWarning, match=message):
        assert resolve_dtype(Policy("O1"), device(NONE, NONE)).dtype is None


def test_the_warning_points_at_the_users_line():
    with pytest.warns(UserWarning, match="cannot compute in") as caught:
        resolve_dtype(Policy("O1"), device(NONE, NONE))
    assert caught[0].filename == __file__


def test_the_warning_of_a_region_points_at_the_users_line():
    with pytest.warns(UserWarning, match="cannot compute in") as caught:
        mezzo.autocast("O1", device_type="xpu", half={"exp"})
    assert caught[0].filename == __file__


def test_error_raises_with_the_remedies():
    message = (
        r"^Fake 100 \(cuda\) cannot compute in bfloat16: it has no kernels for it\. Use"
        r" dtype='float16'; or on_unsupported='warn' to run in float32\.$"
    )
    with pytest.raises(UnsupportedError, match=message), listen() as events:
        resolve_dtype(Policy("O1", "bfloat16", on_unsupported="error"), device(NATIVE, NONE))
    assert events == []


def test_ignore_runs_in_float32_without_a_warning_but_with_an_event():
    with warnings.catch_warnings(), listen() as events:
        warnings.simplefilter("error")
        assert (
            resolve_dtype(
                Policy("O1", "bfloat16", on_unsupported="ignore"), device(NATIVE, NONE)
            ).dtype
            is None
        )
    assert PolicyDowngraded("bfloat16", "float32", "cuda", "it has no kernels for it") in events


def test_resolving_a_policy_emits_an_event():
    policy = Policy("O1", "float16", half={"exp"})
    with listen() as events:
        resolve_dtype(policy, device())
    assert events == [PolicyResolved(repr(policy), "cuda", "float16", "it has instructions for it")]


def test_a_downgrade_emits_an_event_each_time_and_warns_once():
    policy, hardware = Policy("O1"), device(NONE, NONE)
    with listen() as events, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolve_dtype(policy, hardware)
        resolve_dtype(policy, hardware)
    downgraded = PolicyDowngraded("a 16-bit dtype", "float32", "cuda", "it has no kernels for it")
    assert (
        events
        == [
            downgraded,
            PolicyResolved("Policy('O1')", "cuda", "float32", "it has no kernels for it"),
        ]
        * 2
    )
    assert len(caught) == 1


@pytest.mark.parametrize("on_unsupported", ["error", "warn", "ignore"])
def test_resolve_quietly_returns_the_same_without_error_warning_or_event(on_unsupported):
    with warnings.catch_warnings(), listen() as events:
        warnings.simplefilter("error")
        assert resolve_dtype_quietly(
            Policy("O1", on_unsupported=on_unsupported), device(NONE, NONE)
        ) == ResolvedDtype(None, "it has no kernels for it")
    assert events == []


GPU = device()


@settings(max_examples=10)
@given(policies())
def test_a_policy_has_no_difference_to_itself(policy):
    assert diff(policy, policy, GPU) == PolicyDiff((), ())


def test_equal_policies_print_no_difference():
    difference = diff(Policy(half={"add"}), Policy(half=["add_"]), GPU)
    assert not difference
    assert str(difference) == "no difference"


def test_a_difference_lists_fields_and_ops_with_another_rule():
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


def test_a_field_that_changes_no_op_is_listed():
    difference = diff(Policy(cache="off"), Policy(), GPU)
    assert difference == PolicyDiff((("cache", "off", "auto"),), ())
    assert difference


def test_swapping_the_policies_swaps_the_sides():
    one, other = Policy("O1"), Policy("O2", half={"exp"})
    there, back = diff(one, other, GPU), diff(other, one, GPU)
    assert tuple((name, after, before) for name, before, after in there.ops) == back.ops
    assert tuple((name, after, before) for name, before, after in there.fields) == back.fields


def test_dtype_auto_is_compared_as_resolved_on_the_device():
    assert diff(Policy(), Policy(dtype="bfloat16"), device(SLOW, NATIVE, kind="cpu")).ops == ()
    assert diff(Policy(), Policy(dtype="float16"), device(NATIVE, NONE, kind="cpu")).ops == ()


def test_presets_can_be_compared_for_an_absent_device():
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
