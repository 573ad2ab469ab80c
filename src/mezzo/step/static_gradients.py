"""Gradients at fixed addresses, to which the captured calls of an accumulation add."""

from __future__ import annotations

from operator import ne

import torch

from mezzo._torch import foreach_zero_, shards
from mezzo.optim.master_weights import version_of

Gradients = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters with their gradients."""


class StaticGradients:
    """The gradients of a step that keep their addresses, if calls accumulate and are captured.

    There are none at first: each backward pass allocates its own, which are recorded. Methods are
    in the order in which a step calls them.
    """

    def __init__(self) -> None:
        self.exist = False
        """Whether gradients keep their addresses from call to call."""
        self.are_recorded = False
        """Whether updates are to call `record`."""
        self._recorded: Gradients = []
        self._static: Gradients = []
        self._zeroed: list[int] = []
        """Versions of the gradients when they were set to zero."""
        self._has_replayed = False
        """Whether a captured graph has added to all of them since the last update."""
        self._has_run = False
        """Whether an eager call has added to some of them since the last update."""

    def release(self, *, records: bool) -> None:
        """Let backward passes allocate gradients again.

        With `records`, those of each update are recorded, and kept until the next one.
        """
        self.detach_unused()
        self._recorded, self._static, self._zeroed = [], [], []
        self.exist, self.are_recorded = False, records
        self._has_replayed = self._has_run = False

    def record(self, gradients: Gradients) -> None:
        """Record the gradients of an update."""
        self._recorded = gradients

    def allocate(self) -> bool:
        """Allocate gradients like the recorded ones; return False if none are recorded."""
        if not self._recorded:
            return False
        # With the strides of their parameters, which the fused step needs.
        self._static = [
            (parameter, torch.zeros_like(parameter, dtype=gradient.dtype))
            for parameter, gradient in self._recorded
        ]
        self._recorded, self.are_recorded, self.exist = [], False, True
        self.zero()
        return True

    def attach(self) -> None:
        """Make these the gradients of their parameters, with the values of those there are now.

        They are zero after `optimizer.zero_grad()`.
        """
        first = self._static[:1]
        if all(parameter.grad is gradient for parameter, gradient in first):
            return
        if all(parameter.grad is None for parameter, _ in self._static):
            self.zero()
            return
        for parameter, gradient in self._static:
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient

    def versions(self) -> list[int]:
        """Return the versions of the gradients, for `were_added_to`."""
        # Those of shards: FSDP2 adds to them, and leaves the versions of sharded tensors alone.
        return [version_of(shard) for shard in shards([gradient for _, gradient in self._static])]

    def were_added_to(self, versions: list[int], gradients: Gradients) -> bool:
        """Return whether a call since then has added to all of them, and to no others."""
        are_same = [id(gradient) for _, gradient in gradients] == [
            id(gradient) for _, gradient in self._static
        ]
        return are_same and all(map(ne, versions, self.versions()))

    def note_eager_call(self, gradients: Gradients) -> bool:
        """Note that an eager call has added to some; return whether no other gradients exist."""
        self._has_run = True
        return len(gradients) <= len(self._static)

    def note_replay(self) -> None:
        """Note that a captured graph has added to all of them."""
        self._has_replayed = True

    def detach_unused(self) -> None:
        """Remove gradients that no call has added to: such parameters are not stepped."""
        if not self._has_replayed:
            versions = zip(self._static, self.versions(), self._zeroed, strict=True)
            for (parameter, gradient), version, zeroed in versions:
                if parameter.grad is gradient and version == zeroed:
                    parameter.grad = None

    def zero(self) -> None:
        """Set the gradients to zero after an eager update, or after other code has removed them."""
        foreach_zero_(shards([gradient for _, gradient in self._static]))
        for parameter, gradient in self._static:
            parameter.grad = gradient
        self._has_run = True
        self.note_zeros()

    def note_zeros(self) -> None:
        """Note that the gradients are zero: after a replay, their versions do not show it."""
        if self._has_run:
            self._zeroed = self.versions()
        self._has_replayed = self._has_run = False
