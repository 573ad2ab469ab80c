"""Bytes that one rank stores and sends in a step, computed for each strategy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from mezzo.advising.model_sizes import ROOT, ModelSizes, Weight
from mezzo.advising.optimizer_states import OptimizerStates
from mezzo.optim.companion import sample_size
from mezzo.optim.master_formats import MASTER_FORMATS
from mezzo.policy.types import Master, ParsedEnum
from mezzo.prepare.sharding import casts_shards

_DRAWS = 4
"""Bytes of the count of random roundings of a parameter, with stochastic masters."""
_GATHERED_GROUPS = 2
"""Groups that FSDP2 holds at a time besides the root: the current and the prefetched one."""


class Strategy(ParsedEnum):
    """How the ranks share the work."""

    SINGLE = "single"
    """One process."""
    DDP = "ddp"
    """DistributedDataParallel: every rank has all parameters."""
    FSDP = "fsdp"
    """FSDP2, `fully_shard`: parameters, gradients and states are sharded over all ranks."""
    HSDP = "hsdp"
    """FSDP2 on a mesh of two dimensions: sharded over some ranks, replicated over the others."""


@dataclass(frozen=True, eq=False)
class Rank:
    """One rank: the tensors it stores, and the bytes it sends in a ring with the others.

    Shards are those of the rank with the largest, to which FSDP2 pads those of the others.
    """

    sizes: ModelSizes
    states: OptimizerStates
    strategy: Strategy
    ranks: int
    shard_ranks: int
    reduce_dtype: torch.dtype | None
    """Dtype in which gradients are reduced; None is the policy's for FSDP2, else their own."""
    reshard_after_forward: bool | None
    """As for `fully_shard`: None does not reshard the root."""
    gradient_as_bucket_view: bool
    """As for DistributedDataParallel."""

    # -- memory ------------------------------------------------------------------------------------

    def parameters(self) -> int:
        """Return the bytes of the parameters or of their shards."""
        return sum(
            self._shard_numel(weight) * self._stored(weight).itemsize for weight in self._weights
        )

    def masters(self) -> int:
        """Return the bytes of companion tensors, with the samples that belong to them."""
        of_weights = sum(
            self._companion(weight) for weight in self._weights if self._has_master(weight)
        )
        return of_weights + self.sizes.buffer_masters

    def optimizer_states(self) -> int:
        """Return the bytes of the states of the optimizer."""
        return sum(self._state(weight) for weight in self._weights if self._is_updated(weight))

    def gradients(self) -> int:
        """Return the bytes of the gradients or of their shards."""
        return sum(
            self._shard_numel(weight) * self._gradient(weight).itemsize for weight in self._trained
        )

    def gradient_buffers(self) -> int:
        """Return the bytes of the buffers from which gradients are reduced."""
        if self.strategy is Strategy.DDP:
            return 0 if self.gradient_as_bucket_view else self.gradients()
        if not self._is_sharded:
            return 0
        of_group: dict[str, int] = defaultdict(int)
        for weight in self._trained:
            computed = weight.numel * weight.gathered.itemsize
            of_group[weight.group] += computed + self._padded(weight, self._reduced(weight))
        return max(of_group.values(), default=0)

    def gathered(self) -> int:
        """Return the bytes of gathered parameters: the root's, and those of two groups at a time.

        The root stays gathered while the modules inside it run. Without resharding all do.
        """
        if not self._is_sharded:
            return 0
        of_group: dict[str, int] = defaultdict(int)
        for weight in self._weights:
            of_group[weight.group] += self._padded(weight, weight.gathered)
        if self.reshard_after_forward is False:
            return sum(of_group.values())
        root = of_group.pop(ROOT, 0)
        return root + sum(sorted(of_group.values())[-_GATHERED_GROUPS:])

    def weight_copies(self) -> int:
        """Return the bytes of the 16-bit copies of whole weights that autocast makes."""
        if self.sizes.dtype is None:
            return 0
        return sum(
            weight.numel * self.sizes.dtype.itemsize
            for weight in self._weights
            if weight.is_matrix and weight.after is torch.float32 and self.sizes.half is None
        )

    # -- the wire ----------------------------------------------------------------------------------

    def all_gather_forward(self) -> int:
        """Return the bytes sent to gather all parameters in forward."""
        return self._sent_to_shards(self._weights, lambda weight: weight.gathered)

    def all_gather_backward(self) -> int:
        """Return the bytes sent to gather in backward what was resharded after forward."""
        if self.reshard_after_forward is False:
            return 0
        skips_root = self.reshard_after_forward is None
        resharded = [
            weight for weight in self._weights if not (skips_root and weight.group == ROOT)
        ]
        return self._sent_to_shards(resharded, lambda weight: weight.gathered)

    def reduce_scatter(self) -> int:
        """Return the bytes sent to reduce gradients to shards."""
        return self._sent_to_shards(self._trained, self._reduced)

    def all_reduce(self) -> int:
        """Return the bytes sent to reduce gradients between replicas: each half of a ring once."""
        if self.strategy is Strategy.SINGLE:
            return 0
        replicas = self.ranks // self.shard_ranks
        size = sum(
            self._shard_numel(weight) * self._reduced(weight).itemsize for weight in self._trained
        )
        return -(-2 * (replicas - 1) * size // replicas)

    def broadcast(self) -> int:
        """Return the bytes of the buffers that DDP sends to all replicas in forward."""
        return self.sizes.buffers if self.strategy is Strategy.DDP and self.ranks > 1 else 0

    def _sent_to_shards(
        self, weights: tuple[Weight, ...] | list[Weight], dtype: Callable[[Weight], torch.dtype]
    ) -> int:
        size = sum(self._shard_numel(weight) * dtype(weight).itemsize for weight in weights)
        return (self.shard_ranks - 1) * size

    # -- one weight --------------------------------------------------------------------------------

    @property
    def _weights(self) -> tuple[Weight, ...]:
        return self.sizes.weights

    @property
    def _trained(self) -> list[Weight]:
        return [weight for weight in self._weights if weight.parameter.requires_grad]

    @property
    def _is_sharded(self) -> bool:
        return self.strategy in (Strategy.FSDP, Strategy.HSDP)

    def _is_updated(self, weight: Weight) -> bool:
        return self.states.updates(weight.parameter)

    def _shard_numel(self, weight: Weight) -> int:
        return prod(weight.shard(self.shard_ranks))

    def _padded(self, weight: Weight, dtype: torch.dtype) -> int:
        return self.shard_ranks * self._shard_numel(weight) * dtype.itemsize

    @property
    def _casts_shards(self) -> bool:
        return self._is_sharded and casts_shards(self.sizes.master)

    def _stored(self, weight: Weight) -> torch.dtype:
        """Return the dtype in memory: float32 shards are their own masters."""
        if self._casts_shards:
            # FSDP2 gathers and stores all shards of a group in one dtype.
            return weight.gathered
        return weight.before if self._is_sharded else weight.after

    def _has_master(self, weight: Weight) -> bool:
        if not self._is_sharded:
            return weight.has_master
        is_trained = self._is_updated(weight) and weight.parameter.requires_grad
        return self._stored(weight) is not weight.before and is_trained

    def _gradient(self, weight: Weight) -> torch.dtype:
        """Return the dtype of a gradient; FSDP2 casts it to that of the shard."""
        changes = weight.before is not weight.after or weight.has_master
        is_cast = self.sizes.half is not None and changes
        chosen = self.sizes.policy.grad_dtype
        if is_cast and chosen is not None and not self._is_sharded:
            return chosen
        return self._stored(weight)

    def _reduced(self, weight: Weight) -> torch.dtype:
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        if self._is_sharded and self.sizes.half is not None:
            return self.sizes.policy.grad_dtype or torch.float32
        return self._gradient(weight)

    def _companion(self, weight: Weight) -> int:
        master_format, stored = MASTER_FORMATS[self.sizes.master], self._stored(weight)
        dtype, numel = master_format.companion_dtype(stored), self._shard_numel(weight)
        if dtype is None:
            return 0
        is_sampled = master_format.sampled and self.sizes.has_tensors
        sample = sample_size(numel) * stored.itemsize if is_sampled else 0
        return numel * dtype.itemsize + sample

    def _state(self, weight: Weight) -> int:
        # Updates of weights with a master are computed in float32.
        dtype = torch.float32 if self._has_master(weight) else weight.before
        state = self.states.of(weight.parameter, weight.shard(self.shard_ranks), dtype)
        if not self.sizes.has_tensors:
            return state.elements
        is_drawn = self._has_master(weight) and self.sizes.master is Master.STOCHASTIC
        return state.elements + state.scalars + (_DRAWS if is_drawn else 0)
