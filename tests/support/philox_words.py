"""Philox4x32-10 in Python integers, as defined in the paper. A word is a 32-bit integer."""

from __future__ import annotations

from collections.abc import Sequence

_WORD = 2**32


def reference_words(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Return the four words of a counter and a key."""
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
    """Return the word that stochastic rounding uses for an element."""
    return reference_words(
        (element % _WORD, element // _WORD, place, step), (seed % _WORD, seed // _WORD % _WORD)
    )[0]
