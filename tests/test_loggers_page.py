"""The programs of docs/loggers.md run, and print what the page shows."""

import csv

from support.pages import DOCS, run_page

import mezzo

PAGE = DOCS / "loggers.md"


class Metrics:
    """Has the methods of a logger of Lightning that the page calls."""

    def __init__(self):
        self.metrics, self.saved = {}, False

    def log_metrics(self, metrics, step):
        self.metrics.setdefault(step, {}).update(metrics)

    def save(self):
        self.saved = True


def test_the_programs_of_the_page_run_and_print_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page(PAGE, tmp_path)
    assert list((tmp_path / "board").iterdir())
    with (tmp_path / "later.csv").open(newline="") as file:
        assert "verdict" in {row["name"] for row in csv.DictReader(file)}
    lightning = Metrics()
    mezzo.write_log(tmp_path / "run.jsonl", names["LightningLogger"](lightning))
    assert lightning.saved
    assert {"step/loss", "step/rate", "step/skipped"} <= set(lightning.metrics[200])


def test_the_page_names_what_is_logged():
    text = PAGE.read_text()
    for name in ("step/loss", "step/rate", "gradient underflow/", "headroom of ", "exponents of "):
        assert f"`{name}" in text
