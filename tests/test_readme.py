"""Check the README: its session runs as shown, its tables match stored results, links exist."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mezzo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_session_in_the_readme_runs_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = "\n".join(
        line for line in README.splitlines() if line.startswith((">>>", "softmax runs"))
    )
    test = doctest.DocTestParser().get_doctest(
        session.replace(
            '>>> mezzo.autocast("policy.toml")',
            '>>> _ = mezzo.autocast("policy.toml", device_type="cpu")',
        ),
        {"torch": torch, "mezzo": mezzo},
        "README",
        None,
        0,
    )
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_every_link_of_the_readme_exists() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_tables_match_the_stored_results(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks"
    copy.mkdir()
    for name in ("tables.py", "measure.py"):
        (copy / name).write_text((ROOT / "benchmarks" / name).read_text())
    (copy / "results").symlink_to(ROOT / "benchmarks" / "results")
    (tmp_path / "README.md").write_text(README)
    subprocess.run([sys.executable, str(copy / "tables.py")], check=True, capture_output=True)
    assert (tmp_path / "README.md").read_text() == README


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_every_stored_result_names_its_machine(path: Path) -> None:
    assert json.loads(path.read_text())["machine"]
