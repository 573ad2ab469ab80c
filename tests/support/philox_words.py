"""Philox4x32-10 in Python's own integers, word by word, as its paper defines it."""

from __future__ import annotations

from collections.abc import Sequence

_WORD = 2**32


def reference_words(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """The four words of a counter under a key."""
    first, second, third, fourth = counter
    left, right = key
    for _ in range(10):
        low, high = 0xD2511F53 * first, 0xCD9E8D57 * third
        first, second, third, fourth = (
            (high // _WORD) ^ second ^ left,
            high % _WORD,
            (low // _WORD) ^ fourth ^ right,
            low % _WORD,
        )
        left, right = (left + 0x9E3779B9) % _WORD, (right + 0xBB67AE85) % _WORD
    return first, second, third, fourth


def reference_word(seed: int, element: int, place: int, step: int) -> int:
    """The word that an element's rounding takes."""
    return reference_words(
        (element % _WORD, element // _WORD, place, step), (seed % _WORD, seed // _WORD % _WORD)
    )[0]
