"""The report of a run as an HTML page, in text and in a browser."""

import json
import re
import sys
import time
from html.parser import HTMLParser

import pytest
import torch
from plotly.offline import get_plotlyjs
from support import synthetic_logs as logs
from support.browser import Browser, needs_browser
from torch import nn

import mezzo
from mezzo.reporting import charts, page
from mezzo.reporting.rendering import script_text
from mezzo.reporting.run_data import read_run

HOSTILE = '<script>throw "named"</script><img src=x onerror=alert(1)>&amp;"\'</script>'


@pytest.fixture(scope="module")
def full_log():
    lines = logs.training_run(600)
    lines.insert(3, logs.event("StepCaptured", 3, shapes="[8, 1024]", seconds=0.4))
    return [*lines[:-1], logs.finding(), logs.lint(), lines[-1]]


@pytest.fixture(scope="module")
def report(full_log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return mezzo.write_report(logs.write(folder / "run.jsonl", full_log), folder / "report.html")


class Tags(HTMLParser):
    """Counts tags, and collects the names of attributes."""

    def __init__(self, text):
        super().__init__()
        self.counts, self.attributes = {}, set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}


def hostile_log():
    """A log with tags in every text."""
    lines = logs.training_run(60, blocks=1, model=HOSTILE, policy=HOSTILE, dtype=HOSTILE)
    text = json.dumps(lines).replace("lm_head.weight", json.dumps(HOSTILE)[1:-1])
    return [
        *json.loads(text)[:-1],
        logs.finding(step=1, module=HOSTILE, reason=HOSTILE, cure=HOSTILE),
        logs.lint(what=HOSTILE, where=HOSTILE),
        logs.event(HOSTILE, 2, field=HOSTILE),
        {"kind": "end", "step": None, "time": 1.0, "reason": HOSTILE},
    ]


def without_plotly(path):
    return path.read_text().replace(script_text(get_plotlyjs()), "")


def chart_data(text):
    return re.search('id="charts">(.*?)</script>', text, re.DOTALL).group(1)


def test_a_page_begins_with_the_verdict_and_has_all_sections(report):
    text = report.read_text()
    verdict = re.search("<h1>(.*?)</h1>", text).group(1)
    assert verdict.startswith("The op mul in transformer.h.2.attn (model.py:61) left the range")
    for key in ("policy", "timeline", "heat", "skips", "layers", "ops", "casts", "lint", "events"):
        assert f'<section id="{key}">' in text
    assert "+ Policy(&#39;O1&#39;, dtype=&#39;float16&#39;, full={&#39;mul&#39;})" in text
    assert "the scale had grown to" in text


def test_a_page_refers_to_no_other_file_and_no_network(report):
    text = without_plotly(report)
    assert re.findall(r"(?:src|href)=[\"'](?!#)[^\"']*", text) == []
    assert "default-src 'none'" in text


def test_texts_of_a_log_are_escaped(tmp_path, report):
    log = logs.write(tmp_path / "run.jsonl", hostile_log())
    text = without_plotly(mezzo.write_report(log, tmp_path / "report.html"))
    found = Tags(text)
    assert found.counts["script"] == Tags(without_plotly(report)).counts["script"] == 3
    assert "img" not in found.counts
    assert "onerror" not in found.attributes
    assert "<" not in chart_data(text)


def test_values_that_are_not_finite_leave_valid_json(tmp_path):
    lines = logs.training_run(30, blocks=1)
    lines[3]["loss"], lines[4]["loss"], lines[5]["scale"] = float("nan"), float("inf"), None
    data = chart_data(page.render(read_run(logs.write(tmp_path / "run.jsonl", lines))))
    assert "NaN" not in data
    assert "Infinity" not in data
    json.loads(data)


def test_a_log_of_nothing_but_its_header_makes_a_page(tmp_path):
    log = logs.write(tmp_path / "run.jsonl", [logs.header()])
    path = mezzo.write_report(log, tmp_path / "report.html")
    assert "No training step was recorded." in path.read_text()


def test_fields_of_wrong_types_do_not_prevent_a_page(tmp_path):
    lines = [
        logs.header(rank=None, ranks="two", started="then"),
        {"kind": "step", "step": 1e400, "loss": 1.0, "scale": -1.0, "time": 1e400},
        {"kind": "step", "step": "one", "loss": "low", "scale": [], "skipped": "no"},
        {"kind": "step", "step": 2, "loss": 1, "scale": True, "skipped": True, "parameter": 7},
        {"kind": "gradients", "step": 2, "layers": {"a": [1], "b": None, "c": [0, 1, "x"]}},
        {"kind": "gradients", "step": 2, "layers": [1]},
        {"kind": "tensors", "step": 2, "which": "gradients", "stats": {"a": 3, "b": {}}},
        {"kind": "ops", "rows": [1, {"op": None}]},
        {"kind": "lint", "findings": [4]},
        {"kind": "event", "fields": 5},
        {"kind": "event", "name": "ScaleCollapsed", "fields": [], "step": "x"},
        {"kind": "finding"},
        {"kind": "of the future", "step": 3},
        {"kind": "end"},
    ]
    path = mezzo.write_report(logs.write(tmp_path / "run.jsonl", lines), tmp_path / "report.html")
    assert path.stat().st_size > 1_000_000


@pytest.mark.slow
def test_a_10_000_step_log_makes_a_page_of_6_mb_in_10_s(tmp_path):
    log = logs.write(tmp_path / "run.jsonl", logs.training_run(10_000, blocks=12))
    began = time.perf_counter()
    path = mezzo.write_report(log, tmp_path / "report.html")
    assert time.perf_counter() - began < 10
    assert path.stat().st_size <= 6_000_000


def test_a_live_run_makes_a_page(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = mezzo.GradScaler("cpu")
    with mezzo.observe(model, optimizer, scaler) as run:
        for size in (1.0, 1.0, torch.inf):
            scaler.scale(model(torch.full((8, 4), size)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        text = mezzo.write_report(run, tmp_path / "report.html").read_text()
    assert '<section id="layers">' in text
    skips = re.search('<section id="skips">(.*?)</section>', text, re.DOTALL).group(1)
    assert ">weight</td>" in skips


@pytest.mark.parametrize("several", [True, False])
def test_findings_that_are_passed_are_in_the_page(tmp_path, several):
    model = nn.Linear(8, 8).half()
    optimizer = torch.optim.AdamW(model.parameters())

    class Traced:
        def to_dict(self):
            return logs.finding(op="cumsum", cure="full={'cumsum'}")

    path = mezzo.write_report(
        logs.write(tmp_path / "run.jsonl", logs.training_run(5, blocks=1)),
        tmp_path / "report.html",
        lint=mezzo.lint(model, optimizer),
        findings=[Traced()] if several else Traced(),
    )
    text = path.read_text()
    assert "float16-without-scaler" in text
    assert "The op cumsum in transformer.h.2.attn" in text


def test_ranks_are_named_and_merged(tmp_path):
    for rank in range(2):
        lines = logs.training_run(80, blocks=1, seed=rank, rank=rank, ranks=3)
        logs.write(tmp_path / f"run.rank{rank}.jsonl", lines)
    run = read_run(tmp_path / "run.jsonl")
    assert [one.rank for one in run.ranks] == [0, 1]
    assert "There is no log of rank 2, of 3 ranks." in page.render(run)
    assert {"rank 0", "rank 1"} <= {trace["name"] for trace in charts.timeline(run)["data"]}


def test_what_is_no_log_is_refused_and_writes_nothing(tmp_path):
    with pytest.raises(mezzo.MezzoError, match=r"There is no log .*missing\.jsonl.*rank0"):
        mezzo.write_report(tmp_path / "missing.jsonl", tmp_path / "report.html")
    with pytest.raises(mezzo.MezzoError, match="not from 'Linear'"):
        mezzo.write_report(nn.Linear(1, 1), tmp_path / "report.html")
    with pytest.raises(mezzo.MezzoError, match="empty list"):
        mezzo.write_report([], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    log = logs.write(tmp_path / "run.jsonl", [logs.header()])
    with pytest.raises(mezzo.UnsupportedError, match=r"pip install 'mezzo\[report\]'"):
        mezzo.write_report(log, tmp_path / "report.html")


def test_long_lines_keep_their_extremes():
    points = [(step, float(step % 97)) for step in range(30_000)]
    points[12_345] = (12_345, 1e6)
    kept = charts.thinned(points, 1000)
    assert len(kept) <= 1000
    assert (12_345, 1e6) in kept
    assert kept == sorted(kept)


# -- in a browser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Browser(tmp_path_factory.mktemp("chromium"))
    yield one
    one.close()


DRAWN = "document.querySelectorAll('.chart .main-svg').length >= 4"
"""Plotly draws several images for each chart."""


@pytest.fixture(scope="module")
def opened(browser, report):
    """The page on a wide screen; it is opened once, for that takes two seconds."""
    browser.open(report, 1200)
    browser.wait(DRAWN)
    return browser


def test_columns_and_rows_of_a_heat_map_are_not_placed_as_numbers(tmp_path):
    run = read_run(logs.write(tmp_path / "run.jsonl", logs.training_run(60, blocks=1)))
    for figure in charts.layer_maps(run):
        axes = figure["layout"]["xaxis"], figure["layout"]["yaxis"]
        assert [axis["type"] for axis in axes] == ["category", "category"]


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_the_charts_without_errors_or_requests(opened):
    browser = opened
    assert browser.evaluate("document.querySelectorAll('#chart-timeline path.js-line').length") >= 3
    assert browser.evaluate("document.querySelectorAll('#chart-timeline path.point').length") >= 1
    assert browser.evaluate("document.querySelectorAll('#chart-heat .hm image').length") == 1
    for chart in ("timeline", "heat"):
        found = f"document.getElementById('chart-{chart}')"
        problems = f"(Plotly.validate({found}.data, {found}.layout) || [])"
        assert browser.evaluate(f"{problems}.filter(p => p.code !== 'unused')") == []
    assert browser.errors == []


@pytest.mark.slow
@needs_browser
def test_tables_can_be_filtered_and_sorted(opened):
    browser = opened
    shown = "[...document.querySelectorAll('#table-layers tbody tr')].filter(r => !r.hidden)"
    total = browser.evaluate(f"{shown}.length")
    browser.evaluate(
        "(input => { input.value = 'H.1 ATTN'; input.dispatchEvent(new Event('input')); })"
        "(document.querySelector('[data-table=table-layers]'))"
    )
    assert browser.evaluate(f"{shown}.map(r => r.cells[0].textContent)") == [
        "transformer.h.1.attn.c_attn.weight",
        "transformer.h.1.attn.c_proj.weight",
    ]
    count = "document.querySelector('[data-count=table-layers]').textContent"
    assert browser.evaluate(count) == f"2 of {total} rows"
    browser.evaluate("document.querySelectorAll('#table-skips th button')[0].click()")
    rows = "[...document.querySelectorAll('#table-skips tbody tr')]"
    steps = browser.evaluate(f"{rows}.map(r => Number(r.cells[0].dataset.order))")
    assert len(steps) > 1
    assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
@needs_browser
def test_a_chart_can_be_zoomed_and_another_heat_map_chosen(opened):
    browser = opened
    zoom = "Plotly.relayout('chart-timeline', {'xaxis.range': [100, 200]})"
    browser.evaluate(f"{zoom}.then(() => null)")
    ranges = "document.getElementById('chart-timeline').layout.xaxis.range"
    assert browser.evaluate(ranges) == [100, 200]
    browser.evaluate(
        "(select => { select.value = 2; select.dispatchEvent(new Event('change')); })"
        "(document.getElementById('heat-choice'))"
    )
    note = browser.evaluate("document.getElementById('heat-note').textContent")
    assert note.startswith("Bits before an overflow")


@pytest.mark.slow
@needs_browser
def test_nothing_is_wider_than_a_phone(browser, report):
    browser.open(report, 320)
    browser.wait(DRAWN)
    assert browser.evaluate("window.innerWidth") == 320
    assert browser.evaluate("document.documentElement.scrollWidth") <= 320
    rights = "[...document.querySelectorAll('section')].map(s => s.getBoundingClientRect().right)"
    assert max(browser.evaluate(rights)) <= 320


@pytest.mark.slow
@needs_browser
def test_colors_follow_the_system_and_the_toggle(browser, report):
    background = "getComputedStyle(document.body).backgroundColor"
    font = "document.getElementById('chart-timeline').layout.font.color"
    browser.open(report, 1200, dark=True)
    browser.wait(DRAWN)
    assert browser.evaluate(background) == "rgb(18, 22, 28)"
    assert browser.evaluate(font) == "#e6eaf0"
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(background) == "rgb(246, 247, 249)"
    assert browser.evaluate(font) == "#1c2430"


@pytest.mark.slow
@needs_browser
def test_tags_in_names_are_shown_and_not_run(browser, tmp_path):
    log = logs.write(tmp_path / "run.jsonl", hostile_log())
    browser.errors.clear()
    browser.open(mezzo.write_report(log, tmp_path / "report.html"), 1200)
    browser.wait(DRAWN)
    assert browser.errors == []
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    names = "[...document.querySelectorAll('#table-layers td:first-child')].map(c => c.textContent)"
    assert HOSTILE in browser.evaluate(names)
    labels = "[...document.querySelectorAll('#chart-heat .ytick text')].map(c => c.textContent)"
    assert any("</script>" in label for label in browser.evaluate(labels))
