from __future__ import annotations

import pytest
import torch

from mezzo.policy.presets import paddle
from mezzo.policy.types import Level, Rule

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def rule(op, level, dtype=torch.float16):
    lists = paddle.lists(level, dtype)
    return lists.entries.get(op, lists.default_rule).rule


def translated(names):
    return {ours for foreign in names.split() for ours in paddle.NAMES.known.get(foreign, ())}


def under(which, level, dtype):
    return {op for op, entry in paddle.lists(level, dtype).entries.items() if entry.rule is which}


def test_every_listed_name_is_translated_or_has_no_counterpart(system_lists):
    facts = system_lists["paddle"]
    listed = {
        name
        for names in (*facts["white"].values(), *facts["black"].values())
        for name in names.split()
    }
    assert listed <= paddle.NAMES.known.keys() | paddle.NAMES.unknown.keys()


@BOTH
@pytest.mark.parametrize("level", paddle.LEVELS)
def test_the_white_list_is_half(level, dtype, system_lists):
    white = system_lists["paddle"]["white"][str(dtype).removeprefix("torch.")]
    assert under(Rule.HALF, level, dtype) == translated(white)


@BOTH
@pytest.mark.parametrize("level", [Level.O2, Level.OD])
def test_the_black_list_is_full(level, dtype, system_lists):
    assert under(Rule.FULL, level, dtype) == translated(
        system_lists["paddle"]["black"][level.value]
    )


@BOTH
def test_losses_that_paddle_composes_of_black_ops_are_full_at_o1(dtype, system_lists):
    extra = under(Rule.FULL, Level.O1, dtype) - translated(system_lists["paddle"]["black"]["O1"])
    assert extra == {"mse_loss", "l1_loss", "kl_div", "binary_cross_entropy", "cosine_similarity"}


def test_softmax_is_full_at_o1_and_promotes_at_o2():
    assert rule("softmax", Level.O1) is Rule.FULL
    assert rule("softmax", Level.O2) is Rule.PROMOTE


@pytest.mark.parametrize("op", ["embedding", "interpolate", "upsample_bilinear2d", "scatter"])
def test_o2_has_the_short_black_list(op):
    assert rule(op, Level.O2) is Rule.FULL


def test_od_is_full_except_the_white_list():
    assert rule("matmul", Level.OD) is Rule.HALF
    assert rule("add", Level.OD) is Rule.FULL
    assert rule("embedding", Level.OD) is Rule.FULL


@pytest.mark.parametrize(
    "op", ["bmm", "mv", "addmm", "conv3d", "conv_transpose2d", "max_pool2d", "add", "relu"]
)
def test_unlisted_ops_promote(op):
    assert rule(op, Level.O1) is Rule.PROMOTE


def test_linear_is_half_as_in_cuda_builds():
    assert rule("linear", Level.O1) is Rule.HALF


def test_parameters_of_norms_are_exempt():
    exempt = paddle.lists(Level.O2, torch.float16).exempt_args
    assert exempt == {
        "batch_norm": ("weight", "bias", "running_mean", "running_var"),
        "layer_norm": ("weight", "bias"),
    }


def test_names_that_match_no_op_are_left_out(system_lists):
    dead = system_lists["paddle"]["match_no_op"].split()
    assert [name for name in dead if name in paddle.NAMES.unknown] == ["hsigmoid_loss", "pnorm"]
    assert rule("linalg_vector_norm", Level.O1) is Rule.PROMOTE


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("clip", {"clamp"}),
        ("swish", {"silu"}),
        ("take_along_axis", {"gather", "take_along_dim"}),
        ("flip", {"flip"}),
    ],
)
def test_names_of_unlisted_ops_are_translated(foreign, ours):
    assert set(paddle.NAMES.known[foreign]) == ours
