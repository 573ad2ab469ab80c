"""Check docs/op_stats.md: its programs print what it shows."""

from __future__ import annotations

import linecache
import re
import runpy
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "op_stats.md"
PROGRAM = re.compile(
    r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```", re.MULTILINE | re.DOTALL
)


def test_the_programs_of_the_page_print_what_it_shows(tmp_path, capsys) -> None:
    programs = list(PROGRAM.finditer(PAGE.read_text()))
    assert len(programs) == PAGE.read_text().count("```python")
    for program in programs:
        path = tmp_path / "train.py"
        path.write_text(program["code"])
        linecache.checkcache()
        runpy.run_path(str(path))
        assert numbers_rounded(capsys.readouterr().out) == numbers_rounded(program["output"])


def numbers_rounded(text: str) -> str:
    """Round values to two digits: the last ones depend on the CPU."""
    return re.sub(r"-?\d+\.\d+(e[+]\d+)?", lambda found: f"{float(found[0]):.1e}", text)


def test_the_page_names_every_column_of_a_row() -> None:
    from mezzo.observing.op_table import OpRow

    text = PAGE.read_text()
    assert [name for name in OpRow.__annotations__ if f"`{name}`" not in text] == []
