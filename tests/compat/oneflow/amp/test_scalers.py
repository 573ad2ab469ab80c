import pytest

from mezzo.compat.oneflow import amp


def test_the_defaults_are_oneflows_and_the_scale_stays_at_one_or_above():
    scaler = amp.GradScaler().scaler()
    rule = scaler._scales.rule
    assert (
        scaler.get_scale(),
        rule.growth_factor,
        rule.backoff_factor,
        rule.growth_interval,
        rule.min_scale,
    ) == (65536.0, 2.0, 0.5, 2000, 1.0)


def test_a_backoff_that_does_not_undo_the_growth_is_refused_as_there():
    with pytest.raises(
        ValueError,
        match=(
            r"Only support 1.0/growth_factor as backoff_factor at the moment, got 0.25: it must"
            r" be 0.5"
        ),
    ):
        amp.GradScaler(backoff_factor=0.25)
    amp.GradScaler(growth_factor=4.0, backoff_factor=0.25)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_static_scale_is_positive(scale):
    with pytest.raises(ValueError, match=r"StaticGradScaler's scale_factor must > 0.0, got"):
        amp.StaticGradScaler(scale)


def test_numbers_that_cannot_be_meant_are_refused_at_once():
    with pytest.raises(ValueError, match="growth_interval"):
        amp.GradScaler(growth_interval=-1)
    with pytest.raises(ValueError, match="init_scale"):
        amp.GradScaler(init_scale=0.0)
