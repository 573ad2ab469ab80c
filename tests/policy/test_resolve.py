"""Where a policy meets a device."""

import warnings

import pytest
import torch
from support.devices import NATIVE, NONE, SLOW, device

import mezzo
from mezzo import Policy, UnsupportedError
from mezzo._events import PolicyDowngraded, PolicyResolved, listen
from mezzo.policy import decide as module
from mezzo.policy.decide import Resolved, resolve, resolve_quietly

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What was warned of before counts for no other test."""
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
def test_auto_picks_by_hardware_and_says_why(float16, bfloat16, dtype):
    hardware = device(float16, bfloat16)
    resolved = resolve(Policy("O1"), hardware)
    assert resolved == Resolved(dtype, hardware.preferred.reason)
    assert "Fake 100" in resolved.reason


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("support", [NATIVE, SLOW])
def test_a_dtype_that_was_asked_for_is_taken_wherever_it_runs(dtype, support):
    assert resolve(
        Policy("O1", dtype, on_unsupported="error"), device(support, support)
    ) == Resolved(dtype, support.reason)


@pytest.mark.parametrize("how", ["error", "warn", "ignore"])
def test_o0_needs_nothing_of_the_device_and_says_nothing(how):
    assert resolve(Policy("O0", on_unsupported=how), device(NONE, NONE)) == Resolved(
        None, "level O0 runs everything in float32"
    )


def test_what_the_device_lacks_is_warned_of_once_with_the_device_what_it_lacks_and_what_to_use():
    policy, hardware = Policy("O1", "bfloat16"), device(NATIVE, NONE)
    message = (
        r"^Fake 100 \(cuda\) cannot compute in bfloat16: it has no kernels for it\. Use"
        r" dtype='float16'\. Running in float32\.$"
    )
    with pytest.warns(UserWarning, match=message):
        assert resolve(policy, hardware) == Resolved(None, "it has no kernels for it")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(policy, hardware).dtype is None
        assert resolve(Policy("O2", "bfloat16"), hardware).dtype is None


def test_another_device_or_dtype_is_warned_of_anew():
    for policy, hardware in (
        (Policy(dtype="bfloat16"), device(NATIVE, NONE)),
        (Policy(dtype="bfloat16"), device(NATIVE, NONE, name="Other")),
        (Policy(dtype="float16"), device(NONE, NATIVE)),
    ):
        with pytest.warns(UserWarning, match="cannot compute in"):
            resolve(policy, hardware)


def test_a_device_without_any_16_bits_is_answered_with_another_device():
    message = (
        r"^Fake 100 \(cuda\) cannot compute in a 16-bit dtype: it has no kernels for it\. Use"
        r" another device, or level O0\. Running in float32\.$"
    )
    with pytest.warns(UserWarning, match=message):
        assert resolve(Policy("O1"), device(NONE, NONE)).dtype is None


def test_the_warning_points_at_the_users_line():
    with pytest.warns(UserWarning, match="cannot compute in") as caught:
        resolve(Policy("O1"), device(NONE, NONE))
    assert caught[0].filename == __file__


def test_the_warning_of_a_region_points_at_the_users_line():
    with pytest.warns(UserWarning, match="cannot compute in") as caught:
        mezzo.autocast("O1", device_type="meta", half={"exp"})
    assert caught[0].filename == __file__


def test_error_raises_with_the_remedies():
    message = (
        r"^Fake 100 \(cuda\) cannot compute in bfloat16: it has no kernels for it\. Use"
        r" dtype='float16'; or on_unsupported='warn' to run in float32\.$"
    )
    with pytest.raises(UnsupportedError, match=message), listen() as heard:
        resolve(Policy("O1", "bfloat16", on_unsupported="error"), device(NATIVE, NONE))
    assert heard == []


def test_ignore_runs_in_float32_without_a_word_but_with_an_event():
    with warnings.catch_warnings(), listen() as heard:
        warnings.simplefilter("error")
        assert (
            resolve(Policy("O1", "bfloat16", on_unsupported="ignore"), device(NATIVE, NONE)).dtype
            is None
        )
    assert PolicyDowngraded("bfloat16", "float32", "cuda", "it has no kernels for it") in heard


def test_a_policy_that_is_resolved_is_an_event():
    policy = Policy("O1", "float16", half={"exp"})
    with listen() as heard:
        resolve(policy, device())
    assert heard == [PolicyResolved(repr(policy), "cuda", "float16", "it has instructions for it")]


def test_a_downgrade_is_an_event_every_time_and_a_warning_once():
    policy, hardware = Policy("O1"), device(NONE, NONE)
    with listen() as heard, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolve(policy, hardware)
        resolve(policy, hardware)
    downgraded = PolicyDowngraded("a 16-bit dtype", "float32", "cuda", "it has no kernels for it")
    assert (
        heard
        == [
            downgraded,
            PolicyResolved("Policy('O1')", "cuda", "float32", "it has no kernels for it"),
        ]
        * 2
    )
    assert len(caught) == 1


@pytest.mark.parametrize("how", ["error", "warn", "ignore"])
def test_who_only_asks_gets_the_same_answer_without_error_warning_or_event(how):
    with warnings.catch_warnings(), listen() as heard:
        warnings.simplefilter("error")
        assert resolve_quietly(Policy("O1", on_unsupported=how), device(NONE, NONE)) == Resolved(
            None, "it has no kernels for it"
        )
    assert heard == []
