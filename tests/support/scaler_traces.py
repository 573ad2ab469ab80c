"""Recorded traces of PaddlePaddle's scaler."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo.scaling.scale_state import LARGEST, SMALLEST, ScaleRule, ScaleState, float32

_DATA = Path(__file__).parent.parent / "data" / "paddle-scaler.json"


@dataclass(frozen=True)
class Trace:
    """One run of 200 steps."""

    config: dict[str, Any]
    mode: str
    optimizer: str
    reload_at: int | None
    kinds: str
    """One character for each step: `.` finite gradients, N NaN, I inf, J -inf."""
    after: list[tuple[float, int, int]]
    """Loss scale, successful steps in a row and skipped steps in a row after each step."""
    unscaled: list[float]
    """The unscaled value of a gradient of 1 at each step."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the configuration as keywords of `mezzo.GradScaler`.

        Paddle's factors are float32, and its scale has no bounds.
        """
        get = self.config.get
        return {
            "init_scale": float(get("init_loss_scaling", 65536.0)),
            "growth_factor": float32(get("incr_ratio", 2.0)),
            "backoff_factor": float32(get("decr_ratio", 0.5)),
            "growth_interval": get("incr_every_n_steps", 2000),
            "backoff_interval": get("decr_every_n_nan_or_inf", 1),
            "dynamic": get("use_dynamic_loss_scaling", True),
            "min_scale": SMALLEST,
            "max_scale": LARGEST,
        }

    def rule_and_state(self) -> tuple[ScaleRule, ScaleState]:
        """Return the configuration as a rule and an initial state."""
        settings = self.settings
        return ScaleRule(
            **{name: value for name, value in settings.items() if name != "init_scale"}
        ), ScaleState(settings["init_scale"])


def traces() -> list[Trace]:
    """Return all recorded traces."""
    return [_trace(entry) for entry in json.loads(_DATA.read_text())["traces"]]


def _trace(entry: dict[str, Any]) -> Trace:
    kinds = "".join(
        kind * int(count or 1) for kind, count in re.findall(r"([.NIJ])(\d*)", entry["kinds"])
    )
    after = zip(
        _spread(entry["scales"]),
        map(int, entry["good"].split()),
        map(int, entry["bad"].split()),
        strict=True,
    )
    return Trace(
        entry["config"],
        entry["mode"],
        entry["optimizer"],
        entry["reload_at"],
        kinds,
        list(after),
        list(_spread(entry["unscaled"])),
    )


def _spread(runs: list[tuple[float, int]]) -> Iterable[float]:
    return itertools.chain.from_iterable([value] * count for value, count in runs)
