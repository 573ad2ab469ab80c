"""The Paddle preset predicts the recorded decisions of PaddlePaddle for every op.

No op runs here. `tests/autocasting/test_paddle_oracle.py` runs the ops.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mezzo.policy.presets import paddle
from mezzo.policy.types import Entry, Level, OpLists, Rule

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

VARIANTS = (
    "OD OD_white OD_black O1 O1_white O1_black O1_nopromote O2 O2_white O2_black O2_nopromote"
    " O2_nopromote_white O2_nopromote_black".split()
)

# Operands of each op of a function that Paddle composes of several: a digit is an input of the row,
# #n the result of its n-th op, f a tensor that Paddle casts to float32, ~ one that it casts to the
# first input's dtype, ^ the same but float32 instead of float16. An op on integers has none.
WIRING = {
    "linear_bias": "0 1, #0 2",
    "softmax_dtype_f32": "f",
    "outer": "0, 1, #0 #1",
    "cross_entropy": ", , , 0, #3",
    "cross_entropy_soft": "0 1, #0",
    "mse_loss": "0 1, #0, #1",
    "l1_loss": "0 1, #0, #1",
    "smooth_l1_loss": "0 1, #0",
    "bce_with_logits": "0 1, #0",
    "normalize": "0, #0 ~, 0 #1",
    "var": "0, 0 #0, #1, #2, 0, ^, , ^, #7, #7 #8, #9, , ^ #9",
    "std": "0, 0 #0, #1, #2, 0, ^, , ^, #7, #7 #8, #9, , ^ #9, ~",
    "increment_inplace_add": "0",
}

# Kernels whose output is always float32.
FLOAT32_KERNELS = {("softmax_with_cross_entropy", "bf16")}

# In a list of Paddle, but without a counterpart here.
NO_COUNTERPART = {"log_loss": paddle.NAMES.unknown["log_loss"]}


def lists_of(variant: str, listed: str, half: str) -> tuple[OpLists, dict[str, Rule]]:
    """Return the lists of a recorded variant, and the rules of listed ops without a counterpart."""
    level, *options = variant.split("_")
    lists = paddle.lists(Level(level), DTYPES[half])
    if level == "O2" and "nopromote" in options:  # Paddle ignores use_promote at other levels
        lists = replace(lists, default_rule=Entry(Rule.HALF, "use_promote=False"))
    custom = Rule.HALF if "white" in options else Rule.FULL if "black" in options else None
    if custom is None:
        return lists, {}
    ours = paddle.NAMES.known.get(listed, ())
    moved = {name: Entry(custom, "custom list") for name in ours}
    return replace(lists, entries={**lists.entries, **moved}), {} if ours else {listed: custom}


def decide(foreign: str, operands: str, lists: OpLists, custom: dict[str, Rule]) -> str:
    """Return the dtype in which one of Paddle's ops runs on operands of these dtypes."""
    ours = paddle.NAMES.known.get(foreign, ())
    rules = {lists.entries.get(name, lists.default_rule).rule for name in ours} or {
        custom.get(foreign, lists.default_rule.rule)
    }
    assert len(rules) == 1, f"{foreign} translates to {ours}, which disagree"
    match rules.pop():
        case Rule.HALF:
            return "h"
        case Rule.FULL:
            return "f"
    seen = operands[:1] if any(name in lists.exempt_args for name in ours) else operands
    return "f" if "f" in seen else "h"


def predict(row, variant: str) -> str:
    lists, custom = lists_of(variant, row.listed, row.half)
    wires = (
        [wire.split() for wire in WIRING[row.op].split(",")]
        if row.op in WIRING
        else [[*map(str, range(len(row.inputs)))]]
    )
    decisions, results = "", ""
    for foreign, wire in zip(row.ops, wires, strict=True):
        values = {"f": "f", "~": row.inputs[0], "^": "f" if row.half == "fp16" else row.inputs[0]}
        values |= {str(n): dtype for n, dtype in enumerate(row.inputs)} | {
            f"#{n}": dtype for n, dtype in enumerate(results)
        }
        operands = "".join(values[source] for source in wire)
        decisions += decide(foreign, operands, lists, custom)
        results += "f" if (foreign, row.half) in FLOAT32_KERNELS else decisions[-1]
    return decisions


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lists_predict_every_recorded_decision_of_paddle(variant, paddle_rows):
    wrong = [
        (row.op, row.half, row.inputs, row.results[variant][1], predicted)
        for row in paddle_rows
        if variant in row.results
        and row.ops
        and row.op not in NO_COUNTERPART
        and (predicted := predict(row, variant)) != row.results[variant][1]
    ]
    assert not wrong


def test_every_variant_of_the_recording_is_compared(paddle_rows):
    assert {variant for row in paddle_rows for variant in row.results} == {*VARIANTS, "none", "O0"}


def test_most_recorded_rows_are_compared(paddle_rows):
    compared = sum(
        len(row.results.keys() - {"none", "O0"})
        for row in paddle_rows
        if row.ops and row.op not in NO_COUNTERPART
    )
    assert compared > 5000


def test_nothing_is_cast_without_a_region_or_at_o0(paddle_rows):
    for row in paddle_rows:
        for variant in ("none", "O0"):
            assert row.results.get(variant, ("", ""))[1] == ""
