"""Check and unscale many gradients in one pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.interpreted import needs_triton, run_interpreted
from support.kernel_cases import (
    DTYPES,
    FACTORS,
    check_against_reference,
    fresh_seed,
    gradients,
    raised,
    same,
    spoil,
    unscaled,
)

from mezzo import _launch
from mezzo._errors import UnsupportedError
from mezzo.scaling import check_unscale


@needs_triton
def test_the_kernels_pass_their_tests_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("kernels_interpreted.py"))


class Recorder:
    """Replaces a kernel: records its launches, and whether they use the compiled kernel."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Recorder]:
        return lambda *arguments: self._record(len(grid), grid[0], len(arguments[0]))

    def _record(self, sides: int, programs: int, count: int) -> Recorder:
        self.launches.append(("compiled" if sides == 3 else "first", programs, count))
        return self


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    monkeypatch.setattr(check_unscale, "_kernel", lambda: recorder)
    monkeypatch.setattr(_launch, "triton_dtype", str)
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(check_unscale, "_tables", {})
    return recorder


def test_one_launch_covers_all_gradients_and_strided_ones_as_copies(recorder: Recorder) -> None:
    tensors = [
        torch.ones(check_unscale.CHUNK + 1),
        torch.ones(3, 4).T,
        torch.ones(0),
        torch.arange(6.0)[::2],
    ]
    found, flags = raised("cpu", len(tensors))
    for _ in range(2):
        check_unscale.check_and_unscale(tensors, torch.tensor(0.5), found, flags)
    assert recorder.launches == [("first", 4, 4), ("compiled", 4, 4)]
    assert tensors[3].tolist() == [0.0, 2.0, 4.0]


def test_a_new_table_is_made_when_a_gradient_moves_or_changes_its_size(recorder: Recorder) -> None:
    storage, other = torch.ones(8), torch.ones(8)
    for tensor in (storage, storage, storage[:4], other, storage):
        check_unscale.check([tensor], torch.zeros(()))
    assert len(recorder.launches) == 5
    assert len(check_unscale._tables) == 3
    for size in range(50):
        check_unscale.check([torch.ones(64)[:size]], torch.zeros(()))
    assert len(check_unscale._tables) == _launch._MAX_TABLES


def test_empty_gradients_alone_need_no_launch(recorder: Recorder) -> None:
    found = torch.zeros(())
    check_unscale.check([torch.ones(0)], found)
    assert recorder.launches == []


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_triton_gradients_and_flags_equal_the_float64_reference(
    dtype: torch.dtype, factor: float
) -> None:
    check_against_reference(dtype, "cpu", factor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_triton_a_check_does_not_write(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed := fresh_seed())
    tensors = gradients(dtype, "cpu", generator)
    expected = spoil(tensors, generator)
    before, versions = (
        [tensor.clone() for tensor in tensors],
        [tensor._version for tensor in tensors],
    )
    found, flags = raised("cpu", len(tensors))
    check_unscale.check(tensors, found, flags)
    assert (flags.tolist(), found.item()) == (expected, float(any(expected))), seed
    assert all(map(same, tensors, before)), seed
    assert [tensor._version for tensor in tensors] == versions


def test_without_triton_flags_of_single_gradients_are_optional() -> None:
    for value, flag in ((1.0, 0.0), (torch.nan, 1.0)):
        found = torch.zeros(())
        check_unscale.check([torch.ones(3), torch.tensor(value)], found)
        assert found.item() == flag
        found = torch.zeros(())
        check_unscale.check_and_unscale(
            [torch.ones(3), torch.tensor(value)], torch.tensor(0.5), found
        )
        assert found.item() == flag


def test_bfloat16_is_multiplied_in_float32_where_torch_has_no_kernel() -> None:
    tensors = [torch.randn(100).bfloat16(), torch.randn(10, 10).bfloat16()[:, ::3]]
    expected = [unscaled(tensor, 1.0 / 3.0) for tensor in tensors]
    check_unscale._multiply(tensors, torch.tensor(1.0 / 3.0))
    assert all(map(torch.equal, tensors, expected))


def test_no_gradients_set_no_flag() -> None:
    found = torch.zeros(())
    check_unscale.check_and_unscale([], torch.tensor(0.5), found)
    assert found.item() == 0.0


def test_integer_gradients_are_not_supported() -> None:
    with pytest.raises(UnsupportedError, match="int64"):
        check_unscale.check([torch.ones(3, dtype=torch.int64)], torch.zeros(()))


@pytest.mark.parametrize("chunk", [4, 16])
def test_a_table_has_each_chunk_of_each_gradient_once(chunk: int) -> None:
    tensors = [torch.ones(size) for size in (5, 0, 16, 1, 33)]
    table = check_unscale.make_table(tensors, chunk)
    assert (table.addresses.tolist(), table.sizes.tolist()) == (
        [tensor.data_ptr() for tensor in tensors],
        [5, 0, 16, 1, 33],
    )
    expected = [
        (index, part)
        for index, tensor in enumerate(tensors)
        for part in range(-(-tensor.numel() // chunk))
    ]
    assert list(zip(*table.chunks.tolist(), strict=True)) == expected
