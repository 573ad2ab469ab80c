"""`amp_configs`: Paddle's keys, refused as there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle.hapi import AmpConfigs, read_amp_configs


@pytest.mark.parametrize("words", [None, {}, "O0", {"level": "O0", "nonsense": 1}], ids=str)
def test_nothing_is_float32(words):
    assert read_amp_configs(words, None) == AmpConfigs("O0")


def test_a_level_alone():
    assert read_amp_configs("O1", None) == AmpConfigs("O1")
    assert read_amp_configs({"custom_black_list": {"exp"}}, None).level == "O1"


def test_lists_and_scaling_go_where_they_belong():
    words = {
        "level": "O2",
        "custom_white_list": {"conv2d"},
        "init_loss_scaling": 8.0,
        "use_dynamic_loss_scaling": False,
    }
    assert read_amp_configs(words, None) == AmpConfigs(
        "O2",
        {"custom_white_list": {"conv2d"}},
        {"init_loss_scaling": 8.0, "use_dynamic_loss_scaling": False},
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("O3", "The level of amp_configs should be 'O0', 'O1' or 'O2'"),
        ({"level": "OD"}, r"amp_configs\['level'\] should be 'O0', 'O1' or 'O2'"),
        (
            {"use_pure_fp16": True},
            (
                "'use_pure_fp16' is an invalid parameter, the level of mixed precision training"
                " only depends on 'O1' or 'O2'"
            ),
        ),
        ({"use_fp16_guard": True}, "'use_fp16_guard' is supported in static graph mode only"),
        ({"custom_black_varnames": {"w"}}, "'custom_black_varnames' names variables"),
        (
            {"dtype": "bfloat16"},
            (
                r"Except for 'level', the keys of 'amp_configs' must be accepted by mixed precision"
                r" APIs, but \('dtype'\) could not be recognized"
            ),
        ),
        ({"init_loss_scale": 8.0}, "Did you mean 'init_loss_scaling'"),
    ],
    ids=str,
)
def test_what_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        read_amp_configs(words, None)


@pytest.mark.parametrize(
    "words", ["O2", {"level": "O2"}, {"level": "O2", "incr_ratio": 3.0}], ids=str
)
def test_o2_clips_by_norms_alone(words):
    def optimizer(clip):
        return paddle.optimizer.SGD(
            learning_rate=0.1, parameters=[nn.Parameter(torch.ones(1))], grad_clip=clip
        )

    assert read_amp_configs(words, optimizer(paddle.nn.ClipGradByNorm(1.0))).level == "O2"
    with pytest.raises(
        AssertionError,
        match=(
            "Only ClipGradByNorm and ClipGradByGlobalNorm are supported in amp training with"
            " level=O2"
        ),
    ):
        read_amp_configs(words, optimizer(paddle.nn.ClipGradByValue(1.0)))


def test_what_is_neither_a_level_nor_a_dict_is_refused():
    with pytest.raises(TypeError, match=r"amp_configs=3 is int.*a dict with a 'level'"):
        read_amp_configs(3, None)
