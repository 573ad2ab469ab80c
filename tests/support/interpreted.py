"""Tests of Triton kernels on a CPU: whether Triton interprets is settled when it is imported, so that a process of its own has to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def triton_version() -> str:
    """The version of Triton, which is not imported for it; empty where there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def run_interpreted(path: Path) -> None:
    """Run a file of tests with the interpreter; what fails there fails here, with its output."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(path),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
