"""`mezzo.ops()`: the known ops with their rules, reasons and missing 16-bit kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from mezzo._hardware import hardware
from mezzo.policy import missing_kernels
from mezzo.policy.decide import all_entries, resolve_dtype_quietly
from mezzo.policy.policy import Policy


@dataclass(frozen=True)
class OpInfo:
    """One known op, and the rule that a policy has for it."""

    name: str
    rule: str
    reason: str
    no_kernel: tuple[tuple[str, str], ...]
    """The (device, dtype) pairs without a kernel in torch: the op runs in float32 there."""


class OpTable(Sequence[OpInfo]):
    """The known ops, sorted by name; `print` shows them as a table."""

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
            f"{row.name:{width}}  {row.rule:7}  {row.reason}{_missing(row)}" for row in self._rows
        )


def ops(
    policy: Policy | str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    **overrides: Any,
) -> OpTable:
    """List every known op with its rule in a policy on a device, and the reason.

    Takes what `autocast` takes: a `Policy`, a level or a TOML file, and overrides of fields. The
    result is a sequence of `OpInfo` (`name`, `rule`, `reason`, `no_kernel`) that prints as a table.

    >>> [op.rule for op in ops("O1", device="cpu", full={"add"}) if op.name in ("add", "linear")]
    ['full', 'half']
    >>> table = ops("O1", device="cpu")
    >>> print(table[:2])  # doctest: +ELLIPSIS
    abs ...
    acos ...
    """
    parsed, facts = Policy.parse(policy, **overrides), hardware(device)
    # The op lists of a device can be read on a machine without it.
    dtype = resolve_dtype_quietly(parsed, facts).dtype or parsed.dtype or torch.float16
    entries = all_entries(parsed, dtype, facts.device)
    return OpTable(
        [
            OpInfo(name, entry.rule.value, entry.reason, missing_kernels.missing(name))
            for name, entry in entries.items()
        ]
    )


def _missing(row: OpInfo) -> str:
    missing = ", ".join(f"{dtype} on {device}" for device, dtype in row.no_kernel)
    return f" (no kernel: {missing})" if missing else ""
