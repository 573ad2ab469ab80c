"""The known ops as a table: name, rule, reason, and where a 16-bit kernel is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from mezzo._hardware import hardware
from mezzo.policy import missing_kernels
from mezzo.policy.decide import all_entries, resolve_quietly
from mezzo.policy.policy import Policy


@dataclass(frozen=True)
class OpInfo:
    """One known op."""

    name: str
    rule: str
    reason: str
    no_kernel: tuple[tuple[str, str], ...]
    """The (device, dtype) pairs for which torch has no kernel: there it runs in float32."""


class OpTable(Sequence[OpInfo]):
    """The known ops in order of their names; printed, it is a table."""

    def __init__(self, rows: Sequence[OpInfo]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> OpInfo: ...
    @overload
    def __getitem__(self, index: slice) -> OpTable: ...
    def __getitem__(self, index: int | slice) -> OpInfo | OpTable:
        return OpTable(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[OpInfo]:
        return iter(self._rows)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self._rows), default=0)
        return "\n".join(
            f"{row.name:{width}}  {row.rule:7}  {row.reason}{_where(row)}" for row in self._rows
        )


def ops(
    policy: Policy | str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    **overrides: Any,
) -> OpTable:
    """List every op that mezzo knows, with the rule that a policy has for it on a device, and why.

    >>> next(op for op in ops(device="cpu") if op.name == "linear").rule
    'half'
    """
    read, found = Policy.parse(policy, **overrides), hardware(device)
    # A device that is not here is asked about its lists all the same.
    dtype = resolve_quietly(read, found).dtype or read.dtype or torch.float16
    entries = all_entries(read, dtype, found.device)
    return OpTable(
        [
            OpInfo(name, entry.rule.value, entry.reason, missing_kernels.missing(name))
            for name, entry in entries.items()
        ]
    )


def _where(row: OpInfo) -> str:
    return (
        f" (no kernel: {', '.join(f'{dtype} on {device}' for device, dtype in row.no_kernel)})"
        if row.no_kernel
        else ""
    )
