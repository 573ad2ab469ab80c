"""Test the HTML page and the tables of comparisons."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs
from support.browser import Browser, needs_browser
from support.comparisons import cpu_result, gpu_result

import mezzo
from mezzo.comparing import table
from mezzo.comparing.charts import comparison_charts
from mezzo.comparing.comparison import ModeResult
from mezzo.comparing.page import write_comparison
from mezzo.comparing.workload import Documented
from mezzo.reporting.rendering import script_text

HOSTILE = '<script>throw "named"</script><img src=x onerror=alert(1)>&amp;"\'</script>'


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "compare.html"
    stored = [gpu_result(), gpu_result("gpt")]
    return write_comparison([cpu_result(), gpu_result("gpt", "a GPU")], path, stored=stored)


def without_plotly(path):
    return path.read_text().replace(script_text(get_plotlyjs()), "")


def texts(made):
    return [made.columns, *(tuple(cell.text for cell in row) for row in made.rows)]


def hostile_result():
    """A result with tags in every text."""
    first, *_ = gpu_result().modes
    hostile = replace(first, mode=HOSTILE, dtype=HOSTILE, note=HOSTILE)
    return gpu_result(
        HOSTILE,
        HOSTILE,
        title=HOSTILE,
        preset=HOSTILE,
        data=HOSTILE,
        torch=HOSTILE,
        mezzo=HOSTILE,
        emulated=HOSTILE,
        modes=(first, replace(hostile, milliseconds=99.0)),
        documented=(Documented(HOSTILE, 2.0, HOSTILE),),
    )


def test_a_page_has_verdict_charts_and_tables_of_every_workload(page):
    text = without_plotly(page)
    verdicts = re.findall("<h1>(.*?)</h1>", text)
    assert [one.partition(" is ")[0] for one in verdicts] == ["float32", "O2 captured in float16"]
    for number in (1, 2):
        for part in ("modes", "documents", "machines"):
            assert f'<section id="workload-{number}-{part}">' in text
    charts = json.loads(re.search('id="charts">(.*?)</script>', text, re.DOTALL)[1])["figures"]
    assert set(charts) == set(re.findall('class="chart" id="(.*?)"', text))
    assert len(charts) == 12
    assert ">ResNet-50 on images of 32 × 32" in text.partition('id="machines"')[2]


def test_a_page_refers_to_no_other_file_and_no_network(page):
    assert re.findall(r"(?:src|href)=[\"'](?!#)[^\"']*", without_plotly(page)) == []


def test_texts_are_escaped(page, tmp_path):
    tags = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append(tag)

    written = write_comparison([hostile_result()], tmp_path / "x.html", stored=[hostile_result()])
    text = without_plotly(written)
    Tags().feed(text)
    assert tags.count("script") == 3
    assert "img" not in tags
    assert "<" not in re.search('id="charts">(.*?)</script>', text, re.DOTALL)[1]


def test_values_that_are_not_finite_or_missing_leave_valid_json(tmp_path):
    modes = (
        ModeResult("float32", milliseconds=1.0, loss=float("nan"), loss_curve=(1.0, float("nan"))),
        ModeResult("O1", loss=float("inf"), accuracy=None, peak_bytes=0),
    )
    path = write_comparison([gpu_result(modes=modes)], tmp_path / "x.html", stored=[])
    data = re.search('id="charts">(.*?)</script>', path.read_text(), re.DOTALL)[1]
    assert "NaN" not in data
    assert json.loads(data)["figures"]["workload-1-chart-1"]["data"][0]["y"] == [1.0, None]


def test_a_comparison_without_modes_makes_a_page(tmp_path):
    path = write_comparison([gpu_result(modes=(), documented=())], tmp_path / "x.html", stored=[])
    assert "float32 was not measured" in path.read_text()


def test_no_comparison_is_refused_and_writes_nothing(tmp_path):
    with pytest.raises(mezzo.MezzoError, match="no comparison to write"):
        write_comparison([], tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["jinja2", "plotly.offline"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    wanted = rf"write_comparison\(\) needs {name.partition('.')[0]}.*pip install 'mezzo\[report\]'"
    with pytest.raises(mezzo.UnsupportedError, match=wanted):
        write_comparison([gpu_result()], tmp_path / "x.html", stored=[])


# -- tables and charts -----------------------------------------------------------------------------


def test_the_table_of_modes_has_all_numbers_of_the_best_mode():
    made = table.mode_table(gpu_result())
    row = dict(zip(made.columns, (cell.text for cell in made.rows[7]), strict=True))
    assert row == {
        "mode": "O2 captured",
        "dtype": "float16",
        "ms": "9.00",
        "× float32": "4.44",
        "samples/s": "14,222",
        "memory": "1.2 GiB",
        "kept for backward": "512.0 MiB",
        "casts": "90",
        "loss": "0.426",
        "− float32": "+0.014",
        "skipped": "1",
        "accuracy": "92.4%",
        "note": "–",
    }


def test_columns_without_a_value_are_left_out_and_a_forward_pass_has_no_ratio():
    modes = (ModeResult("float32", milliseconds=4.0), ModeResult("converted", milliseconds=1.0))
    assert texts(table.mode_table(gpu_result(modes=modes))) == [
        ("mode", "ms", "× float32"),
        ("float32", "4.00", "1.00"),
        ("converted", "1.00", "–"),
    ]


def test_machines_stand_side_by_side_with_times_and_ratios():
    made = texts(table.machine_table([cpu_result(), gpu_result()]))
    assert made[0] == (
        "ms (× float32)",
        "Intel Xeon, torch 2.13.0, small",
        "NVIDIA H200, torch 2.11.0",
    )
    assert ("torch.amp", "16.0 (0.62)", "14.0 (2.86)") in made
    assert ("O2 captured", "–", "9.00 (4.44)") in made


def test_numbers_of_documents_stand_beside_the_measured_ones():
    assert texts(table.documented_table([cpu_result(), gpu_result()]))[1:] == [
        ("PaddlePaddle, V100", "O1", "4.50", "0.40", "3.08"),
        ("PaddlePaddle, V100", "O2", "5.20", "0.36", "3.64"),
    ]


def test_a_summary_has_the_fastest_mode_of_each_result():
    empty = gpu_result("none", modes=())
    rows = texts(table.summary_table([gpu_result(), cpu_result(), empty]))[1:]
    assert [row[3:] for row in rows] == [
        ("40.0", "O2 captured float16", "9.00", "4.44", "0.62 ×"),
        ("10.0", "float32", "10.0", "1.00", "1.00 ×"),
        ("–", "–", "–", "–", "–"),
    ]


def test_curves_are_over_epochs_if_there_is_an_accuracy_and_else_over_steps():
    charts = comparison_charts(gpu_result())
    assert charts["Loss"]["data"][0]["x"] == [1, 2, 3, 4, 5, 6]
    modes = tuple(replace(one, accuracy_curve=()) for one in gpu_result().modes)
    charts = comparison_charts(gpu_result(modes=modes))
    assert charts["Loss"]["data"][0]["x"] == [10, 20, 30, 40, 50, 60]
    assert "Accuracy" not in charts


# -- in a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Browser(tmp_path_factory.mktemp("chromium"))
    yield one
    one.close()


DRAWN = "document.querySelectorAll('.chart .main-svg').length >= {}"


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_all_charts_without_errors_or_requests(browser, page):
    browser.open(page, 320, dark=True)
    browser.wait(DRAWN.format(24))
    assert browser.evaluate("document.querySelectorAll('#workload-1-chart-0 .point').length") == 6
    assert browser.evaluate("document.documentElement.scrollWidth") <= 320
    font = "document.getElementById('workload-1-chart-0').layout.font.color"
    assert browser.evaluate(font) == "#e6eaf0"
    problems = (
        "[...document.querySelectorAll('.chart')].flatMap("
        "c => (Plotly.validate(c.data, c.layout) || []).filter(p => p.code !== 'unused'))"
    )
    assert browser.evaluate(problems) == []
    assert browser.errors == []


@pytest.mark.slow
@needs_browser
def test_tags_in_names_are_shown_and_not_run(browser, tmp_path):
    path = write_comparison([hostile_result()], tmp_path / "x.html", stored=[hostile_result()])
    browser.errors.clear()
    browser.open(path, 1200)
    browser.wait(DRAWN.format(8))
    assert browser.errors == []
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    labels = "[...document.querySelectorAll('.ytick text')].map(c => c.textContent)"
    assert any("</script>" in label for label in browser.evaluate(labels))
