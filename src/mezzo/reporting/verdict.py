"""The verdict on a run: one sentence, and the facts that it rests on."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

from mezzo.observing.log_values import Line, finite, number, plain_number, step_of
from mezzo.observing.skip_causes import describe_finding, failed_cure
from mezzo.reporting.layers import LayerRow, layer_rows
from mezzo.reporting.run_data import RunData

_MANY_SKIPS = 0.05
"""Share of skipped steps above which scaling costs more than it should."""
_IN_A_ROW = 10
"""Skipped steps at the end of a run that mean that it does not train any more."""
_UNDERFLOW = 0.25
"""Share of a layer's gradient values that underflow above which it is named."""
_WINDOW = 20
_TRACE = (
    "mezzo.trace_overflow(model, batch, loss_fn) finds the op that overflowed, its line, and a"
    " policy that cures it."
)
_NO_16_BITS = frozenset({"float32", "float64"})


class Status(StrEnum):
    """How a run went."""

    GOOD = "good"
    WATCH = "watch"
    BAD = "bad"
    EMPTY = "empty"
    """There is nothing to judge."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run."""

    status: Status
    sentence: str
    facts: tuple[str, ...] = ()
    """Further sentences, the most important first."""


def judge(run: RunData) -> Verdict:
    """Judge a run by its log."""
    if not run.of("step"):
        return _without_steps(run)
    verdict = _judge_steps(run)
    return replace(
        verdict,
        sentence=" ".join([verdict.sentence, *_unobserved(run)]),
        facts=(*verdict.facts, *_is_open(run)),
    )


def _without_steps(run: RunData) -> Verdict:
    why, *others = [*_ends(run), *_unobserved(run)] or [""]
    sentence = f"No training step was recorded{f': {lowered(why)}' if why else '.'}"
    return Verdict(Status.EMPTY, sentence, tuple(others))


def _judge_steps(run: RunData) -> Verdict:
    overflows, findings = [*_collapse(run), *_bad_loss(run)], _findings(run)
    failures = [*_ends(run), *overflows, *findings]
    odd_skips = _odd_skips(run)
    concerns = [*odd_skips, *_underflow(run), *_lint(run)]
    comforts = [*([] if odd_skips else [_skip_sentence(run)]), *_loss_sentence(run)]
    if (overflows or odd_skips) and not findings:
        comforts.append(_TRACE)
    what = f"{run.steps:,} step{'' if run.steps == 1 else 's'} in {run.dtype or 'an unknown dtype'}"
    if failures:
        return Verdict(Status.BAD, failures[0], (*failures[1:], *concerns, *comforts))
    if concerns:
        start = (
            "It has not trained yet"
            if len(run.skips) == run.steps
            else "It trains, with something to look at"
        )
        return Verdict(Status.WATCH, f"{start}: {lowered(concerns[0])}", (*concerns[1:], *comforts))
    sentence = f"Healthy: {what}, {lowered(comforts[0])}"
    return Verdict(Status.GOOD, sentence, tuple(comforts[1:]))


def lowered(sentence: str) -> str:
    """Return a sentence to follow a colon or a comma."""
    first = sentence.partition(" ")[0]
    return sentence if first[1:] != first[1:].lower() else sentence[:1].lower() + sentence[1:]


def _ends(run: RunData) -> list[str]:
    found = []
    for rank in run.ranks:
        if rank.end not in {None, "stopped"}:
            name = f"Rank {rank.rank}" if run.world_size > 1 else "The run"
            found.append(f"{name} ended with {rank.end}.")
    if run.missing_ranks:
        names = ", ".join(map(str, run.missing_ranks))
        found.append(f"There is no log of rank {names}, of {run.world_size} ranks.")
    return found


def _is_open(run: RunData) -> list[str]:
    if all(rank.end is not None for rank in run.ranks):
        return []
    return ["The log has no end: the run goes on, or it was killed."]


def _unobserved(run: RunData) -> list[str]:
    """Return what a script did that is not in the log: training of another model, say."""
    return list(dict.fromkeys(str(line.get("what")) for line in run.of("unobserved")))


def _collapse(run: RunData) -> list[str]:
    events = [line for line in run.of("event") if line.get("name") == "ScaleCollapsed"]
    if events:
        fields = events[0].get("fields") or {}
        step = f" at step {events[0]['step']:,}" if step_of(events[0]) else ""
        scale = finite(fields.get("scale")) or 0.0
        collapsed = f"The loss scale collapsed to {plain_number(scale)}{step}"
        return [f"{collapsed}: gradients overflow at every scale."]
    steps = run.ranks[0].of("step")
    updates = [line for line in steps if line.get("skipped") is not None]
    last = updates[-_IN_A_ROW:]
    if len(last) == _IN_A_ROW and all(line.get("skipped") for line in last):
        first_bad = len(updates) - next(
            (index for index, line in enumerate(reversed(updates)) if not line.get("skipped")),
            len(updates),
        )
        since = updates[first_bad].get("step")
        return [f"The run does not train: every step since step {since} was skipped."]
    return []


def _bad_loss(run: RunData) -> list[str]:
    bad = [
        (step_of(line) or 0, rank.rank, line)
        for rank in run.ranks
        for line in rank.of("step")
        if (loss := number(line.get("loss"))) is not None and not math.isfinite(loss)
    ]
    if not bad:
        return []
    step, rank, first = min(bad, key=lambda found: found[:2])
    where = f"step {step}" + (f" on rank {rank}" if run.world_size > 1 else "")
    steps = {number for number, *_ in bad}
    kept = {number for number, _, line in bad if line.get("skipped") is not True}
    name = "NaN" if math.isnan(number(first.get("loss")) or 0.0) else "infinite"
    fate = f"{len(kept)} applied to the weights" if kept else "all skipped"
    count = "1 such step" if len(steps) == 1 else f"{len(steps)} such steps"
    return [f"The loss was {name} at {where} ({count}, {fate})."]


def _findings(run: RunData) -> list[str]:
    found = [line for line in run.of("finding") if line.get("op")]
    return [f"{describe_finding(line)}{_cured(line)}." for line in found[:3]]


def _cured(finding: Line) -> str:
    if not finding.get("cure"):
        return ""
    if failed_cure(finding):
        return "; no policy was found that cures it"
    outcome = "cures it" if finding.get("verified") else "may cure it"
    return f"; {finding['cure']} {outcome}"


def _odd_skips(run: RunData) -> list[str]:
    odd = [skip for skip in run.skips if not skip.is_normal]
    # A short run is not odd because its first scale was too large.
    first = next((step_of(line) or 0 for line in run.of("step") if not line.get("skipped")), 0)
    later = sum(skip.step > first for skip in run.skips)
    if len(odd) <= 1 and later <= _MANY_SKIPS * run.steps:
        return []
    names = Counter(skip.parameter for skip in (odd or run.skips) if skip.parameter)
    name = f", most often first in {names.most_common(1)[0][0]}" if names else ""
    where = f"{len(odd):,} of them outside" if odd else "all in"
    count = f"{len(run.skips):,} of {run.steps:,} steps were skipped"
    return [f"{count} ({_share(run)}), {where} the search for the scale{name}."]


def _share(run: RunData) -> str:
    """Return the share of steps that were skipped."""
    share = len(run.skips) / max(run.steps, 1)
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def _underflow(run: RunData) -> list[str]:
    rows = [row for row in layer_rows(run) if (row.underflow or 0) > _UNDERFLOW]
    if not rows:
        return []
    worst: LayerRow = max(rows, key=lambda row: row.underflow or 0)
    others = f", and more than {_UNDERFLOW:.0%} in {len(rows) - 1} others" if len(rows) > 1 else ""
    return [f"{worst.underflow:.0%} of the gradient values of {worst.name} underflow{others}."]


def _lint(run: RunData) -> list[str]:
    findings = lint_findings(run)
    if not findings:
        return []
    others = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
    return [f'Lint found "{findings[0].get("what")}"{others}.']


def lint_findings(run: RunData) -> list[dict[str, object]]:
    """Return the findings of `mezzo.lint` in a log; each once."""
    found: dict[str, dict[str, object]] = {}
    for line in run.of("lint"):
        listed = line.get("findings")
        for finding in listed if isinstance(listed, list) else [line]:
            if isinstance(finding, dict):
                found.setdefault(
                    f"{finding.get('rule')} {finding.get('where')} {finding.get('what')}", finding
                )
    return list(found.values())


def _skip_sentence(run: RunData) -> str:
    if not run.skips:
        return (
            "Nothing ran in 16 bits: the model ran in no autocast region."
            if run.activation_dtypes and run.activation_dtypes <= _NO_16_BITS
            else "No step was skipped."
        )
    normal = sum(skip.is_normal for skip in run.skips)
    search = "in the search for the loss scale."
    if len(run.skips) == 1:
        return f"1 step was skipped ({_share(run)}), {'' if normal else 'not '}{search}"
    which = "all" if normal == len(run.skips) else f"{normal:,}" if normal else "none"
    return f"{len(run.skips):,} steps were skipped ({_share(run)}), {which} {search}"


def _loss_sentence(run: RunData) -> list[str]:
    losses = [
        loss
        for line in run.ranks[0].of("step")
        if (loss := finite(line.get("loss"))) is not None and line.get("skipped") is not True
    ]
    if len(losses) < 2:
        return []
    window = max(1, min(_WINDOW, len(losses) // 4))
    first, last = sum(losses[:window]) / window, sum(losses[-window:]) / window
    verb = "fell" if last < first else "rose"
    means = f", means of {window} steps" if window > 1 else ""
    return [f"The loss {verb} from {first:.4g} to {last:.4g}{means}."]
