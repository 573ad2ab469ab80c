"""The kernel that checks and unscales, compiled, on a CUDA device."""

from __future__ import annotations

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
    spoil,
)

from mezzo import _launch
from mezzo.scaling import check_unscale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_kernel_is_available() -> None:
    assert _launch.has_triton(torch.device("cuda"))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_and_flags_equal_the_float64_reference(dtype: torch.dtype, factor: float) -> None:
    for _ in range(5):
        check_against_reference(dtype, "cuda", factor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checking_or_a_factor_of_one_writes_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed := fresh_seed())
    tensors = gradients(dtype, "cuda", generator)
    expected = spoil(tensors, generator)
    before = [bits(tensor).clone() for tensor in tensors]
    for factor in (None, torch.ones((), device="cuda")):
        found, flags = raised("cuda", len(tensors))
        if factor is None:
            check_unscale.check(tensors, found, flags)
        else:
            check_unscale.check_and_unscale(tensors, factor, found, flags)
        assert (flags.tolist(), found.item()) == (expected, float(any(expected))), seed
        assert all(
            torch.equal(bits(tensor), old) for tensor, old in zip(tensors, before, strict=True)
        ), seed


def test_an_overflow_of_the_product_of_finite_factors_is_found() -> None:
    tensors = [torch.full((5,), 60000.0, dtype=torch.float16, device="cuda")]
    found, flags = raised("cuda", 1)
    check_unscale.check_and_unscale(tensors, torch.tensor(2.0, device="cuda"), found, flags)
    assert (found.item(), flags.tolist()) == (1.0, [1])


@pytest.mark.usefixtures("no_host_reads")
def test_the_check_does_not_synchronize() -> None:
    tensors = [torch.ones(100, device="cuda"), torch.ones(8, 8, device="cuda")[:, ::2]]
    factor = torch.full((), 0.5, device="cuda")
    found, flags = torch.zeros((), device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
    for _ in range(3):
        check_unscale.check_and_unscale(tensors, factor, found, flags)
        check_unscale.check(tensors, found, flags)


@pytest.mark.usefixtures("no_host_reads")
def test_the_check_does_not_synchronize_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: False)
    tensors = [
        torch.ones(100, device="cuda"),
        torch.ones(8, 8, device="cuda")[:, ::2],
        torch.ones(0, device="cuda"),
    ]
    found, flags = torch.zeros((), device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    check_unscale.check_and_unscale(tensors, torch.full((), 0.5, device="cuda"), found, flags)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_without_triton_sets_the_same_flags(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(_launch, "has_triton", lambda _: False)
    generator = torch.Generator().manual_seed(seed := fresh_seed())
    tensors = gradients(dtype, "cuda", generator)
    expected = spoil(tensors, generator)
    found, flags = raised("cuda", len(tensors))
    check_unscale.check_and_unscale(tensors, torch.tensor(0.5, device="cuda"), found, flags)
    assert (flags.tolist(), found.item()) == (expected, float(any(expected))), seed


def test_ten_thousand_tiny_gradients_are_checked() -> None:
    tensors = [torch.full((1 + place % 7,), 2.0, device="cuda") for place in range(10_000)]
    tensors[7_777][0] = torch.nan
    found, flags = raised("cuda", len(tensors))
    check_unscale.check_and_unscale(tensors, torch.tensor(0.5, device="cuda"), found, flags)
    assert flags.nonzero().flatten().tolist() == [7_777]
    assert torch.cat(tensors).nansum().item() == sum(1 + place % 7 for place in range(10_000)) - 1


def test_a_gradient_of_more_than_two_to_the_31_elements_is_checked_to_its_end() -> None:
    tensor = torch.ones(2**31 + 12_345, dtype=torch.float16, device="cuda")
    factor = torch.tensor(0.5, device="cuda")
    found, flags = raised("cuda", 1)
    check_unscale.check_and_unscale([tensor], factor, found, flags)
    assert found.item() == 0.0
    assert bool((tensor[:100] == 0.5).all())
    assert bool((tensor[-20_000:] == 0.5).all())
    tensor[-1] = torch.inf
    check_unscale.check([tensor], found, flags)
    assert (found.item(), flags.tolist()) == (1.0, [1])


def test_tables_follow_gradients_that_move_while_the_device_is_busy() -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    factor = torch.tensor(0.5, device="cuda")
    kept = []
    for step in range(50):
        for _ in range(4):
            busy = torch.mm(busy, busy).clamp_(-1, 1)
        tensors = [torch.full((1000,), float(step), device="cuda") for _ in range(20)]
        found, flags = raised("cuda", 20)
        check_unscale.check_and_unscale(tensors, factor, found, flags)
        kept.append(tensors)
    assert all(
        bool((tensor == step / 2).all()) for step, tensors in enumerate(kept) for tensor in tensors
    )


def test_a_captured_check_replays_on_new_values() -> None:
    tensors = [torch.ones(5000, device="cuda"), torch.ones(3, device="cuda")]
    factor = torch.tensor(0.5, device="cuda")
    found, flags = raised("cuda", 2)
    check_unscale.check_and_unscale(tensors, factor, found, flags)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        check_unscale.check_and_unscale(tensors, factor, found, flags)
    for tensor in tensors:
        tensor.fill_(8.0)
    tensors[1][2] = torch.nan
    graph.replay()
    assert (found.item(), flags.tolist()) == (1.0, [0, 1])
    assert bool((tensors[0] == 4.0).all())
