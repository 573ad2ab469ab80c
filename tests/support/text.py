"""English of a kind, by a grammar of ours: regular enough to be learnt by a small model, and never finished."""

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
OTHER_WORDS = {
    "noun": ["fish", "lamp", "garden", "winter", "piano", "friend", "window", "mouse"],
    "adjective": ["bright", "cold", "heavy", "funny", "green"],
    "verb": ["holds", "breaks", "paints", "wants", "buys"],
    "moves": ["jumps", "works", "laughs", "hides"],
}
"""For a text that reads alike and is spelt otherwise."""
ALPHABET = " .abcdefghijklmnopqrstuvwxyz"


def written(letters: int, seed: int, words: Mapping[str, list[str]] = _GRAMMAR) -> str:
    """So many letters of text; other words stand in for the grammar's."""
    chance, rules, text = random.Random(seed), {**_GRAMMAR, **words}, ""
    while len(text) < letters:
        text += " ".join(_expanded("sentence", rules, chance)).replace(" .", ".") + " "
    return text[:letters]


def encoded(text: str) -> torch.Tensor:
    """Letters as their places in the alphabet."""
    return torch.tensor([ALPHABET.index(letter) for letter in text])


def _expanded(word: str, rules: Mapping[str, list[str]], chance: random.Random) -> list[str]:
    if word not in rules:
        return [word]
    return [
        spelt
        for part in chance.choice(rules[word]).split()
        for spelt in _expanded(part, rules, chance)
    ]
