from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mezzo
from mezzo._errors import PolicyError
from mezzo.policy.presets._tables import (
    WIDEST,
    merge_disjoint,
    name_map,
    require_level,
    translate,
    with_promotions,
)
from mezzo.policy.types import Entry, Level, Rule

NAMES = name_map(
    {"reduce_sum": "sum", "concat": "cat stack"},
    {"fuses two ops": "fused_a fused_b"},
    same="relu exp",
)


def test_a_name_map_has_known_unknown_and_same_names():
    assert NAMES.known == {
        "relu": ("relu",),
        "exp": ("exp",),
        "reduce_sum": ("sum",),
        "concat": ("cat", "stack"),
    }
    assert NAMES.unknown == {"fused_a": "fuses two ops", "fused_b": "fuses two ops"}


def test_a_group_shares_its_reason_and_names_without_a_counterpart_are_left_out():
    entries = translate(Rule.FULL, {"adds up": "reduce_sum fused_a", "copies": "concat"}, NAMES)
    assert entries == {
        "sum": Entry(Rule.FULL, "adds up"),
        "cat": Entry(Rule.FULL, "copies"),
        "stack": Entry(Rule.FULL, "copies"),
    }


def test_an_op_in_two_lists_of_a_preset_raises():
    table = {"sum": Entry(Rule.FULL, "adds up")}
    with pytest.raises(PolicyError, match="two lists of one preset: sum"):
        merge_disjoint(table, table)


def test_require_level_raises_with_the_known_levels():
    require_level("apex", Level.O2, (Level.O1, Level.O2))
    with pytest.raises(PolicyError, match=r"'apex' has no level OD\. Choose one of: O1, O2\."):
        require_level("apex", Level.OD, (Level.O1, Level.O2))


def test_unlisted_ops_that_need_one_dtype_are_promoted():
    half, kept = Entry(Rule.HALF, "a product"), Entry(Rule.KEEP, "as it is given")
    found = with_promotions({"prelu": half, "scatter": kept, "relu": kept})
    assert (found["prelu"], found["scatter"], found["relu"], found["bilinear"]) == (
        half,
        WIDEST,
        kept,
        WIDEST,
    )


MIXES = {
    "bilinear": lambda x, w: F.bilinear(x, x, w.expand(1, 4, 4)),
    "dot": lambda x, w: torch.dot(x[0], w),
    "vdot": lambda x, w: torch.vdot(x[0], w),
    "cross": lambda x, w: torch.cross(x[:, :3], w[:3].expand(4, 3), dim=1),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x[:, None], w[None, None]),
    "embedding_bag": lambda x, w: F.embedding_bag(
        torch.zeros(4, 4, dtype=torch.int64), w[None], per_sample_weights=x, mode="sum"
    ),
    "grid_sample": lambda x, w: F.grid_sample(
        x[None, None], w.reshape(1, 1, 2, 2), align_corners=False
    ),
    "index_add": lambda x, w: x.index_add(0, torch.tensor([0]), w[None]),
    "index_copy": lambda x, w: x.index_copy(0, torch.tensor([0]), w[None]),
    "index_put": lambda x, w: x.index_put((torch.tensor([0]),), w[None]),
    "lerp": lambda x, w: torch.lerp(x, x, w),
    "masked_scatter": lambda x, w: x.masked_scatter(x > 0, w.expand(4, 4).contiguous()),
    "prelu": lambda x, w: F.prelu(x, w),
    "scaled_dot_product_attention": lambda x, w: F.scaled_dot_product_attention(
        x[None], (x * w)[None], x[None]
    ),
    "scatter": lambda x, w: x.scatter(0, torch.zeros(1, 4, dtype=torch.int64), w[None]),
    "scatter_add": lambda x, w: x.scatter_add(0, torch.zeros(1, 4, dtype=torch.int64), w[None]),
}


@pytest.mark.parametrize("op", MIXES)
@pytest.mark.parametrize("preset", ["apex", "megengine", "mxnet"])
def test_ops_that_need_one_dtype_run_with_mixed_dtypes(preset, op):
    x, weight = torch.rand(4, 4, dtype=torch.float16), torch.ones(4)
    with pytest.raises(RuntimeError):
        MIXES[op](x, weight)
    with mezzo.autocast("O1", device_type="cpu", dtype="float16", preset=preset):
        MIXES[op](x, weight)


def test_every_op_that_needs_one_dtype_is_tested():
    assert with_promotions({}).keys() == MIXES.keys()
