"""Check docs/scale.md: its tables are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scale.md"


@pytest.fixture(scope="module")
def scale_page():
    path = ROOT / "benchmarks" / "scale_page.py"
    spec = importlib.util.spec_from_file_location("scale_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["1B", "8B", pytest.param("70B", marks=pytest.mark.slow)])
def test_the_tables_of_the_page_are_those_that_are_computed(scale_page, name):
    assert scale_page.section(name) in PAGE.read_text()


def test_the_models_have_the_published_numbers_of_parameters(scale_page):
    numbers = {
        name: sum(parameter.numel() for parameter in scale_page.llama(shape).parameters())
        for name, shape in scale_page.LLAMAS.items()
    }
    assert numbers == {"1B": 1_235_814_400, "8B": 8_030_261_248, "70B": 70_553_706_496}
