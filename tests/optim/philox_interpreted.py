"""Triton's Philox against ours, on a CPU. `test_philox.py` runs this in a separate process."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import fresh_seed

from mezzo.optim.master_formats import philox

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

# The interpreter uses NumPy, which warns where words wrap around.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@triton.jit
def _store_words(to, seed, index, step, block: tl.constexpr):
    element = tl.arange(0, block)
    zeros = element * 0
    word, _, _, _ = tl.philox(seed, element, zeros, zeros + index, zeros + step)
    tl.store(to + element, word.to(tl.int32, bitcast=True))


@triton.jit
def _integers(to, seed, block: tl.constexpr):
    element = tl.arange(0, block)
    tl.store(to + element, tl.randint(seed, element).to(tl.int32, bitcast=True))


def unsigned(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int64) & 0xFFFFFFFF


def test_words_equal_tritons_for_any_index_and_step() -> None:
    generator = torch.Generator().manual_seed(test_seed := fresh_seed())
    for _ in range(5):
        index, step = torch.randint(2**31, (2,), generator=generator).tolist()
        seed = int(torch.randint(2**62, (), generator=generator))
        got = torch.zeros(1024, dtype=torch.int32)
        _store_words[(1,)](got, seed, index, step, 1024)
        assert torch.equal(unsigned(got), philox(seed, 1024, index, step, torch.device("cpu"))), (
            test_seed
        )


def test_tritons_randint_is_the_stream_of_index_and_step_zero() -> None:
    seed = int(
        torch.randint(2**62, (), generator=torch.Generator().manual_seed(test_seed := fresh_seed()))
    )
    got = torch.zeros(1024, dtype=torch.int32)
    _integers[(1,)](got, seed, 1024)
    assert torch.equal(unsigned(got), philox(seed, 1024, 0, 0, torch.device("cpu"))), test_seed
