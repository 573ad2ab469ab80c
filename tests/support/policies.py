"""Random policies, and one without any default."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn

from mezzo import Policy
from mezzo.policy.parse import FLOAT32_INSIDE_OPS
from mezzo.policy.presets import NAMES, PRESETS
from mezzo.policy.types import Cache, Level, Master, OnUnsupported, Rule

FULLEST = {
    "level": "O2",
    "dtype": "bfloat16",
    "preset": "apex",
    "half": {"add", "linear"},
    "full": {"softmax"},
    "promote": {"cat", "stack"},
    "keep": {"relu"},
    "refuse": {"binary_cross_entropy"},
    "float32_inside": {"log_softmax"},
    "default_rule": "promote",
    "exempt_args": {"batch_norm": ["weight", "bias"], "layer_norm": "weight"},
    "conditional": [
        ("softmax", "dim", [-1, None, True, "last", 0.5]),
        ("linalg_vector_norm", "ord", [float("inf")], "a maximum needs no sum"),
    ],
    "modules": {"encoder.*.norm": "full", nn.Linear: "half", 'odd "name"': "keep"},
    "keep_full": ["head", nn.LayerNorm],
    "master": "kahan",
    "grad_dtype": "float32",
    "cache": "versioned",
    "on_unsupported": "error",
}
"""Fields of a policy in which none has its default."""

DEFAULT_RULES = tuple(rule for rule in Rule if rule is not Rule.FLOAT32_INSIDE)

OPS = ("add", "mul", "softmax", "linear", "conv2d", "cat", "layer_norm", "exp", "relu", "matmul")

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _text
_conditions = st.tuples(
    st.sampled_from(["softmax", "log_softmax"]), st.just("dim"), st.lists(_values, max_size=3)
) | st.tuples(st.just("layer_norm"), st.just("eps"), st.lists(_values, max_size=2), _text)
_globs = _text.filter(lambda text: text != "type:")
_classes = st.sampled_from([nn.Linear, nn.LayerNorm, nn.Conv2d])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Draw a valid policy."""
    preset = draw(st.sampled_from(NAMES))
    levels = (Level.O0, *PRESETS[preset].LEVELS) if preset in PRESETS else tuple(Level)
    places = draw(st.lists(st.sampled_from([None, *Rule]), min_size=len(OPS), max_size=len(OPS)))
    return Policy(
        draw(st.sampled_from(levels)),
        draw(st.sampled_from(["auto", None, "float16", "bf16", torch.bfloat16])),
        preset=preset,
        **{
            rule.value: {
                name
                for name, place in zip(OPS, places, strict=True)
                if place is rule and (rule is not Rule.FLOAT32_INSIDE or name in FLOAT32_INSIDE_OPS)
            }
            for rule in Rule
        },
        default_rule=draw(
            st.sampled_from([None, *(rule for rule in Rule if rule is not Rule.FLOAT32_INSIDE)])
        ),
        exempt_args=draw(
            st.dictionaries(
                st.sampled_from(["batch_norm", "layer_norm"]),
                st.lists(st.sampled_from(["weight", "bias"])),
            )
        ),
        conditional=draw(st.lists(_conditions, max_size=3)),
        modules=draw(
            st.dictionaries(
                _globs | _classes, st.sampled_from(["half", "full", "keep"]), max_size=3
            )
        ),
        keep_full=draw(st.lists(_globs | _classes, max_size=3)),
        master=draw(st.sampled_from([None, *Master])),
        grad_dtype=draw(st.sampled_from([None, "float32", torch.float16])),
        cache=draw(st.sampled_from(list(Cache))),
        on_unsupported=draw(st.sampled_from(list(OnUnsupported))),
    )
