"""A loss scale in Apex's words."""

import pytest
import torch

from mezzo.compat.apex.amp._scale_loss import LossScaler

GOOD, BAD = [torch.zeros(())], [torch.ones(())]


def test_a_dynamic_scale_halves_and_doubles():
    scaler = LossScaler("dynamic", init_scale=8.0, scale_window=2)
    seen = []
    for flags in (BAD, GOOD, GOOD, GOOD, BAD, GOOD, GOOD):
        assert scaler.update_scale(flags) is (flags is BAD)
        seen.append((scaler.loss_scale(), scaler._unskipped))
    assert seen == [(4.0, 0), (4.0, 1), (8.0, 0), (8.0, 1), (4.0, 0), (4.0, 1), (8.0, 0)]


def test_it_starts_below_its_ceiling_and_stays_there():
    scaler = LossScaler("dynamic", max_loss_scale=16.0, scale_window=1)
    assert scaler.loss_scale() == 16.0
    scaler.update_scale(GOOD)
    assert scaler.loss_scale() == 16.0


def test_without_a_floor_it_still_does_not_reach_zero():
    scaler = LossScaler("dynamic")

    def fall():
        for _ in range(200):
            scaler.update_scale(BAD)

    with pytest.warns(UserWarning, match="floor"):
        fall()
    assert scaler.loss_scale() == 2.0**-24


def test_a_static_scale_stays():
    scaler = LossScaler(128.0)
    assert scaler.update_scale(BAD)
    assert scaler.loss_scale() == 128.0


def test_a_pass_without_gradients_says_nothing():
    scaler = LossScaler("dynamic")
    assert not scaler.update_scale([])
    assert scaler._unskipped == 0


def test_a_scale_and_its_count_may_be_set():
    scaler = LossScaler("dynamic")
    scaler._loss_scale, scaler._unskipped = 4.0, 7
    assert scaler.scale(torch.tensor(2.0)) == 8.0
    scaler._loss_scale = 2.0
    assert (scaler.scale(torch.tensor(2.0)).item(), scaler._unskipped) == (4.0, 7)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        LossScaler(scale)


def test_a_scale_is_idle_where_it_is_one_for_good():
    assert LossScaler(1.0).is_idle
    assert not LossScaler(2.0).is_idle
    assert not LossScaler("dynamic", init_scale=1.0).is_idle
    scaler = LossScaler(2.0)
    scaler._loss_scale = 1.0
    assert scaler.is_idle
