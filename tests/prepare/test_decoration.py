"""Models and optimizers know what they were decorated with; copies do not."""

import copy
import gc
import pickle
import weakref

import torch
from torch import nn

import mezzo
from mezzo.prepare.decoration import decoration_of


def made():
    model = nn.Linear(4, 4)
    return mezzo.decorate(model, torch.optim.AdamW(model.parameters(), lr=0.1), dtype="bfloat16")


def test_all_that_was_decorated_together_knows_the_same_decoration():
    model, optimizer = made()
    assert decoration_of(model) is decoration_of(optimizer) is not None
    mezzo.undecorate(model)
    assert decoration_of(model) is decoration_of(optimizer) is None


def test_copies_are_not_decorated():
    model, optimizer = made()
    assert decoration_of(copy.deepcopy(model)) is None
    assert decoration_of(pickle.loads(pickle.dumps(optimizer))) is None
    assert pickle.loads(pickle.dumps(decoration_of(model))) is None


def test_what_is_forgotten_is_freed():
    model, optimizer = made()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None, None]
