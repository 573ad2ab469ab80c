import torch
import torch.nn.functional as F
from support.graphs import HALF, Calls
from torch import nn

import mezzo
from mezzo.conversion.plan import CastBytes

X = torch.randn(2, 4)


def _casts(function, **modules):
    return mezzo.convert(Calls(function, **modules), (X,), dtype=HALF).casts


def test_casts_before_are_autocasts_and_after_are_what_is_left():
    found = _casts(lambda self, x: self.linear(x), linear=nn.Linear(4, 4))
    assert found.before == CastBytes(3, 6 * (8 + 16 + 4))
    assert found.after == CastBytes(2, 6 * (8 + 8))


def test_the_models_own_casts_count_in_both_and_a_cast_to_the_same_dtype_in_neither():
    found = _casts(lambda _, x: (x.float().to(HALF).sum(), x + 1))
    assert (found.before.count, found.after.count) == (1, 1)


def test_a_model_that_is_half_already_casts_nothing():
    model = nn.Linear(4, 4).to(HALF)
    assert mezzo.convert(model, (X.to(HALF),), dtype=HALF).casts.after == CastBytes()


def test_a_weight_is_cast_once_under_autocast_an_activation_each_time():
    found = _casts(
        lambda self, x: F.linear(x, self.linear.weight) + F.linear(x, self.linear.weight),
        linear=nn.Linear(4, 4),
    )
    assert found.before.count == 3
