"""What `make` would run."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def commands(*words):
    # Without what a make around these tests was told.
    told = {
        name: value
        for name, value in os.environ.items()
        if name not in {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "TORCH"}
    }
    return subprocess.run(
        ["make", "-n", "-B", *words], cwd=ROOT, env=told, check=True, capture_output=True, text=True
    ).stdout


def test_tests_run_on_another_torch_in_an_environment_of_its_own():
    said = commands("test", "TORCH=2.15.0")
    assert set(re.findall(r"\.venv[^/ \n]*", said)) == {".venv-2.15.0"}
    assert re.search(r"install .*torch==2\.15\.0 -e '\.\[dev\]'", said)
    assert "constraints.txt" not in said
    assert re.search(r"\.venv-2\.15\.0/bin/python -m pytest -n 2$", said, re.MULTILINE)


def test_tests_run_on_the_pinned_torch_unless_another_is_named():
    said = commands("test")
    assert set(re.findall(r"\.venv[^/ \n]*", said)) == {".venv"}
    assert re.search(r"install .*-c constraints\.txt -e '\.\[dev\]'", said)
    assert all(word in said for word in ("ruff check", "mypy", "lint-imports", "pytest -n 2"))
