"""`nn.Graph.config`: what a graph is told about how to run."""

from __future__ import annotations

from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES
from mezzo.policy.policy import Policy

_NEEDLESS = (
    "allow_fuse_add_to_output allow_fuse_cast_scale allow_fuse_model_update_ops enable_cudnn_conv_heuristic_search_algo enable_cudnn_fused_normalization_add_relu"
    " enable_fuse_model_update_ops set_outputs_buffer_size"
).split()
"""Hints to OneFlow's compiler: a step is fused and captured here without them."""


_ENDS = frozenset({"cross_entropy", "nll_loss", "log_softmax", "mean", "sum"})
"""What stands at the end of a graph. OneFlow's pass lets an op that follows be 16-bit only where another listed op comes after it: losses are float32, and so is
the gradient that a scale of 2^16 begins with."""


class GraphConfig:
    """The settings of a graph. `enable_amp` decides; hints to OneFlow's compiler are taken and have nothing to do.

    >>> config = GraphConfig()
    >>> config.enable_amp(True, dtype=torch.bfloat16)
    >>> config.policy()
    Policy('O1', dtype='bfloat16', preset='oneflow', full={'cross_entropy', 'log_softmax', 'mean', 'nll_loss', 'sum'})
    """

    def __init__(self) -> None:
        self._amp: torch.dtype | None = None
        self._settled = False

    def settle(self) -> None:
        """Nothing is set from now on: the graph was made ready with what there is."""
        self._settled = True

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:  # noqa: FBT001, FBT002 - OneFlow's call shape
        """Run the graph in mixed precision, or not. Said before the first call of the graph."""
        if type(mode) is not bool:
            raise AssertionError(f"enable_amp(mode) takes True or False, got {mode!r}.")
        if dtype not in HALF_DTYPES:
            raise AssertionError(f"enable_amp(dtype=...) takes float16 or bfloat16, got {dtype!r}.")
        if self._settled:
            raise RuntimeError("config.enable_amp() came after the graph's first call, which made it ready. Call it in __init__.")
        self._amp = dtype if mode else None

    @property
    def amp_dtype(self) -> torch.dtype | None:
        """What listed ops run in; None where everything is float32."""
        return self._amp

    def policy(self) -> Policy:
        """The settings as a policy."""
        return Policy("O0") if self._amp is None else Policy("O1", self._amp, preset="oneflow", full=_ENDS)

    def __getattr__(self, name: str) -> Any:
        if name in _NEEDLESS:
            return lambda *_, **__: None
        raise AttributeError(f"GraphConfig has no {name!r} here. There are: enable_amp, and without effect {', '.join(_NEEDLESS)}.")
