"""Master formats: each restores a float32 value as exactly as it promises."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_cases import fresh_seed
from support.patterns import any_bits, edges, every_upper_half, neighbours, same_bits

from mezzo import PolicyError
from mezzo.optim.master_formats import (
    MASTER_FORMATS,
    Float32,
    Kahan,
    MasterFormat,
    NoMaster,
    RandomDraw,
    Split,
    Stochastic,
    round_stochastically,
)
from mezzo.policy.types import Master

HALVES = [torch.bfloat16, torch.float16]
FITTING = [
    (master_format, half)
    for master_format in MASTER_FORMATS.values()
    for half in HALVES
    if master_format.master is not Master.SPLIT or half is torch.bfloat16
]
MILLIONS = 4_000_000


def finite(values: torch.Tensor) -> torch.Tensor:
    return values[values.isfinite()]


def fitting(values: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """Return the values that do not round to an infinity."""
    return values[values.to(half).isfinite()]


def spread(count: int, half: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers of either sign over the whole range of a dtype, and below it."""
    lowest, highest = (-30.0, 15.0) if half is torch.float16 else (-149.0, 127.0)
    exponents = (
        torch.rand(count, generator=generator, dtype=torch.float64) * (highest - lowest) + lowest
    )
    signs = torch.randint(2, (count,), generator=generator) * 2 - 1
    return (exponents.exp2() * signs).float()


def test_every_master_of_a_policy_has_a_format():
    assert set(MASTER_FORMATS) == set(Master) - {Master.AUTO}
    assert all(master_format.master is master for master, master_format in MASTER_FORMATS.items())


@pytest.mark.parametrize(("master_format", "half"), FITTING)
def test_a_companion_has_the_declared_dtype_and_the_shape_of_the_value(
    master_format: MasterFormat, half: torch.dtype
):
    for shape in [(), (0,), (2, 3)]:
        parameter, companion = master_format.split(torch.ones(shape), half)
        assert (parameter.dtype, parameter.shape) == (half, shape)
        assert (None if companion is None else companion.dtype) is master_format.companion_dtype(
            half
        )
        assert companion is None or companion.shape == shape
        merged = master_format.merge(parameter, companion)
        assert (merged.dtype, merged.shape) == (torch.float32, shape)


@pytest.mark.parametrize(
    "master_format", MASTER_FORMATS.values(), ids=lambda master_format: type(master_format).__name__
)
def test_merge_returns_a_new_tensor(master_format: MasterFormat):
    parameter, companion = master_format.split(torch.tensor([1.0, 1.1]), torch.bfloat16)
    before = parameter.clone(), None if companion is None else companion.clone()
    master_format.merge(parameter, companion).zero_()
    assert torch.equal(parameter, before[0])
    assert companion is None or torch.equal(companion, before[1])


@pytest.mark.parametrize(
    "master_format",
    [
        master_format
        for master_format in MASTER_FORMATS.values()
        if master_format.companion_dtype(torch.bfloat16)
    ],
    ids=lambda master_format: type(master_format).__name__,
)
def test_merge_without_a_companion_returns_the_parameters_value(master_format: MasterFormat):
    assert master_format.merge(torch.tensor([1.5, -2.0]).bfloat16(), None).tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "master_format", MASTER_FORMATS.values(), ids=lambda master_format: type(master_format).__name__
)
def test_split_does_not_change_or_share_the_value(master_format: MasterFormat):
    value = torch.tensor([1.1, -2.2])
    before = value.clone()
    parameter, companion = master_format.split(value, torch.bfloat16)
    assert torch.equal(value, before)
    value.zero_()
    assert parameter[0].item() == pytest.approx(1.1, rel=2**-8)
    assert companion is None or master_format.merge(parameter, companion)[
        0
    ].item() == pytest.approx(1.1, rel=2**-8)


# -- split -----------------------------------------------------------------------------------------


def roundtrip(value: torch.Tensor) -> torch.Tensor:
    return Split().merge(*Split().split(value, torch.bfloat16))


@pytest.mark.parametrize("values", [edges, every_upper_half])
def test_split_restores_every_edge_case_to_the_last_bit(values):
    assert same_bits(roundtrip(values()), values())


def test_split_restores_millions_of_bit_patterns():
    values = any_bits(MILLIONS, torch.Generator().manual_seed(seed := fresh_seed()))
    assert same_bits(roundtrip(values), values), seed


@given(st.floats(width=32))
def test_split_restores_any_number(number: float):
    got = roundtrip(torch.tensor([number])).item()
    assert (
        math.isnan(got) if math.isnan(number) else struct.pack("d", got) == struct.pack("d", number)
    )


@pytest.mark.parametrize(
    "bits", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F808000, 0x7FFF8000, -1, -0x400000, -0x7FFFFF]
)
def test_split_keeps_every_nan(bits: int):
    value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert value.isnan().all()
    parameter, remainder = Split().split(value, torch.bfloat16)
    assert parameter.isnan().all()
    assert Split().merge(parameter, remainder).isnan().all()


def test_split_rounds_to_nearest_and_ties_away_from_zero():
    values = finite(
        torch.cat(
            [edges(), any_bits(MILLIONS, torch.Generator().manual_seed(seed := fresh_seed()))]
        )
    )
    parameter, _ = Split().split(values, torch.bfloat16)
    below, above = neighbours(values.double(), torch.bfloat16)
    # Beyond the largest bfloat16, IEEE rounding treats infinity as the next step.
    beyond = 2.0**128
    low, high = (side.double().nan_to_num(posinf=beyond, neginf=-beyond) for side in (below, above))
    wide, exact = parameter.double().nan_to_num(posinf=beyond, neginf=-beyond), values.double()
    nearer = torch.where(
        exact - low == high - exact,
        torch.where(exact > 0, high, low),
        torch.where(exact - low < high - exact, low, high),
    )
    assert torch.equal(wide, nearer), seed
    ties = (exact - low == high - exact) & (low != high)
    assert int(ties.sum()) > 1000
    assert bool((wide[ties].abs() > exact[ties].abs()).all())


def test_split_has_no_bias():
    values = (
        torch.rand(1_000_000, generator=torch.Generator().manual_seed(seed := fresh_seed())) + 1.0
    )
    parameter, _ = Split().split(values, torch.bfloat16)
    error = (parameter.double() - values.double()).mean().item()
    # The error of one is uniform over a step of 2^-7: six standard deviations of the mean.
    # Truncation would give half a step.
    assert abs(error) < 6 * 2.0**-7 / math.sqrt(12 * values.numel()), seed


def test_split_keeps_the_sign_of_zero():
    parameter, remainder = Split().split(torch.tensor([0.0, -0.0]), torch.bfloat16)
    assert parameter.signbit().tolist() == [False, True]
    assert remainder.tolist() == [0, 0]


def test_split_refuses_float16():
    with pytest.raises(
        PolicyError,
        match=r"needs bfloat16 parameters, got float16\. Use master='float32', or dtype='bfloat16'",
    ):
        Split().split(torch.ones(1), torch.float16)


# -- float32 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_float32_restores_every_edge_case_to_the_last_bit(half: torch.dtype):
    values = torch.cat(
        [edges(), any_bits(MILLIONS, torch.Generator().manual_seed(seed := fresh_seed()))]
    )
    parameter, master = Float32().split(values, half)
    assert same_bits(parameter, values.to(half)), seed
    assert same_bits(Float32().merge(parameter, master), values), seed


@pytest.mark.parametrize("half", HALVES)
def test_float32_follows_writes_by_other_code_element_by_element(half: torch.dtype):
    exact = torch.tensor([1.1, 2.2, 3.3, 0.0, math.nan])
    parameter, master = Float32().split(exact, half)
    parameter[1] = 7.0
    parameter[3] = -0.0
    merged = Float32().merge(parameter, master)
    assert merged[[0, 2]].tolist() == exact[[0, 2]].tolist()
    assert merged[1].item() == 7.0
    assert merged[3].signbit().item()
    assert merged[4].isnan().item()


def test_float32_follows_nan_written_by_other_code():
    parameter, master = Float32().split(torch.ones(2), torch.bfloat16)
    parameter[0] = math.nan
    merged = Float32().merge(parameter, master)
    assert merged[0].isnan().item()
    assert merged[1].item() == 1.0


# -- kahan -----------------------------------------------------------------------------------------


def test_kahan_in_bfloat16_loses_at_most_the_seventeenth_bit():
    values = spread(MILLIONS, torch.bfloat16, torch.Generator().manual_seed(seed := fresh_seed()))
    # Far above the smallest numbers: the compensation is 2^-9 of the value, and its error 2^-9 of
    # that.
    values = values[values.abs() > 2.0**-100]
    parameter, compensation = Kahan().split(values, torch.bfloat16)
    assert same_bits(parameter, values.bfloat16()), seed
    error = (Kahan().merge(parameter, compensation).double() - values.double()).abs()
    assert bool((error <= values.double().abs() * 2.0**-17).all()), seed
    assert bool((error > 0).any())


def test_kahan_in_float16_loses_at_most_half_of_its_smallest_step_or_the_twenty_third_bit():
    values = spread(MILLIONS, torch.float16, torch.Generator().manual_seed(seed := fresh_seed()))
    parameter, compensation = Kahan().split(values, torch.float16)
    error = (Kahan().merge(parameter, compensation).double() - values.double()).abs()
    # Where compensations fall below float16's normal range they have equal steps of 2^-24.
    assert bool(
        (
            error
            <= torch.maximum(
                values.double().abs() * 2.0**-22, torch.tensor(2.0**-25, dtype=torch.float64)
            )
        ).all()
    ), seed


@pytest.mark.parametrize("half", HALVES)
def test_kahan_adds_up_updates_that_a_parameter_alone_would_lose(half: torch.dtype):
    parameter, compensation = Kahan().split(torch.tensor([1.0]), half)
    lost = parameter.clone()
    update = 2.0**-13
    for _ in range(1000):
        parameter, compensation = Kahan().split(
            Kahan().merge(parameter, compensation) + update, half
        )
        lost = (lost.float() + update).to(half)
    assert Kahan().merge(parameter, compensation).item() == pytest.approx(
        1.0 + 1000 * update, rel=1e-3
    )
    assert lost.item() == 1.0


@pytest.mark.parametrize("half", HALVES)
def test_kahan_restores_16_bit_values_exactly(half: torch.dtype):
    values = (
        fitting(
            finite(any_bits(100_000, torch.Generator().manual_seed(seed := fresh_seed()))), half
        )
        .to(half)
        .float()
    )
    assert torch.equal(Kahan().merge(*Kahan().split(values, half)), values), seed


# -- stochastic rounding ---------------------------------------------------------------------------


def repeated(number: float, count: int = 200_000) -> torch.Tensor:
    return torch.full((count,), number)


TINY = [
    2.0**-25,
    -(2.0**-25),
    2.0**-24 * 1.25,
    2.0**-15 * 1.0003,
    -(2.0**-14) * (1 - 2.0**-12),
    2.0**-20 * 1.7,
    -(2.0**-23) * 1.3,
]


@pytest.mark.parametrize(
    ("number", "half"),
    [
        (number, half)
        for half in HALVES
        for number in (
            1.0 + 2.0**-12,
            -1.0 - 2.0**-12,
            3.14159,
            -2.71828e-3,
            1000.1,
            1 - 2.0**-12,
            2.0**-13 * 1.0001,
        )
    ]
    + [(number, torch.float16) for number in TINY]
    + [
        (number, torch.bfloat16)
        for number in (2.0**-130 * 1.1, -(2.0**-133) * 0.6, 1.234e38, -5.4321e-39)
    ],
)
def test_stochastic_rounding_is_unbiased_and_gives_one_of_two_neighbours(
    number: float, half: torch.dtype
):
    value = repeated(number)
    drawn = round_stochastically(value, half, RandomDraw(seed := fresh_seed(), 3, 7)).double()
    exact = value[0].double()
    below, above = (side.double() for side in neighbours(exact[None], half))
    assert set(drawn.tolist()) <= {below.item(), above.item()}, seed
    step = (above - below).item()
    chance = ((exact - below) / (above - below)).item()
    # Six standard deviations of the mean of coin tosses, and the finest chance that thirteen bits
    # can express.
    allowed = 6 * math.sqrt(chance * (1 - chance) / value.numel()) + 2.0**-13
    assert abs((drawn.mean().item() - exact.item()) / step) < allowed, seed


@pytest.mark.parametrize("half", HALVES)
def test_stochastic_rounding_has_no_bias_over_the_whole_range(half: torch.dtype):
    value = spread(MILLIONS, half, torch.Generator().manual_seed(seed := fresh_seed()))
    value = value[value.abs() < (2.0**15 if half is torch.float16 else 2.0**126)]
    drawn, exact = (
        round_stochastically(value, half, RandomDraw(seed, 0, 0)).double(),
        value.double(),
    )
    below, above = (side.double() for side in neighbours(exact, half))
    assert bool(((drawn == below) | (drawn == above)).all()), seed
    moved = above > below
    error = ((drawn - exact) / (above - below))[moved]
    # An error is at most a step, with a variance below a quarter.
    assert abs(error.mean().item()) < 6 * 0.5 / math.sqrt(error.numel()) + 2.0**-14, seed
    assert (
        abs((error * value[moved].sign()).mean().item())
        < 6 * 0.5 / math.sqrt(error.numel()) + 2.0**-14
    ), seed


@pytest.mark.parametrize("half", HALVES)
def test_16_bit_values_are_not_rounded(half: torch.dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half)
    every = every[every.isfinite()]
    drawn = round_stochastically(every.float(), half, RandomDraw(seed := fresh_seed(), 1, 1))
    assert torch.equal(drawn, every), seed


@pytest.mark.parametrize("half", HALVES)
def test_nonfinite_values_are_kept(half: torch.dtype):
    value = torch.tensor([math.inf, -math.inf, math.nan]).repeat(1000)
    assert same_bits(
        round_stochastically(value, half, RandomDraw(fresh_seed(), 1, 1)), value.to(half)
    )


@pytest.mark.parametrize("half", HALVES)
def test_equal_draws_give_equal_bits_and_others_give_others(half: torch.dtype):
    value = spread(10_000, half, torch.Generator().manual_seed(seed := fresh_seed()))
    draw = RandomDraw(seed, 2, 5)
    first = round_stochastically(value, half, draw)
    assert same_bits(round_stochastically(value, half, RandomDraw(seed, 2, 5)), first), seed
    assert same_bits(
        round_stochastically(value, half, RandomDraw(seed, 2, torch.tensor(5))), first
    ), seed
    for other in (RandomDraw(seed + 1, 2, 5), RandomDraw(seed, 3, 5), RandomDraw(seed, 2, 6)):
        assert not same_bits(round_stochastically(value, half, other), first), (seed, other)


def test_elements_are_rounded_independently():
    drawn = (
        round_stochastically(
            repeated(1.0 + 2.0**-8, 10_000), torch.bfloat16, RandomDraw(seed := fresh_seed(), 0, 1)
        ).double()
        - 1.0
    )
    ups = (drawn > 0).double() - 0.5
    # Dependent neighbours would be correlated; six standard deviations.
    assert abs((ups[1:] * ups[:-1]).mean().item()) < 6 * 0.25 / 100, seed


def test_random_numbers_follow_memory_order():
    flat = torch.rand(2 * 3 * 4 * 5, generator=torch.Generator().manual_seed(seed := fresh_seed()))
    draw = RandomDraw(seed, 0, 1)
    drawn = round_stochastically(flat, torch.bfloat16, draw)
    for view in (
        lambda t: t.view(24, 5).T,
        lambda t: t.view(2, 4, 5, 3).permute(0, 3, 1, 2),
        lambda t: t.view(6, 1, 20).transpose(0, 2),
    ):
        assert torch.equal(round_stochastically(view(flat), torch.bfloat16, draw), view(drawn)), (
            seed
        )


def test_random_numbers_follow_index_order_if_memory_has_gaps():
    wide = torch.rand(30, 20, generator=torch.Generator().manual_seed(seed := fresh_seed()))
    for value in (wide[:, ::2], wide[:, :7].T, wide[:1].expand(4, 20)):
        drawn = round_stochastically(value, torch.bfloat16, RandomDraw(seed, 0, 1))
        assert torch.equal(
            drawn, round_stochastically(value.contiguous(), torch.bfloat16, RandomDraw(seed, 0, 1))
        ), seed


def test_stochastic_rounds_to_nearest_without_a_draw():
    values = torch.rand(1000)
    parameter, companion = Stochastic().split(values, torch.bfloat16)
    assert companion is None
    assert torch.equal(parameter, values.bfloat16())
    assert torch.equal(Stochastic().merge(parameter, None), values.bfloat16().float())


def test_stochastic_adds_up_updates_that_rounding_to_nearest_would_lose():
    seed, update = fresh_seed(), 2.0**-12
    # As many as needed for a mean that is 5 standard deviations within the tolerance.
    parameter, lost = torch.ones(5000).bfloat16(), torch.ones(5000).bfloat16()
    for step in range(400):
        parameter, _ = Stochastic().split(
            Stochastic().merge(parameter, None) + update, torch.bfloat16, RandomDraw(seed, 0, step)
        )
        lost, _ = NoMaster().split(NoMaster().merge(lost, None) + update, torch.bfloat16)
    assert parameter.double().mean().item() == pytest.approx(1.0 + 400 * update, rel=2e-3), seed
    assert lost.double().mean().item() == 1.0


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_the_compensation_of_an_overwritten_parameter_is_dropped(half: torch.dtype):
    exact = torch.randn(10_000)
    parameter, compensation = MASTER_FORMATS[Master.KAHAN].split(exact, half)
    pruned = parameter * (torch.arange(10_000) % 2)
    merged = MASTER_FORMATS[Master.KAHAN].merge(pruned, compensation)
    # The rounding error of zero is at most half of the smallest number.
    assert merged[::2].abs().max() <= torch.finfo(half).smallest_normal * torch.finfo(half).eps
    assert torch.equal(
        merged[1::2], MASTER_FORMATS[Master.KAHAN].merge(parameter, compensation)[1::2]
    )
    assert (merged[1::2] - exact[1::2]).abs().max() < (parameter.float() - exact).abs().max()
