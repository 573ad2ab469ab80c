"""A program as its caller sees it. That graphs are captured is shown on a CUDA device."""

from __future__ import annotations

import torch

from mezzo.step.program import Program


class Doubles:
    """Stands in for a graph: doubles what is in the input buffer."""

    def __init__(self, source, target):
        self.source, self.target = source, target

    def replay(self):
        self.target.copy_(self.source * 2)


def test_inputs_are_copied_in_and_outputs_are_ones_own():
    source, target = torch.zeros(2), torch.zeros(2)
    program = Program(Doubles(source, target), [source], {"out": target})
    first = program.replay([torch.ones(2)])["out"]
    second = program.replay([torch.full((2,), 3.0)])["out"]
    assert first.tolist() == [2.0, 2.0]
    assert second.tolist() == [6.0, 6.0]


def test_a_program_may_have_no_inputs():
    source, target = torch.ones(1), torch.zeros(1)
    assert Program(Doubles(source, target), [], target).replay([]).tolist() == [2.0]
