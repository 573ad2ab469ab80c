"""Pictures of digits, 8 × 8, drawn by ourselves: shifted, of uneven ink, and noisy."""

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
    """The ten digits, 7 × 5, ink as ones."""
    rows = [line.split() for line in _GLYPHS.split("\n") if line]
    return torch.tensor(
        [[[float(dot == "#") for dot in row[digit]] for row in rows] for digit in range(CLASSES)]
    )


def pictures(count: int, seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """So many pictures of mean zero, [count, 1, 8, 8], and which digits they show."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(CLASSES, (count,), generator=generator)
    drawn, shapes = torch.zeros(count, 8, 8), glyphs()
    ink = 0.6 + 0.8 * torch.rand(count, generator=generator)
    for place, (down, right) in enumerate(
        zip(_anywhere(2, count, generator), _anywhere(4, count, generator), strict=True)
    ):
        drawn[place, down : down + 7, right : right + 5] = shapes[digits[place]] * ink[place]
    drawn += noise * torch.randn(drawn.shape, generator=generator)
    return (drawn - drawn.mean())[:, None], digits


def _anywhere(places: int, count: int, generator: torch.Generator) -> list[int]:
    shifts: list[int] = torch.randint(places, (count,), generator=generator).tolist()
    return shifts
