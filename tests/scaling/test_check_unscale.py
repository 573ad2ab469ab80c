"""Checking and unscaling many gradients in one pass."""

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
def test_the_kernel_does_in_tritons_interpreter_what_it_should() -> None:
    run_interpreted(Path(__file__).with_name("kernels_interpreted.py"))


def test_a_cuda_device_without_triton_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "find_spec", lambda _: None)
    _launch._is_triton_installed.cache_clear()
    assert not _launch.has_triton(torch.device("cuda"))
    _launch._is_triton_installed.cache_clear()


class Recorder:
    """Stands in for a kernel: notes what is launched, and what was compiled by the first launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Recorder]:
        return lambda *arguments: self._note(len(grid), grid[0], len(arguments[0]))

    def _note(self, sides: int, programs: int, count: int) -> Recorder:
        self.launches.append(("compiled" if sides == 3 else "first", programs, count))
        return self


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    monkeypatch.setattr(check_unscale, "_kernel", lambda: made)
    monkeypatch.setattr(_launch, "triton_dtype", str)
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(check_unscale, "_tables", {})
    return made


def test_one_launch_covers_every_gradient_and_strided_ones_as_copies(recorder: Recorder) -> None:
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


def test_a_table_is_made_anew_when_a_gradient_moves_or_changes_its_size(recorder: Recorder) -> None:
    storage, other = torch.ones(8), torch.ones(8)
    for tensor in (storage, storage, storage[:4], other, storage):
        check_unscale.check([tensor], torch.zeros(()))
    assert len(recorder.launches) == 5
    assert len(check_unscale._tables) == 3
    for size in range(50):
        check_unscale.check([torch.ones(64)[:size]], torch.zeros(()))
    assert len(check_unscale._tables) == _launch._TABLES_KEPT


def test_nothing_is_launched_for_empty_gradients_alone(recorder: Recorder) -> None:
    found = torch.zeros(())
    check_unscale.check([torch.ones(0)], found)
    assert recorder.launches == []


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_alone_gives_the_same_gradients_and_flags(dtype: torch.dtype, factor: float) -> None:
    check_against_reference(dtype, "cpu", factor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_alone_checks_without_writing(dtype: torch.dtype) -> None:
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


def test_torch_alone_raises_the_flag_of_all_without_those_of_each() -> None:
    for spoiled, raises in ((1.0, 0.0), (torch.nan, 1.0)):
        found = torch.zeros(())
        check_unscale.check([torch.ones(3), torch.tensor(spoiled)], found)
        assert found.item() == raises
        found = torch.zeros(())
        check_unscale.check_and_unscale(
            [torch.ones(3), torch.tensor(spoiled)], torch.tensor(0.5), found
        )
        assert found.item() == raises


def test_bfloat16_is_multiplied_in_float32_where_torch_has_no_kernel() -> None:
    tensors = [torch.randn(100).bfloat16(), torch.randn(10, 10).bfloat16()[:, ::3]]
    wanted = [unscaled(tensor, 1.0 / 3.0) for tensor in tensors]
    check_unscale._multiply(tensors, torch.tensor(1.0 / 3.0))
    assert all(map(torch.equal, tensors, wanted))


def test_no_gradients_raise_no_flag() -> None:
    found = torch.zeros(())
    check_unscale.check_and_unscale([], torch.tensor(0.5), found)
    assert found.item() == 0.0


def test_gradients_of_whole_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="int64"):
        check_unscale.check([torch.ones(3, dtype=torch.int64)], torch.zeros(()))


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(()), True),
        (torch.ones(3, 0), True),
        (torch.ones(3, 4).T, True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(4, 1, 6).transpose(0, 2), True),
        (torch.ones(10)[3:7], True),
        (torch.ones(10)[::2], False),
        (torch.ones(4, 4)[:, :2], False),
        (torch.ones(4, 4)[:2].T, True),
        (torch.ones(1).expand(5), False),
        (torch.ones(3, 1).expand(3, 3), False),
        (torch.ones(5).as_strided((3, 3), (1, 1)), False),
    ],
)
def test_dense_is_what_fills_its_memory_once(tensor: torch.Tensor, dense: bool) -> None:
    assert _launch.is_dense(tensor) is dense


@pytest.mark.parametrize("chunk", [4, 16])
def test_a_table_has_each_chunk_of_each_gradient_once(chunk: int) -> None:
    tensors = [torch.ones(size) for size in (5, 0, 16, 1, 33)]
    table = check_unscale.make_table(tensors, chunk)
    assert (table.addresses.tolist(), table.sizes.tolist()) == (
        [tensor.data_ptr() for tensor in tensors],
        [5, 0, 16, 1, 33],
    )
    wanted = [
        (place, part)
        for place, tensor in enumerate(tensors)
        for part in range(-(-tensor.numel() // chunk))
    ]
    assert list(zip(*table.chunks.tolist(), strict=True)) == wanted
