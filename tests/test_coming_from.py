"""The pages for people who come from another system: what they show runs as it stands, each page in a process of its own."""

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
def test_the_examples_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    assert blocks, "a page shows at least one example"
    program = tmp_path / f"{page.stem}_page.py"
    program.write_text("\n\n".join(blocks))
    # In a folder of its own, for a page may write files; with mezzo found where this test found it.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(mezzo.__file__).parents[1]),
    }
    # Warnings are errors as in every test: what a page shows is not what a user is warned of.
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{page.name}:\n{ran.stdout}\n{ran.stderr}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_page_has_a_table_of_calls_and_says_what_differs(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"^\| ?-+", text, re.MULTILINE), "a table of calls"
    assert "differ" in text, "what differs, and why"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_link_of_a_page_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
