"""Check docs/compare.md: its tables are those of the stored results, options and links exist."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import typer
from support.comparisons import cpu_result, gpu_result

from mezzo.cli.app import app
from mezzo.comparing.comparison import ModeResult
from mezzo.comparing.modes import Mode

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compare.md"
TEXT = PAGE.read_text()


@pytest.fixture(scope="module")
def compare_page():
    folder = str(ROOT / "benchmarks")
    sys.path.append(folder)
    import compare_page

    yield compare_page
    sys.path.remove(folder)


@pytest.fixture
def written(compare_page, tmp_path):
    """Return a function that writes the page with results, and returns its generated part."""

    def write(*results):
        folder, docs = tmp_path / "results", tmp_path / "docs"
        folder.mkdir()
        docs.mkdir()
        (docs / "compare.md").write_text(TEXT)
        for number, result in enumerate(results):
            (folder / f"compare-{number}.json").write_text(json.dumps(result.to_json()))
        compare_page.main(folder, docs)
        return (docs / "compare.md").read_text().partition("<!-- benchmarks: compare -->")[2]

    return write


def test_the_tables_match_the_stored_results(compare_page, tmp_path, capsys):
    (tmp_path / "compare.md").write_text(TEXT)
    compare_page.main(compare_page.RESULTS, tmp_path)
    assert (tmp_path / "compare.md").read_text() == TEXT
    for image in (tmp_path / "images").iterdir():
        assert image.read_text() == (PAGE.parent / "images" / image.name).read_text()


def test_without_results_the_numbers_of_documents_are_shown(written):
    text = written()
    for line in (
        "| `linears` | O1 | 4.5 (PaddlePaddle, V100) |",
        "| `linears` | O2 | 5.2 (PaddlePaddle, V100) |",
        "| `linears` | O2 captured | 5.4 (PaddlePaddle, V100, static program) |",
    ):
        assert line in text
    for number in ("| 2 (MegEngine", "| 3 (MegEngine", "| 1.6 (MXNet", "| 8 (NVIDIA"):
        assert number in text
    assert "No machine has stored results yet." in text


def test_machines_stand_beside_each_other_and_beside_the_documents(written):
    text = written(cpu_result("linears"), gpu_result("linears"))
    assert "| `linears` | O1 | 4.5 (PaddlePaddle, V100) | 0.40 (small) | 3.08 |" in text
    assert (
        "| ms (× float32) | Intel Xeon, torch 2.13.0, small | NVIDIA H200, torch 2.11.0 |" in text
    )
    assert "| torch.amp | 16.0 (0.62) | 14.0 (2.86) |" in text
    assert "- converted: a forward pass" in text
    assert "O2 captured in float16 is the fastest mode that trains as well as float32" in text
    assert "No machine" not in text


def test_a_machine_without_a_documented_workload_has_no_column_beside_the_documents(written):
    text = written(cpu_result("cifar", documented=()), gpu_result("linears"))
    assert "| workload | mode | document: × float32 | NVIDIA H200 |" in text
    assert "Intel Xeon, torch" in text


def test_curves_of_every_mode_are_an_image_that_the_page_refers_to(written, tmp_path):
    text = written(gpu_result(), cpu_result())
    names = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert names == [
        "images/compare-cifar-nvidia-h200.svg",
        "images/compare-cifar-intel-xeon-small.svg",
    ]
    drawn = ET.parse(tmp_path / "docs" / names[0]).getroot()
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * 8
    assert len(lines[0].get("points").split()) == 6


def test_curves_with_values_that_are_not_finite_leave_them_out(compare_page):
    mode = ModeResult("O1", loss_curve=(1.0, float("nan")), accuracy_curve=(0.5, 0.5))
    drawn = ET.fromstring(compare_page.plot(gpu_result(modes=(mode,))))
    points = [one.get("points").split() for one in drawn.iter() if one.tag.endswith("polyline")]
    assert [len(one) for one in points] == [2, 1]


def test_texts_of_a_result_cannot_break_a_table(written):
    hostile = "a | b\n<script>"
    text = written(gpu_result("mine", hostile, title=hostile, documented=()))
    assert "<script>" not in text
    assert "**a \\| b &lt;script>**" in text


def test_the_page_describes_every_mode_and_only_options_that_exist():
    assert all(f"`{mode}`" in TEXT for mode in Mode)
    command = typer.main.get_command(app).commands["compare"]
    known = {option for part in command.params for option in part.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) <= known


def test_every_link_of_the_page_exists():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert targets
    assert [one for one in targets if not (PAGE.parent / one).exists()] == []
