"""What every page of docs/coming-from/ has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent / "docs" / "coming-from"


def pages() -> list[Path]:
    return sorted(PAGES.glob("*.md"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_page_has_a_table_of_calls_and_lists_differences(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"^\| ?-+", text, re.MULTILINE), "a table of calls"
    assert "differ" in text, "a section on differences"
