"""In which precision a static program runs: Paddle's static lists as a policy, and which parameters stay float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import mezzo
from mezzo._dtypes import parse_dtype
from mezzo.compat.paddle.amp._scaler_state import Told
from mezzo.compat.paddle.static._program import Node, Variable
from mezzo.policy.presets import paddle
from mezzo.policy.registry import registry
from mezzo.policy.types import Level, Rule

GRAY = (
    "batch_norm concat dropout elementwise_add elementwise_div elementwise_floordiv elementwise_max elementwise_min elementwise_mod elementwise_mul"
    " elementwise_sub gather layer_norm leaky_relu pool2d pool3d relu relu6 reshape2 sigmoid sign split stack tanh top_k transpose2"
)
"""Ops of static programs that follow what flows into them (PaddlePaddle 3.3.1, static/amp/fp16_lists.py), those with a counterpart here."""

_KEPT_BY = {"batch_norm", "layer_norm", "instance_norm"}
"""Ops whose parameters and statistics stay float32."""


@dataclass(frozen=True)
class Precision:
    """What `static.amp.decorate` was told; without it, everything is float32."""

    level: str = "O0"
    dtype: str = "float16"
    half: frozenset[str] = frozenset()
    """Ops of the custom white list, in mezzo's names."""
    full: frozenset[str] = frozenset()
    """Ops of the custom black list."""
    guarded: bool = False
    """Whether only what is inside `fp16_guard` is 16-bit."""
    promote: bool = False
    """Whether ops in no list follow the widest input, as they do in eager mode."""
    masters: bool = False
    master_grad: bool = False
    scaling: Told | None = None
    """How losses are scaled; None does not."""

    @property
    def policy(self) -> mezzo.Policy:
        """The same in mezzo's words."""
        return _policy(self)

    @property
    def fed(self) -> torch.dtype | None:
        """What floating-point feeds are cast to: where all is 16-bit Paddle asks the user to cast them."""
        return parse_dtype(self.dtype) if self.level == "O2" and not self.guarded else None

    def stays_full(self, nodes: Iterable[Node]) -> list[torch.Tensor]:
        """Parameters and buffers that a norm, an op of the black list or something outside of `fp16_guard` reads."""
        policy, found = self.policy, []
        for node in nodes:
            if node.name in _KEPT_BY or (self.guarded and not node.guarded) or _is_full(policy, node.function):
                found += [one for one in node.tensors() if not isinstance(one, Variable)]
        return found


@cache
def _policy(told: Precision) -> mezzo.Policy:
    """In no list means float32 at O1 and 16-bit at O2, unless ops promote."""
    if told.level == "O0":
        return mezzo.Policy("O0")
    words: dict[str, Any] = {"half": told.half, "full": told.full, "master": "float32" if told.masters else None}
    if told.master_grad:
        words["grad_dtype"] = "float32"
    if not told.promote and told.level == "O1":
        listed = paddle.lists(Level.O1, torch.float16).entries.keys() | told.half | told.full
        gray = {ours for name in GRAY.split() for ours in paddle.NAMES.known[name]}
        words |= {"unlisted": "full", "promote": gray - listed}
    elif not told.promote and told.level == "O2":
        words["unlisted"] = "half"
    return mezzo.Policy(told.level, told.dtype, preset="paddle", keep_full=(), **words)


def _is_full(policy: mezzo.Policy, function: Any) -> bool:
    name = registry().name_of(function)
    return name is not None and policy.explain(name, device="cpu").rule is Rule.FULL
