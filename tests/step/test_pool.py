"""Max pooling with channels last."""

from __future__ import annotations

from pathlib import Path

from support.interpreted import needs_triton, run_interpreted


@needs_triton
def test_the_kernels_hold_when_interpreted():
    run_interpreted(Path(__file__).with_name("pool_interpreted.py"))
