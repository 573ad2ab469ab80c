"""Run the examples of docs/coming-from/*.md, each page in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mezzo

PAGES = Path(__file__).parent.parent / "docs" / "coming-from"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return sorted(PAGES.glob("*.md"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    assert blocks, "a page needs at least one example"
    program = tmp_path / f"{page.stem}_page.py"
    program.write_text("\n\n".join(blocks))
    # In a folder of its own, since a page may write files; with the mezzo that this test imports.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(mezzo.__file__).parents[1]),
    }
    # Warnings are errors as in every test: examples must not warn, except about a slow CPU.
    warnings = ["-W", "error", "-W", "ignore:AMP is slow on:UserWarning"]
    result = subprocess.run(
        [sys.executable, *warnings, str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{page.name}:\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_page_has_a_table_of_calls_and_lists_differences(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"^\| ?-+", text, re.MULTILINE), "a table of calls"
    assert "differ" in text, "a section on differences"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_link_of_a_page_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
