"""`mezzo.estimate`: memory of a rank and bytes that it sends in a step, computed from sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mezzo._dtypes import HALF_DTYPES, dtype_name, parse_dtype
from mezzo._errors import PolicyError
from mezzo.advising.model_sizes import ModelSizes, SizesArg, read_sizes
from mezzo.advising.optimizer_states import OptimizerArg, OptimizerStates
from mezzo.advising.rank_bytes import Rank, Strategy
from mezzo.policy.parse import Selectors
from mezzo.policy.policy import Policy
from mezzo.policy.presets import is_torch
from mezzo.policy.types import Level, Master
from mezzo.prepare.plan import PolicyArg
from mezzo.prepare.plan_rows import format_bytes

_NOT_INCLUDED = """\
Computed from sizes. Not included: activations, temporary tensors of ops and of the update, and
what the allocator and the communication library keep."""


_ONE_GROUP = """\
All parameters are in one group, which FSDP2 gathers as a whole. Call fully_shard on each block too,
and pass groups=, or sizes by group: {"": 1_000_000, "layers.0": 5_000_000}.
"""


@dataclass(frozen=True)
class Estimate:
    """Bytes of memory of one rank and bytes that it sends in a step, by part; print it.

    If shards have different sizes, this is the rank with the largest.
    """

    parameters: int
    """Parameters, or the rank's shards of them."""
    buffers: int
    """Buffers of the model."""
    masters: int
    """Companion tensors of 16-bit parameters, which keep the rest of their float32 values."""
    optimizer_states: int
    """States of the optimizer, such as moments."""
    gradients: int
    """Gradients, or the rank's shards of them."""
    gradient_buffers: int
    """Buckets of DDP. With FSDP2 the gradients of the largest group before they are reduced, and
    the copy of them that is reduced."""
    gathered: int
    """All-gathered parameters of FSDP2 that exist at a time: those of the root and two groups."""
    weight_copies: int
    """16-bit copies of weights, which autocast makes at O1 and autograd keeps until backward."""
    all_gather_forward: int
    """Bytes sent to gather parameters in forward."""
    all_gather_backward: int
    """Bytes sent to gather parameters again in backward."""
    reduce_scatter: int
    """Bytes sent to reduce gradients to shards."""
    all_reduce: int
    """Bytes sent to reduce gradients between replicas."""
    broadcast: int
    """Bytes of buffers that DDP sends to all replicas in forward."""
    numel: int
    """Number of parameters of the model."""
    policy: Policy
    """The policy, with the overrides that were passed."""
    dtype: torch.dtype | None
    """The 16-bit dtype; None at O0."""
    master: Master
    """The master format; `Master.NONE` if parameters are not cast."""
    strategy: Strategy
    ranks: int
    shard_ranks: int
    """Ranks that parameters are sharded over; 1 if they are not sharded."""
    groups: int
    """Groups of parameters that FSDP2 gathers one by one."""
    optimizer: str
    """Name of the optimizer."""

    @property
    def memory(self) -> int:
        """Bytes of memory of a rank: all parts together, as in backward."""
        return sum(self._memory().values())

    @property
    def wire(self) -> int:
        """Bytes that a rank sends in one step: a forward, a backward and an update."""
        return sum(self._wire().values())

    def __str__(self) -> str:
        lines = [self._head(), "", *_format_part("memory of a rank", self._memory()), ""]
        if self.wire:
            lines += [*_format_part("sent by a rank in a step", self._wire()), ""]
        if self.gathered and self.groups == 1:
            lines.append(_ONE_GROUP)
        return "\n".join([*lines, _NOT_INCLUDED])

    def _head(self) -> str:
        dtype = "float32" if self.dtype is None else dtype_name(self.dtype)
        master = "" if self.master is Master.NONE else f" (master={self.master.value!r})"
        shards = f" ({self.shard_ranks} a replica)" if self.strategy is Strategy.HSDP else ""
        return (
            f"{self.numel:,} parameters at {self.policy.level.value} in {dtype}{master} with"
            f" {self.optimizer}, {self.strategy.value} on {self.ranks}"
            f" rank{'' if self.ranks == 1 else 's'}{shards}"
        )

    def _memory(self) -> dict[str, int]:
        buffers = "gradient buckets" if self.strategy is Strategy.DDP else "gradients being reduced"
        return {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "masters": self.masters,
            "optimizer states": self.optimizer_states,
            "gradients": self.gradients,
            buffers: self.gradient_buffers,
            "gathered parameters": self.gathered,
            "16-bit copies of weights": self.weight_copies,
        }

    def _wire(self) -> dict[str, int]:
        return {
            "all-gather in forward": self.all_gather_forward,
            "all-gather in backward": self.all_gather_backward,
            "reduce-scatter": self.reduce_scatter,
            "all-reduce": self.all_reduce,
            "broadcast of buffers": self.broadcast,
        }


def _format_part(title: str, parts: dict[str, int]) -> list[str]:
    shown = {name: size for name, size in parts.items() if size}
    rows = [*shown.items(), ("total", sum(shown.values()))]
    return [f"{title}:", *(f"  {name:<24}  {format_bytes(size):>12}" for name, size in rows)]


def estimate(
    model: SizesArg,
    policy: PolicyArg = "O2",
    ranks: int = 1,
    strategy: str | Strategy | None = None,
    *,
    optimizer: OptimizerArg = "AdamW",
    shard_ranks: int | None = None,
    groups: Selectors | None = None,
    reshard_after_forward: bool | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    gradient_as_bucket_view: bool = False,
    **overrides: Any,
) -> Estimate:
    """Estimate the memory of a rank and the bytes that it sends in a step, from sizes alone.

    Counts the tensors that `decorate`, the optimizer, and torch's DistributedDataParallel or
    `fully_shard` make. Allocates nothing. Activations are not included.

    Args:
        model: The model, which may be on the meta device; or its number of parameters; or numbers
            of parameters by group, as FSDP2 gathers them. The group `""` is the root, with the
            parameters that are in no other group.
        policy: A level such as `"O2"`, a `mezzo.Policy`, or the path of a TOML file. Its dtype
            `"auto"` is bfloat16 here.
        ranks: Number of processes.
        strategy: `"single"`, `"ddp"`, `"fsdp"` or `"hsdp"`. None is `"single"` for one rank and
            `"fsdp"` for more.
        optimizer: The name or class of an optimizer, a function of parameters that returns one, or
            the optimizers of the model themselves. Of Muon by name or class AdamW has what is no
            matrix.
        shard_ranks: The ranks that `"hsdp"` shards over. It replicates over `ranks / shard_ranks`.
        groups: Names or classes of the modules that `fully_shard` is called on, besides the model
            itself. None is the modules of a sharded model, and otherwise the elements of the
            outermost `nn.ModuleList` and `nn.Sequential`.
        reshard_after_forward: As for `fully_shard`. None reshards all but the root.
        reduce_dtype: Dtype in which gradients are reduced. None is that of the gradients, and with
            FSDP2 at O2 the policy's `grad_dtype` or float32.
        gradient_as_bucket_view: As for DistributedDataParallel.
        **overrides: Fields of the policy to change, such as `dtype=`, `master=` or `keep_full=`.

    >>> import mezzo
    >>> sizes = {"": 1_000_000, "layers.0": 4_000_000, "layers.1": 4_000_000}
    >>> sharded = mezzo.estimate(sizes, "O2", ranks=4, strategy="fsdp")
    >>> sharded.parameters, sharded.gathered, sharded.all_gather_forward
    (9000000, 18000000, 13500000)
    >>> mezzo.estimate(sizes, "O2", master="split").memory  # 14 bytes a parameter
    126000000
    """
    states = OptimizerStates(optimizer)
    sizes = read_sizes(model, policy, overrides, states, groups)
    chosen = _read_strategy(strategy, ranks)
    _refuse_policy(sizes, chosen)
    rank = Rank(
        sizes,
        states,
        chosen,
        ranks,
        _read_shard_ranks(shard_ranks, ranks, chosen),
        None
        if reduce_dtype is None
        else parse_dtype(reduce_dtype, allowed=(*HALF_DTYPES, torch.float32), what="reduce_dtype"),
        reshard_after_forward,
        gradient_as_bucket_view,
    )
    return Estimate(
        parameters=rank.parameters(),
        buffers=sizes.buffers,
        masters=rank.masters(),
        optimizer_states=rank.optimizer_states(),
        gradients=rank.gradients(),
        gradient_buffers=rank.gradient_buffers(),
        gathered=rank.gathered(),
        weight_copies=rank.weight_copies(),
        all_gather_forward=rank.all_gather_forward(),
        all_gather_backward=rank.all_gather_backward(),
        reduce_scatter=rank.reduce_scatter(),
        all_reduce=rank.all_reduce(),
        broadcast=rank.broadcast(),
        numel=sum(weight.numel for weight in sizes.weights),
        policy=sizes.policy,
        dtype=sizes.dtype,
        master=sizes.master,
        strategy=chosen,
        ranks=ranks,
        shard_ranks=rank.shard_ranks,
        groups=sizes.group_count,
        optimizer=states.name,
    )


def _read_strategy(strategy: str | Strategy | None, ranks: int) -> Strategy:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise PolicyError(f"ranks={ranks!r} should be a number of processes: an integer above 0.")
    default = Strategy.SINGLE if ranks == 1 else Strategy.FSDP
    chosen = default if strategy is None else Strategy.parse(strategy)
    if chosen is Strategy.SINGLE and ranks > 1:
        raise PolicyError(
            f"strategy='single' is one process, got ranks={ranks}. Pass strategy='ddp', 'fsdp' or"
            " 'hsdp', or ranks=1."
        )
    return chosen


def _read_shard_ranks(shard_ranks: int | None, ranks: int, strategy: Strategy) -> int:
    if strategy is not Strategy.HSDP:
        if shard_ranks is not None:
            raise PolicyError(
                f"shard_ranks={shard_ranks!r} is for strategy='hsdp', got"
                f" strategy={strategy.value!r}. Leave it out, or pass strategy='hsdp'."
            )
        return ranks if strategy is Strategy.FSDP else 1
    if not isinstance(shard_ranks, int) or shard_ranks < 1 or ranks % shard_ranks:
        raise PolicyError(
            f"strategy='hsdp' needs the number of ranks that parameters are sharded over, which"
            f" divides ranks={ranks}; got shard_ranks={shard_ranks!r}. Pass shard_ranks=8 for"
            " nodes of 8."
        )
    return shard_ranks


def _refuse_policy(sizes: ModelSizes, strategy: Strategy) -> None:
    """Raise `PolicyError` for a policy that `decorate` refuses with this strategy."""
    policy, grad_dtype = sizes.policy, sizes.policy.grad_dtype
    if sizes.half is None or strategy is Strategy.SINGLE:
        return
    if strategy is Strategy.DDP:
        if grad_dtype not in (None, sizes.dtype):
            raise PolicyError(
                f"grad_dtype={dtype_name(grad_dtype)!r} cannot be used with"
                " DistributedDataParallel, whose buckets have the dtype of the parameters. Leave it"
                " out, and pass reduce_dtype='float32' to reduce in float32."
            )
    elif policy.level is Level.O3 or policy.master is Master.NONE:
        what = "O3" if policy.level is Level.O3 else "master='none'"
        raise PolicyError(
            f"{what} trains 16-bit parameters without masters, which the shards of FSDP2 need. Use"
            " policy 'O2', which computes in 16 bits; with master='split' or 'stochastic' its"
            " shards are 16-bit too."
        )
    elif not is_torch(policy.preset):
        raise PolicyError(
            f"preset={policy.preset!r} casts parameters in another way than FSDP2 gathers them. Use"
            " policy 'O2' without preset= for a sharded model."
        )
