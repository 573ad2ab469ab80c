"""Check docs/integrations.md: its programs print what it shows."""

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
PROGRAM = re.compile(
    r"^## (?P<title>[\w ]+)$[^#]*?^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = {match["title"]: match for match in PROGRAM.finditer(PAGE.read_text())}


def test_every_program_of_the_page_is_run():
    assert len(PROGRAMS) == PAGE.read_text().count("```python") == 6


@pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning")
@pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning")
@pytest.mark.parametrize("title", PROGRAMS)
def test_the_programs_of_the_page_print_what_it_shows(title, tmp_path, capsys):
    state = pytest.importorskip("accelerate.state")
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("transformers")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[title]["code"])
    runpy.run_path(str(path))
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
    assert capsys.readouterr().out == PROGRAMS[title]["output"]
