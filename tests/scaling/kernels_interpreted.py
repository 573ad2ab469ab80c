"""The Triton kernels of scaling in Triton's interpreter, on a CPU.

`test_check_unscale.py` runs this file in a process of its own.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.kernel_cases import (
    DTYPES,
    FACTORS,
    bits,
    check_against_reference,
    fresh_seed,
    gradients,
    raised,
    same,
    spoil,
)
from support.scale_rules import RULES

from mezzo import ScaleRule, ScaleState, _launch
from mezzo.scaling import check_unscale
from mezzo.scaling.gradient_counts import Counts, GradientCounts
from mezzo.scaling.scale_state import next_state
from mezzo.scaling.scale_tensors import DeviceLossScale

# The interpreter computes with NumPy, which warns of an overflow to infinity.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def use_kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)


def agrees(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare exactly, or for bfloat16 nearly.

    The interpreter truncates bfloat16 and errs on subnormals; tests/gpu tests the GPU's rounding.
    """
    if got.dtype is not torch.bfloat16:
        return same(got, expected)
    return torch.allclose(
        got.float(), expected.float(), rtol=2.0**-7, atol=2.0**-124, equal_nan=True
    )


@pytest.mark.thinned(4)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_and_flags_equal_the_float64_reference(dtype: torch.dtype, factor: float) -> None:
    check_against_reference(dtype, "cpu", factor, agrees)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checking_writes_nothing_and_neither_does_a_factor_of_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed := fresh_seed())
    tensors = gradients(dtype, "cpu", generator)
    expected = spoil(tensors, generator)
    before = [bits(tensor).clone() for tensor in tensors]
    for unscale in (False, True):
        found, flags = raised("cpu", len(tensors))
        if unscale:
            check_unscale.check_and_unscale(tensors, torch.tensor(1.0), found, flags)
        else:
            check_unscale.check(tensors, found, flags)
        assert (flags.tolist(), found.item()) == (expected, float(any(expected))), seed
        assert all(
            torch.equal(bits(tensor), old) for tensor, old in zip(tensors, before, strict=True)
        ), seed


def test_flags_are_set_and_never_reset() -> None:
    found, flags = torch.ones(()), torch.tensor([1, 0], dtype=torch.int32)
    check_unscale.check_and_unscale([torch.ones(3), torch.ones(3)], torch.tensor(0.5), found, flags)
    assert (found.item(), flags.tolist()) == (1.0, [1, 0])


def test_flags_of_single_gradients_are_optional() -> None:
    found = torch.zeros(())
    check_unscale.check_and_unscale(
        [torch.ones(3), torch.full((2,), torch.nan)], torch.tensor(0.5), found
    )
    assert found.item() == 1.0


def test_a_product_that_overflows_is_found_although_its_factors_are_finite() -> None:
    found, flags = raised("cpu", 1)
    check_unscale.check_and_unscale(
        [torch.full((5,), 60000.0, dtype=torch.float16)], torch.tensor(2.0), found, flags
    )
    assert (found.item(), flags.tolist()) == (1.0, [1])


def test_a_nonfinite_element_beyond_the_end_of_a_gradient_is_ignored() -> None:
    storage = torch.full((100,), torch.nan)
    storage[10:43] = 1.0
    found, flags = raised("cpu", 1)
    check_unscale.check_and_unscale([storage[10:43]], torch.tensor(0.5), found, flags)
    assert (found.item(), flags.tolist()) == (0.0, [0])
    assert storage[10:43].eq(0.5).all()
    assert storage[:10].isnan().all()
    assert storage[43:].isnan().all()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_check_counts_what_torch_counts_and_changes_no_result(
    dtype: torch.dtype, unscale: bool
) -> None:
    small = torch.finfo(dtype).smallest_normal / 2
    tensors = [
        torch.tensor([0.0, -0.0, small, -small, 1.0, torch.inf, torch.nan], dtype=dtype),
        torch.zeros(5000, dtype=dtype),
        torch.ones(3, dtype=dtype),
        torch.empty(0, dtype=dtype),
        torch.full((4100,), -torch.inf, dtype=dtype),
    ]
    tensors[1][:4097] = 2 * small
    parameters = [torch.zeros_like(one) for one in tensors]
    by_kernel, in_torch = GradientCounts(parameters), GradientCounts(parameters)
    for counts in (by_kernel, in_torch):
        counts.of(parameters[:2])
    plain = [one.clone() for one in tensors]
    in_torch.of(parameters).add(tensors)
    results = []
    for grads, counted in ((plain, None), (tensors, by_kernel.of(parameters))):
        found, flags = raised("cpu", len(tensors))
        if unscale:
            check_unscale.check_and_unscale(grads, torch.tensor(0.5), found, flags, counted)
        else:
            check_unscale.check(grads, found, flags, counted)
        results.append((found.item(), flags.tolist()))
    assert results[0] == results[1]
    assert all(same(one, other) for one, other in zip(plain, tensors, strict=True))
    assert torch.equal(by_kernel.memory, in_torch.memory)
    assert by_kernel.first_parameter(by_kernel.first.item()) == 0
    counts = by_kernel.by_parameter(by_kernel.used().tolist())
    assert counts[0] == Counts(overflowed=2, underflowed=4, zeros=2, total=7)
    assert counts[1] == Counts(overflowed=0, underflowed=903, zeros=903, total=5000)
    assert counts[4].overflowed == 4100


def test_many_tiny_gradients_take_one_launch() -> None:
    tensors = [torch.full((1 + index % 7,), 2.0) for index in range(300)]
    tensors[222][0] = torch.inf
    found, flags = raised("cpu", len(tensors))
    check_unscale.check_and_unscale(tensors, torch.tensor(0.5), found, flags)
    assert flags.nonzero().flatten().tolist() == [222]
    assert all(tensor[-1] == 1.0 for tensor in tensors if tensor.numel() > 1)


def test_empty_gradients_alone_need_no_launch() -> None:
    found, flags = raised("cpu", 2)
    check_unscale.check_and_unscale(
        [torch.empty(0), torch.empty(3, 0)], torch.tensor(0.5), found, flags
    )
    assert (found.item(), flags.tolist()) == (0.0, [0, 0])


def test_only_a_write_increments_the_version_of_a_gradient() -> None:
    gradient = torch.ones(3)
    found, flags = raised("cpu", 1)
    before = gradient._version
    check_unscale.check([gradient], found, flags)
    assert gradient._version == before
    check_unscale.check_and_unscale([gradient], torch.tensor(0.5), found, flags)
    assert gradient._version > before


def test_a_table_is_reused_while_addresses_and_sizes_stay_the_same() -> None:
    found, flags = raised("cpu", 2)
    storage = [torch.ones(64), torch.ones(64)]
    check_unscale._tables.clear()
    for _ in range(3):
        check_unscale.check(storage, found, flags)
    assert len(check_unscale._tables) == 1
    storage[1][40] = torch.nan
    check_unscale.check([storage[0], storage[1][:32]], found, flags)
    assert found.item() == 0.0
    check_unscale.check(storage, found, flags)
    assert flags.tolist() == [0, 1]
    for size in range(1, 40):
        check_unscale.check([storage[0][:size]], found, flags)
    assert len(check_unscale._tables) <= _launch._MAX_TABLES


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_the_kernel_changes_the_scale_as_next_state_does(
    rule: ScaleRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DeviceLossScale, "_change", lambda *_, **__: pytest.fail("torch's kernels were used")
    )
    steps = random.Random(0)
    state = ScaleState(rule.clamp(2.0**10))
    scale = DeviceLossScale(state, torch.device("cpu"))
    for step in range(100):
        is_nonfinite = steps.random() < (0.7 if step // 25 % 2 else 0.1)
        scale.advance(torch.tensor(float(is_nonfinite)), rule)
        state = next_state(state, rule, found_nonfinite=is_nonfinite)
        assert scale.read() == state, step


def test_an_equal_rule_does_not_write_the_table_anew() -> None:
    scale = DeviceLossScale(ScaleState(), torch.device("cpu"))
    scale.advance(torch.zeros(()), ScaleRule(growth_factor=4.0))
    table = scale._rule
    scale.advance(torch.zeros(()), ScaleRule(growth_factor=4.0))
    assert scale._rule is table
    scale.advance(torch.zeros(()), ScaleRule(growth_factor=3.0))
    assert scale._rule is not table


def test_sums_of_squares_are_those_of_the_unscaled_gradients() -> None:
    generator = torch.Generator().manual_seed(seed := fresh_seed())
    tensors = [torch.randn(size, generator=generator).half() for size in (1, 700, 5000)]
    found, scale = torch.zeros(()), torch.tensor(1024.0 * 3.0)
    table = check_unscale.make_table(tensors, check_unscale.CHUNK)
    squares = check_unscale.launch(
        table, torch.float16, scale, found, None, check_unscale.CHUNK, inverse=True
    )
    expected = sum((tensor.double() / scale.double()).square().sum() for tensor in tensors)
    assert squares.shape == (1 + 1 + 3,), seed
    assert torch.allclose(squares.double().sum(), expected, rtol=1e-6), seed
    assert found.item() == 0.0
