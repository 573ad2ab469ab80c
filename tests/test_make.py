"""The commands of the Makefile."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import tiers

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def commands(*arguments):
    """Return the commands that `make` would run, without the settings of a surrounding make."""
    names = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "TORCH"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        ["make", "-n", "-B", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_tests_run_on_another_torch_in_an_environment_of_its_own():
    printed = commands("test", "TORCH=2.15.0")
    assert set(re.findall(r"\.venv[^/ \n]*", printed)) == {".venv-2.15.0"}
    assert re.search(r"install .*\s.*torch==2\.15\.0 -e '\.\[dev\]'", printed)
    assert "constraints.txt" not in printed
    assert re.search(r"\.venv-2\.15\.0/bin/python -m pytest -n 2$", printed, re.MULTILINE)


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_tests_and_checks_run_on_the_pinned_torch_unless_another_is_named(target):
    printed = commands(target)
    assert set(re.findall(r"\.venv[^/ \n]*", printed)) == {".venv"}
    assert re.search(r"install .*\s.*-c constraints\.txt -e '\.\[dev\]'", printed)
    parts = ("ruff check", "mypy", "lint-imports", "mkdocs build --strict", "pytest -n 2")
    assert all(part in printed for part in parts)


def test_quick_runs_neither_checks_nor_slow_tests():
    printed = commands("quick")
    assert 'pytest -n 2 -m "not gpu and not slow"' in printed
    assert not any(part in printed for part in ("ruff", "mypy", "lint-imports", "mkdocs"))


@pytest.mark.parametrize(("target", "exhaustive"), [("test", ""), ("test-all", "1")])
def test_only_test_all_sets_the_variable_of_exhaustive_tests(target, exhaustive, tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MEZZO_", "MAKE"))
    }
    # A stand-in for the interpreter of the environment, which prints the variable.
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "exhaustive=$MEZZO_EXHAUSTIVE"\n')
    python.chmod(0o755)
    (tmp_path / ".dev").touch()
    printed = subprocess.run(
        ["make", target, f"VENV={tmp_path}", "CHECKS="],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert f"exhaustive={exhaustive}\n" in printed


def test_the_demo_runs_the_overflow_and_then_the_comparison_which_names_its_report():
    *_, overflow, comparison = commands("demo").splitlines()
    assert overflow.endswith("python examples/overflow.py")
    assert comparison.endswith("python -m mezzo.comparing.demo")


def test_bytecode_is_written_even_where_the_shell_turns_it_off():
    assert "PYTHONDONTWRITEBYTECODE= " in commands("quick")


@pytest.mark.parametrize(
    ("path", "slow"),
    [
        ("tests/test_release.py", True),  # marked as a whole
        ("tests/gpu/test_convert.py", True),
        ("src/mezzo/integrations/lightning.py", True),
        ("tests/test_make.py", False),
        ("src/mezzo/prepare/decorate.py", False),
    ],
)
def test_quick_imports_no_file_whose_tests_are_all_slow(path, slow):
    quick, full = (
        SimpleNamespace(option=SimpleNamespace(markexpr=expression))
        for expression in ("not gpu and not slow", "not gpu")
    )
    found = tiers.pytest_ignore_collect(ROOT / path, quick)
    assert bool(found) == slow
    assert not tiers.pytest_ignore_collect(ROOT / path, full)
