"""Scale rules of every kind."""

from __future__ import annotations

from mezzo import ScaleRule

RULES = [
    ScaleRule(growth_interval=3),
    ScaleRule(growth_interval=1, max_scale=2.0**20),
    ScaleRule(growth_factor=1.1, backoff_factor=0.9, growth_interval=2),
    ScaleRule(growth_interval=4, backoff_interval=2),
    ScaleRule(growth_interval=4, backoff_interval=3, consecutive_backoff=False),
    ScaleRule(
        growth_factor=1.7, backoff_factor=0.3, growth_interval=2, backoff_interval=2, min_scale=1.0
    ),
    ScaleRule(growth_interval=0),
    ScaleRule(backoff_interval=0, growth_interval=5),
    ScaleRule(dynamic=False),
    ScaleRule(growth_interval=2, warmup_steps=7),
    ScaleRule(growth_factor=1e30, growth_interval=1, backoff_interval=2),
]
