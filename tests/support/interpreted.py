"""Run tests of Triton kernels on a CPU, in a process of their own.

Triton reads TRITON_INTERPRET when it is imported, so the process of the other tests cannot.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

_TESTS = Path(__file__).parents[1]


def triton_version() -> str:
    """Return the version of Triton without importing it, or an empty string if it is missing."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def run_interpreted(path: Path) -> None:
    """Run a test file with Triton's interpreter; fail with its output if one of its tests fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "support.triton_interpreter"]
    paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [*command, str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
