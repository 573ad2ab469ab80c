"""Check docs/trace.md: its programs print what it shows."""

import linecache
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trace.md").read_text()
PROGRAM = re.compile(
    r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = {match["name"]: match for match in PROGRAM.finditer(PAGE)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_page_prints_what_it_shows(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(f"# {name}\n{PROGRAMS[name]['code']}")
    linecache.checkcache()
    runpy.run_path(str(path))
    assert without_numbers(capsys.readouterr().out) == without_numbers(PROGRAMS[name]["output"])


def without_numbers(text):
    """Leave out digits, of which kernels of another machine may give others."""
    return re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "#", text)


def test_every_program_has_its_output():
    assert len(PROGRAMS) == PAGE.count("```python")
