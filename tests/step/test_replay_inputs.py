"""Inputs that captured graphs read by pointer."""

from __future__ import annotations

from pathlib import Path

from support.interpreted import needs_triton, run_interpreted


@needs_triton
def test_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("replay_inputs_interpreted.py"))
