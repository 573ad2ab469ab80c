"""Max pooling of channels_last images."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreted import needs_triton, run_interpreted, triton_version


@needs_triton
@pytest.mark.skipif(
    triton_version().startswith("3.9."),
    reason="Triton 3.9's interpreter does not support masks made of a block and a scalar",
)
def test_the_kernels_in_tritons_interpreter():
    run_interpreted(Path(__file__).with_name("pool_interpreted.py"))
