"""Findings of `mezzo.lint`: what costs precision or time, where, why, and what to write instead."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

_WIDTH = 96


@dataclass(frozen=True)
class LintFinding:
    """One thing in a training setup that costs precision or time; print it.

    >>> print(LintFinding("batch-multiple", "the batch has 30 rows", "fc", "slow", "use 32", 1.5))
    batch-multiple: the batch has 30 rows
      where    fc
      why      slow
      instead  use 32
      gain     1.50× faster, measured
    """

    rule: str
    """The name of the rule, for `ignore=`."""
    what: str
    """What was found."""
    where: str
    """The module, parameter, optimizer or source line; the model's class for the whole model."""
    why: str
    """What it costs, and why."""
    instead: str
    """What to write instead."""
    gain: float | None = None
    """Measured time before, divided by the time after; None if that was not measured."""

    def __str__(self) -> str:
        rows = {"where": self.where, "why": self.why, "instead": self.instead}
        if self.gain is not None:
            rows["gain"] = f"{self.gain:.2f}× faster, measured"
        return "\n".join([f"{self.rule}: {self.what}", *(_row(*row) for row in rows.items())])


def _row(name: str, text: str) -> str:
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, _WIDTH - 11, break_on_hyphens=False)
    ]
    return "\n".join(f"  {name if not index else '':<9}{line}" for index, line in enumerate(lines))


@dataclass(frozen=True)
class LintFindings:
    """All findings of one `lint`, in the order of the rules; print them, count them, iterate."""

    findings: tuple[LintFinding, ...]
    checked: tuple[str, ...]
    """Names of the rules that had what they need; others need a sample, a step or an optimizer."""
    skipped: tuple[str, ...] = ()
    """Names of the rules that could not be checked."""

    def of(self, rule: str) -> tuple[LintFinding, ...]:
        """Return the findings of one rule."""
        return tuple(finding for finding in self.findings if finding.rule == rule)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the findings as plain dictionaries, for logs and pages."""
        return [asdict(finding) for finding in self.findings]

    def __iter__(self) -> Iterator[LintFinding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, index: int) -> LintFinding:
        return self.findings[index]

    def __str__(self) -> str:
        count = len(self.findings)
        head = (
            f"{count or 'no'} finding{'' if count == 1 else 's'}, {len(self.checked)} rules checked"
        )
        if self.skipped:
            head += f" (not checked: {', '.join(self.skipped)})"
        return "\n\n".join(
            [
                "\n".join(textwrap.wrap(head, _WIDTH, break_on_hyphens=False)),
                *map(str, self.findings),
            ]
        )
