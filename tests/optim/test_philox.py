"""The random words of stochastic rounding are those of Philox4x32-10, on every path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.interpreted import needs_triton, run_interpreted
from support.kernel_cases import fresh_seed
from support.philox_words import reference_word, reference_words

from mezzo.optim.master_formats import philox

CPU = torch.device("cpu")

# From Random123 (kat_vectors): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN, ids=["zeros", "ones", "pi"])
def test_the_reference_returns_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
):
    assert reference_words(counter, key) == result


def test_zeros_give_the_first_published_word():
    assert philox(0, 1, index=0, step=0, device=CPU).tolist() == [0x6627E8D5]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN[1:], ids=["ones", "pi"])
def test_all_bits_of_seed_index_and_step_are_used(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
):
    # The first two published counters are no index of an element: only the others are used.
    seed = key[0] | key[1] << 32
    words = philox(seed, 5, counter[2], counter[3], CPU)
    assert words.tolist() == [
        reference_words((element, 0, *counter[2:]), key)[0] for element in range(5)
    ]


def test_words_equal_the_reference_for_any_seed_index_and_step():
    generator = torch.Generator().manual_seed(test_seed := fresh_seed())
    for _ in range(50):
        index, step, low, high = torch.randint(2**32, (4,), generator=generator).tolist()
        seed = low | high << 32
        wanted = [reference_word(seed, element, index, step) for element in range(20)]
        assert philox(seed, 20, index, step, CPU).tolist() == wanted, test_seed


def test_negative_seeds_are_read_as_unsigned_bits():
    assert torch.equal(philox(-1, 9, 1, 2, CPU), philox(2**64 - 1, 9, 1, 2, CPU))


def test_a_step_may_be_a_tensor():
    assert torch.equal(philox(3, 9, 1, torch.tensor(70_000), CPU), philox(3, 9, 1, 70_000, CPU))


def test_elements_beyond_32_bits_have_their_own_words(monkeypatch: pytest.MonkeyPatch):
    far = torch.tensor([1, 2**32 + 1, 2**33 - 1, 5 * 2**32])
    monkeypatch.setattr(torch, "arange", lambda *_, **__: far)
    assert philox(7, 4, 3, 2, CPU).tolist() == [
        reference_word(7, element, 3, 2) for element in far.tolist()
    ]


def test_a_shard_gets_the_words_of_its_elements():
    whole = philox(7, 100, 3, 2, CPU)
    assert torch.equal(philox(7, 40, 3, 2, CPU, first=60), whole[60:])


def test_each_argument_changes_the_words():
    seed = fresh_seed() % 2**32
    streams = [
        philox(seed, 1000, 0, 0, CPU),
        philox(seed + 1, 1000, 0, 0, CPU),
        philox(seed, 1000, 1, 0, CPU),
        philox(seed, 1000, 0, 1, CPU),
    ]
    # Two random words of 32 bits are equal in one of 4 billion cases.
    assert all(
        int((first == second).sum()) <= 1
        for index, first in enumerate(streams)
        for second in streams[:index]
    ), seed


def test_each_bit_is_set_half_of_the_time():
    count, seed = 2**20, fresh_seed()
    words = philox(seed, count, 5, 6, CPU)
    assert int(words.min()) >= 0
    assert int(words.max()) < 2**32
    # Six standard deviations of a fair coin, for 32 bits.
    for bit in range(32):
        assert abs(int((words >> bit & 1).sum()) - count / 2) < 6 * (count / 4) ** 0.5, (seed, bit)


def test_an_empty_tensor_gets_no_words():
    assert philox(0, 0, 0, 0, CPU).shape == (0,)


@needs_triton
def test_tritons_generator_gives_the_same_words():
    run_interpreted(Path(__file__).with_name("philox_interpreted.py"))
