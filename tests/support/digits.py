"""Generate images of digits, 8 × 8 pixels, with random shift, brightness and noise."""

from __future__ import annotations

import torch

_GLYPHS = """
.###.  ..#..  .###.  .###.  ...#.  #####  .###.  #####  .###.  .###.
#...#  .##..  #...#  #...#  ..##.  #....  #....  ....#  #...#  #...#
#..##  ..#..  ....#  ....#  .#.#.  ####.  #....  ...#.  #...#  #...#
#.#.#  ..#..  ...#.  ..##.  #..#.  ....#  ####.  ..#..  .###.  .####
##..#  ..#..  ..#..  ....#  #####  ....#  #...#  ..#..  #...#  ....#
#...#  ..#..  .#...  #...#  ...#.  #...#  #...#  .#...  #...#  ....#
.###.  .###.  #####  .###.  ...#.  .###.  .###.  .#...  .###.  .###.
"""
CLASSES = 10


def glyphs() -> torch.Tensor:
    """Return the ten digits as 7 × 5 tensors of zeros and ones."""
    rows = [line.split() for line in _GLYPHS.split("\n") if line]
    return torch.tensor(
        [[[float(dot == "#") for dot in row[digit]] for row in rows] for digit in range(CLASSES)]
    )


def images_of_digits(count: int, seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images with mean zero, [count, 1, 8, 8], and the digits that they show."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(CLASSES, (count,), generator=generator)
    drawn, shapes = torch.zeros(count, 8, 8), glyphs()
    brightness = 0.6 + 0.8 * torch.rand(count, generator=generator)
    for place, (down, right) in enumerate(
        zip(_random_shifts(2, count, generator), _random_shifts(4, count, generator), strict=True)
    ):
        drawn[place, down : down + 7, right : right + 5] = shapes[digits[place]] * brightness[place]
    drawn += noise * torch.randn(drawn.shape, generator=generator)
    return (drawn - drawn.mean())[:, None], digits


def _random_shifts(limit: int, count: int, generator: torch.Generator) -> list[int]:
    shifts: list[int] = torch.randint(limit, (count,), generator=generator).tolist()
    return shifts
