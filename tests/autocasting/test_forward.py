"""A forward is replaced on one instance, gives way to another of its kind, and comes back as it was."""

from __future__ import annotations

import copy

import torch
from torch import nn

from mezzo.autocasting.module_rules import replace_forward


def adding(number: float):
    def make(function, bound):
        def forward(self_, *args, **kwargs):
            return (
                function(*args, **kwargs) if bound else function(self_, *args, **kwargs)
            ) + number

        return forward

    return make


def test_another_with_the_same_mark_gives_way_and_one_with_another_does_not():
    module = nn.Identity()
    replace_forward(module, "first", adding(1))
    undo = replace_forward(module, "first", adding(10))
    assert module(torch.zeros(())) == 10
    undo()
    assert module(torch.zeros(())) == 1
    replace_forward(module, "second", adding(100))
    assert module(torch.zeros(())) == 101


def test_a_function_of_the_instances_own_is_called_as_it_is_and_put_back():
    module = nn.Identity()
    module.forward = own = lambda inputs: inputs * 2
    undo = replace_forward(module, "mark", adding(1))
    assert module(torch.ones(())) == 3
    undo()
    assert module.forward is own


def test_a_deep_copy_calls_itself():
    module = nn.Linear(1, 1, bias=False)
    replace_forward(module, "mark", adding(0))
    other = copy.deepcopy(module)
    nn.init.zeros_(other.weight)
    assert other(torch.ones(1, 1)) == 0
