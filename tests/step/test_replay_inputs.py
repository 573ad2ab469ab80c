"""Letters to captured programs."""

from __future__ import annotations

from pathlib import Path

from support.interpreted import needs_triton, run_interpreted


@needs_triton
def test_the_kernels_do_in_tritons_interpreter_what_they_should() -> None:
    run_interpreted(Path(__file__).with_name("replay_inputs_interpreted.py"))
