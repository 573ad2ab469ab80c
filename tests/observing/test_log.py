"""The log of a run: what is written, how it is bounded, and how damage is read."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo import _events
from mezzo.observing.log import LogWriter, log_path, read_log
from mezzo.observing.records import GradientsRecord, RunStarted, StepRecord, TensorsRecord
from mezzo.scaling.gradient_counts import Counts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write_run(path, *, calls=3, bad=(), **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O2", dtype="float16")
    with mezzo.observe(step, log=path, **options) as run:
        for number in range(1, calls + 1):
            x = torch.ones(8, 4) * (torch.inf if number in bad else 1.0)
            step(x, torch.zeros(8, 2))
    return run


def kinds(path):
    return [line["kind"] for line in read_log(path)]


def test_a_log_has_a_header_steps_samples_counts_and_an_end(path):
    write_run(path, bad=(2,), every=3)
    lines = read_log(path)
    header = lines[0]
    assert (header["version"], header["model"], header["policy"]) == (1, "Linear", "O2")
    assert (header["dtype"], header["device"], header["rank"], header["ranks"]) == (
        "float16",
        "cpu",
        0,
        1,
    )
    steps = [line for line in lines if line["kind"] == "step"]
    assert [(line["step"], line["skipped"], line["parameter"]) for line in steps] == [
        (1, False, None),
        (2, True, "weight"),
        (3, False, None),
    ]
    (gradients,) = [line for line in lines if line["kind"] == "gradients"]
    assert gradients["layers"]["weight"] == [8, 0, 24]
    assert gradients["zeros"] == {"weight": 0, "bias": 0}
    which = [line["which"] for line in lines if line["kind"] == "tensors"]
    assert which == ["parameters", "activations", "gradients", "updates"]
    assert (lines[-1]["kind"], lines[-1]["reason"]) == ("end", "stopped")
    assert all("time" in line and "step" in line for line in lines)


def test_a_log_is_read_while_the_run_goes_on(path):
    model = nn.Linear(2, 1)
    with mezzo.observe(model, log=path, numerics=False):
        for _ in range(3):
            model(torch.ones(1, 2))
        # The third pass ends with the next one.
        assert kinds(path) == ["run", "step", "step"]


def test_events_of_mezzo_are_logged_and_equal_ones_once(path):
    with mezzo.observe(nn.Linear(2, 1), log=path) as run:
        for _ in range(3):
            _events.emit(_events.StepNotCaptured("a reason"))
    _events.emit(_events.StepNotCaptured("another reason"))
    (line,) = [line for line in read_log(path) if line["kind"] == "event"]
    assert (line["name"], line["fields"]) == ("StepNotCaptured", {"reason": "a reason"})
    assert [event.name for event in run.events] == ["StepNotCaptured"]


def test_the_exception_that_ended_a_run_is_in_its_log(path):
    with pytest.raises(KeyError), mezzo.observe(nn.Linear(2, 1), log=path):
        raise KeyError("lost")
    assert read_log(path)[-1]["reason"] == "KeyError: 'lost'"


def test_gradients_of_a_record_are_those_since_the_last_one(path):
    write_run(path, calls=5, every=2)
    totals = [line["layers"]["bias"][2] for line in read_log(path) if line["kind"] == "gradients"]
    assert totals == [4, 4, 2]


@pytest.mark.parametrize("name", ["run.jsonl", "run.rank1.jsonl"])
def test_each_rank_writes_its_own_file(tmp_path, name, monkeypatch):
    ranks = 2 if "rank" in name else 1
    monkeypatch.setattr("mezzo.observing.run.ranks", lambda: (ranks - 1, ranks))
    run = mezzo.observe(nn.Linear(2, 1), log=tmp_path / "run.jsonl")
    run.stop()
    assert run.log == tmp_path / name
    header = read_log(run.log)[0]
    assert (header["rank"], header["ranks"]) == (ranks - 1, ranks)


def test_paths_may_be_strings(tmp_path):
    assert log_path(os.fspath(tmp_path / "a.jsonl"), 0, 1) == tmp_path / "a.jsonl"


# -- writing that fails ----------------------------------------------------------------------------


class FullDisk:
    """Stands in for a file, with room for some more lines only."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, text):
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.file.write(text)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_training_goes_on_with_one_warning_when_the_disk_is_full(path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O2", dtype="float16")
    run = mezzo.observe(step, log=path)
    run._writers[0]._file = FullDisk(run._writers[0]._file, room=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            step(torch.ones(8, 4), torch.zeros(8, 2))
        run.stop()
    (warning,) = caught
    assert "run.jsonl: No space left on device. The log ends here" in str(warning.message)
    assert len(run.steps) == 5
    assert len(read_log(path)) == 3


def test_a_log_that_cannot_be_begun_raises_and_nothing_is_attached():
    model = nn.Linear(4, 2)
    with pytest.raises(OSError, match="No space left"):
        mezzo.observe(model, log="/dev/full")
    assert not model._forward_pre_hooks


def test_a_second_run_of_a_file_ends_the_log_of_the_first(path):
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    with mezzo.observe(first, log=path) as older:
        first(torch.ones(8, 4))
        with pytest.warns(UserWarning, match="The log of the run before ends here"):
            newer = mezzo.observe(second, log=path)
        first(torch.ones(8, 4))
        second(torch.ones(8, 4))
    second(torch.ones(8, 4))
    newer.stop()
    assert len(older.steps) == 2
    assert steps_of(path) == [1, 2]
    assert kinds(path)[-1] == "end"


def test_a_run_of_another_process_in_the_same_file_ends_the_log_of_the_first(path):
    other = (
        "import mezzo, torch; model = torch.nn.Linear(2, 1)\n"
        f"with mezzo.observe(model, log={str(path)!r}): model(torch.ones(1, 2))"
    )
    model = nn.Linear(2, 1)
    with mezzo.observe(model, log=path, numerics=False):
        model(torch.ones(1, 2))
        subprocess.run([sys.executable, "-c", other], check=True)
        written = path.read_bytes()
        with pytest.warns(UserWarning, match="was removed or written anew") as caught:
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert len(caught) == 1
    assert path.read_bytes() == written
    assert kinds(path)[0] == "run"


def test_a_log_in_the_place_of_another_keeps_a_link_to_it(tmp_path):
    target, link = tmp_path / "target.jsonl", tmp_path / "run.jsonl"
    target.write_text("old")
    link.symlink_to(target)
    mezzo.observe(nn.Linear(2, 1), log=link).stop()
    assert link.is_symlink()
    assert kinds(target) == ["run", "end"]


def test_a_file_may_be_written_again_after_the_run(path):
    write_run(path)
    write_run(path, calls=2)
    assert steps_of(path) == [1, 2]


def steps_of(path):
    return [line["step"] for line in read_log(path) if line["kind"] == "step"]


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.rstrip(b"\n"),
        lambda text: text + b"\x00\xff\n",
        lambda text: text + b'{"no kind": 1}\n{"kind": "step"}\n',
        lambda text: text + b"[1, 2]\n",
        lambda text: text + b'{"kind": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    ],
)
def test_a_damaged_log_is_read_up_to_the_damage_with_one_warning(path, damage):
    write_run(path)
    whole, text = read_log(path), path.read_bytes()
    path.write_bytes(damage(text))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = read_log(path)
    assert lines in (whole, whole[:-1])
    (warning,) = caught
    assert f"at line {len(lines) + 1}: the {len(lines)} records before" in str(warning.message)
    assert warning.filename == __file__


def test_unknown_kinds_and_fields_are_returned(path):
    path.write_text('{"kind": "run", "version": 1, "new": 1}\n{"kind": "newer", "step": 1}\n')
    assert [line["kind"] for line in read_log(path)] == ["run", "newer"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no complete first line"),
        ("import torch\n", "no complete first line"),
        ('{"kind": "step"}\n', "begins with a record of kind 'step'"),
        ('{"kind": "run", "version": 2}\n', "version 2 .* reads up to 1. Update mezzo"),
        ('{"kind": "run"}\n', "version None"),
    ],
)
def test_what_is_no_log_is_refused(path, text, message):
    path.write_text(text)
    with pytest.raises(mezzo.MezzoError, match=message):
        read_log(path)


def test_a_folder_is_refused_with_the_logs_in_it(tmp_path):
    with pytest.raises(
        mezzo.MezzoError, match=r"is a folder, not a log\. It holds no \.jsonl file"
    ):
        read_log(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "page.html"):
        (tmp_path / name).touch()
    with pytest.raises(mezzo.MezzoError, match=r"It holds 'a\.jsonl', 'b\.jsonl'\. Pass the path"):
        mezzo.compare_runs(tmp_path, tmp_path)


# -- size ------------------------------------------------------------------------------------------


def steps_logged(path):
    return [line["step"] for line in map(json.loads, path.read_text().splitlines())]


def test_steps_become_rarer_and_skips_are_always_written(path):
    writer = LogWriter(path, 2**30)
    skipped = {1003, 9_999, 25_001}
    for step in range(1, 30_001):
        writer.write([StepRecord(step=step, skipped=step in skipped)])
    writer.close()
    logged = steps_logged(path)
    assert logged[:1000] == list(range(1, 1001))
    assert len(logged) == 1000 + 900 + 200 + 3
    assert skipped < set(logged)


def test_samples_become_rarer_so_that_the_log_stays_within_its_size(path):
    writer = LogWriter(path, 20_000)
    for step in range(1, 5_001):
        writer.write([TensorsRecord(step=step, which="gradients", stats={})])
    writer.close()
    logged = steps_logged(path)
    assert path.stat().st_size <= 20_000
    assert logged[:50] == list(range(1, 51))
    gaps = [later - earlier for earlier, later in pairwise(logged)]
    assert gaps == sorted(gaps)
    assert logged[-1] > 2_500


def test_gradients_that_overflowed_are_written_at_any_size(path):
    writer = LogWriter(path, 100)
    for step in range(1, 101):
        counts = Counts(step % 10 == 0, 0, 0, 8)
        writer.write([GradientsRecord(step=step, layers={"weight": counts})])
    writer.close()
    assert set(range(10, 101, 10)) <= set(steps_logged(path))
    assert len(steps_logged(path)) < 20


def test_steps_that_are_written_together_are_lines_of_their_own(path):
    writer = LogWriter(path, 2**20)
    writer.write([RunStarted()])
    fields = {"time": 0.0, "loss": math.nan, "scale": 1.0, "norm": None}
    writer.write_steps([])
    for parameter in ("weight", "odd}, {name"):
        writer.write_steps(
            [
                {"step": step, **fields, "skipped": step == 1003, "parameter": parameter}
                for step in range(995, 1021)
            ]
        )
    writer.close()
    lines = read_log(path)[1:]
    assert [line["step"] for line in lines] == [*range(995, 1001), 1003, 1010, 1020] * 2
    assert {line["parameter"] for line in lines} == {"weight", "odd}, {name"}
    assert math.isnan(lines[0]["loss"])


def test_of_short_steps_fewer_are_written(path):
    writer = LogWriter(path, 2**20)
    intervals = [writer.step_interval(5000, together=count) for count in (1, 320, 321, 2048)]
    assert intervals == [10, 10, 100, 100]
    # Those of the first 1000 are all written.
    assert writer.step_interval(1, together=2048) == 1
    writer.close()
