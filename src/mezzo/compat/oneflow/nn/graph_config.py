"""`oneflow.nn.graph.GraphConfig`: the settings of a graph, such as mixed precision."""

from __future__ import annotations

from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name
from mezzo.policy.policy import Policy

_COMPILER_HINTS = (
    "allow_fuse_add_to_output allow_fuse_cast_scale allow_fuse_model_update_ops"
    " enable_auto_memory enable_choose_best_memory_allocation enable_compress_memory"
    " enable_cudnn_conv_heuristic_search_algo enable_cudnn_fused_normalization_add_relu"
    " enable_fuse_model_update_ops enable_fused_model_update_cast enable_multi_tensor_update"
    " enable_straighten_algorithm set_outputs_buffer_size"
).split()
"""Hints for OneFlow's compiler, accepted without effect: mezzo fuses and captures anyway."""

_OTHER_SETTINGS = {
    "set_gradient_accumulation_steps": "accumulate= of mezzo.TrainStep",
    "enable_zero": "torch.distributed.fsdp",
    "set_zero_redundancy_optimizer_mode": "torch.distributed.fsdp",
    "enable_auto_parallel": "torch.distributed, such as DistributedDataParallel",
}
"""Settings of OneFlow that would change what a graph computes or where, and what to use."""

_GRAPH_END_OPS = frozenset({"cross_entropy", "nll_loss", "log_softmax", "mean", "sum"})
"""Ops at the end of a graph, which run in float32. OneFlow's pass makes a "follow" op 16-bit only
if another listed op comes after it, so losses are float32, as is the first gradient, which is a
loss scale of up to 2^16."""


class GraphConfig:
    """`Graph.config`: `enable_amp`, and hints for OneFlow's compiler, which have no effect.

    >>> config = GraphConfig()
    >>> config.enable_amp(True, dtype=torch.bfloat16)
    >>> config.policy().dtype
    torch.bfloat16
    """

    def __init__(self) -> None:
        self._amp: torch.dtype | None = None
        self._frozen = False

    def freeze(self) -> None:
        """Reject later changes: the graph was called."""
        self._frozen = True

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:
        """Enable or disable mixed precision, before the first call of the graph."""
        if type(mode) is not bool:
            raise AssertionError(f"enable_amp(mode) takes True or False, got {mode!r}.")
        if dtype not in HALF_DTYPES:
            raise AssertionError(f"enable_amp(dtype=...) takes float16 or bfloat16, got {dtype!r}.")
        if self._frozen:
            raise RuntimeError(
                "config.enable_amp() was called after the graph's first call. Call it in __init__."
            )
        self._amp = dtype if mode else None

    @property
    def amp_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype of listed ops; None if mixed precision is disabled."""
        return self._amp

    def policy(self) -> Policy:
        """Return the settings as a policy."""
        if self._amp is None:
            return Policy("O0")
        return Policy("O1", self._amp, preset="oneflow", full=_GRAPH_END_OPS)

    def __repr__(self) -> str:
        amp = None if self._amp is None else dtype_name(self._amp)
        return f"GraphConfig(amp={amp})"

    def __getattr__(self, name: str) -> Any:
        if name in _COMPILER_HINTS:
            return lambda *_, **__: None
        if name in _OTHER_SETTINGS:
            raise AttributeError(f"GraphConfig has no {name}(). Use {_OTHER_SETTINGS[name]}.")
        raise AttributeError(
            f"GraphConfig does not support {name!r}. Available: enable_amp, and without effect"
            f" {', '.join(_COMPILER_HINTS)}."
        )
