"""Check docs/scale.md: its programs print what it shows, and its tables are up to date."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scale.md"
PROGRAM = re.compile(
    r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```", re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def scale_page():
    path = ROOT / "benchmarks" / "scale_page.py"
    spec = importlib.util.spec_from_file_location("scale_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_programs_of_the_page_print_what_it_shows(tmp_path, capsys):
    text = PAGE.read_text()
    programs = list(PROGRAM.finditer(text))
    assert len(programs) == text.count("```python")
    for program in programs:
        path = tmp_path / "program.py"
        path.write_text(program["code"])
        runpy.run_path(str(path))
        assert capsys.readouterr().out == program["output"]


@pytest.mark.parametrize("name", ["1B", "8B", pytest.param("70B", marks=pytest.mark.slow)])
def test_the_tables_of_the_page_are_those_that_are_computed(scale_page, name):
    assert scale_page.section(name) in PAGE.read_text()


def test_the_models_have_the_published_numbers_of_parameters(scale_page):
    numbers = {
        name: sum(parameter.numel() for parameter in scale_page.llama(shape).parameters())
        for name, shape in scale_page.LLAMAS.items()
    }
    assert numbers == {"1B": 1_235_814_400, "8B": 8_030_261_248, "70B": 70_553_706_496}


def test_every_link_of_the_page_exists():
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert targets
    for target in targets:
        assert (PAGE.parent / target).exists(), target
