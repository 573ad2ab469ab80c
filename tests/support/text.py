"""Generate English sentences from a small grammar, which a small model can learn."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

_GRAMMAR: dict[str, list[str]] = {
    "sentence": [
        "subject verb object place .",
        "subject verb object .",
        "subject moves place .",
        "subject says that subject moves .",
    ],
    "subject": ["the noun", "the adjective noun", "every noun", "a noun"],
    "object": ["the noun", "a adjective noun", "no noun", "the noun of the noun"],
    "place": ["near the noun", "under a noun", "behind the adjective noun"],
    "noun": ["cat", "dog", "bird", "river", "house", "baker", "child", "lantern"],
    "adjective": ["small", "red", "quiet", "old", "clever"],
    "verb": ["sees", "finds", "paints", "follows", "likes"],
    "moves": ["sleeps", "runs", "waits", "sings"],
}
OTHER_VOCABULARY = {
    "noun": ["fish", "lamp", "garden", "winter", "piano", "friend", "window", "mouse"],
    "adjective": ["bright", "cold", "heavy", "funny", "green"],
    "verb": ["holds", "breaks", "paints", "wants", "buys"],
    "moves": ["jumps", "works", "laughs", "hides"],
}
"""For text of the same structure with other spellings."""
ALPHABET = " .abcdefghijklmnopqrstuvwxyz"


def generate_text(length: int, seed: int, vocabulary: Mapping[str, list[str]]) -> str:
    """Return text of a number of characters; `vocabulary` replaces rules of the grammar."""
    chance, rules, text = random.Random(seed), {**_GRAMMAR, **vocabulary}, ""
    while len(text) < length:
        text += " ".join(_expand("sentence", rules, chance)).replace(" .", ".") + " "
    return text[:length]


def encode(text: str) -> torch.Tensor:
    """Return the position of each character in the alphabet."""
    return torch.tensor([ALPHABET.index(character) for character in text])


def _expand(word: str, rules: Mapping[str, list[str]], chance: random.Random) -> list[str]:
    if word not in rules:
        return [word]
    return [
        result
        for part in chance.choice(rules[word]).split()
        for result in _expand(part, rules, chance)
    ]
