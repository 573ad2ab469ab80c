"""CSV, TensorBoard and Weights & Biases: what is read back is what the run had."""

from __future__ import annotations

import csv
import json
import math
import struct
import sys

import pytest
import torch
from support import synthetic_logs as logs
from torch import nn
from torch.nn import functional as F

import mezzo


def make_step():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mezzo.TrainStep(model, F.mse_loss, optimizer, "O2", dtype="float16")


def train(loggers, **options):
    step = make_step()
    with mezzo.observe(step, loggers=loggers, every=2, **options) as run:
        for value in (1.0, 1.0, 1e30, 1.0):
            step(torch.full((8, 4), value), torch.zeros(8, 2))
    return run


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_for_each_value_and_text(tmp_path):
    path = tmp_path / "new" / "run.csv"
    run = train([mezzo.CSVLogger(path)])
    rows = rows_of(path)
    assert list(rows[0]) == ["step", "name", "value", "text"]
    losses = [float(row["value"]) for row in rows if row["name"] == "step/loss"]
    assert [*losses[:2], losses[3]] == [run.steps[place].loss for place in (0, 1, 3)]
    assert math.isnan(losses[2])
    (skip,) = [row for row in rows if row["name"] == "skips"]
    assert (skip["step"], skip["value"]) == ("3", "")
    assert "first in weight" in skip["text"]


def test_csv_is_complete_while_the_run_goes_on(tmp_path):
    step, path = make_step(), tmp_path / "run.csv"
    with mezzo.observe(step, loggers=[mezzo.CSVLogger(path)], numerics=False):
        step(torch.ones(8, 4), torch.zeros(8, 2))
        assert [row["name"] for row in rows_of(path)][-1] == "step/skipped"


def test_a_logger_writes_no_file_before_the_first_record(tmp_path):
    (tmp_path / "run.csv").write_text("old")
    mezzo.CSVLogger(tmp_path / "run.csv").close()
    mezzo.TensorBoardLogger(tmp_path / "board").close()
    assert (tmp_path / "run.csv").read_text() == "old"
    assert not (tmp_path / "board").exists()


def test_a_closed_csv_logger_is_not_used_again(tmp_path):
    logger = mezzo.CSVLogger(tmp_path / "run.csv")
    train([logger])
    before = (tmp_path / "run.csv").read_text()
    with pytest.warns(UserWarning, match="Make a new one for each run"):
        train([logger])
    assert (tmp_path / "run.csv").read_text() == before


def test_a_finished_log_is_written_as_the_live_run_was(tmp_path):
    train([mezzo.CSVLogger(tmp_path / "live.csv")], log=tmp_path / "run.jsonl")
    mezzo.write_log(tmp_path / "run.jsonl", mezzo.CSVLogger(tmp_path / "later.csv"))

    def values(name):
        return {tuple(row.values()) for row in rows_of(tmp_path / name)}

    live, later = values("live.csv"), values("later.csv")
    assert live <= later
    assert [name for _, name, _, _ in later - live] == ["verdict"]


def test_write_log_refuses_what_is_no_logger_before_it_reads(tmp_path):
    with pytest.raises(mezzo.PolicyError, match=r"has no log_scalars\(\)"):
        mezzo.write_log(tmp_path / "missing.jsonl", "run.csv")


def test_write_log_has_the_cause_that_a_finding_names(tmp_path):
    lines = [logs.header(), *logs.training_run(20, blocks=1)[1:]]
    skip = next(line for line in lines if line.get("skipped"))
    log = logs.write(tmp_path / "run.jsonl", [*lines, logs.finding(skip["step"])])
    mezzo.write_log(log, mezzo.CSVLogger(tmp_path / "run.csv"))
    texts = [row["text"] for row in rows_of(tmp_path / "run.csv") if row["name"] == "skips"]
    assert texts[0].startswith("the op mul in transformer.h.2.attn (model.py:61) left the range")


def test_tensorboard_shows_a_run_live(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train([mezzo.TensorBoardLogger(tmp_path)])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [one.value for one in events.Scalars("step/scale")] == [one.scale for one in run.steps]
    assert "headroom of activations/Linear" in events.Tags()["scalars"]
    assert events.Histograms("exponents of gradients/weight")[0].histogram_value.num == 8
    (skip,) = events.Tensors("skips/text_summary")
    assert (skip.step, b"first in weight" in skip.tensor_proto.string_val[0]) == (3, True)


def test_a_summary_writer_of_the_user_stays_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        train([mezzo.TensorBoardLogger(writer)])
        assert writer.file_writer is not None
        writer.add_scalar("mine", 1.0, 1)


def test_tensorboard_refuses_what_is_neither_a_folder_nor_a_writer():
    with pytest.raises(mezzo.UnsupportedError, match="a folder or a SummaryWriter, got 5"):
        mezzo.TensorBoardLogger(5)


def test_a_file_that_cannot_be_written_does_not_end_the_training(tmp_path):
    with pytest.warns(UserWarning, match="CSVLogger raised IsADirectoryError") as caught:
        run = train([mezzo.CSVLogger(tmp_path)])
    assert (len(caught), len(run.steps)) == (1, 4)


def test_histograms_of_a_log_that_was_changed_are_left_out(tmp_path):
    rows = [["a", 1], [math.inf, 2], [3], [4, 5]]
    stats = {"weight": {"histogram": rows, "headroom": 1.0}}
    line = {"kind": "tensors", "step": 1, "time": 0.1, "which": "gradients", "stats": stats}
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps(one) + "\n" for one in (logs.header(), line)))
    seen = []

    class Histograms:
        def log_histogram(self, step, name, counts):
            seen.append((step, name, counts))

        def __getattr__(self, name):
            return lambda *_: None

    mezzo.write_log(log, Histograms())
    assert seen == [(1, "exponents of gradients/weight", {4: 5})]


class Run:
    """Stands in for a run of wandb, whose file has the same numbers."""

    def __init__(self):
        self.rows, self.defined, self.finished = [], {}, False

    def define_metric(self, name, step_metric):
        self.defined[name] = step_metric

    def log(self, values):
        self.rows.append(values)

    def finish(self):
        self.finished = True


def test_wandb_logs_to_a_run_of_the_user_without_finishing_it():
    pytest.importorskip("wandb")
    own = Run()
    train([mezzo.WandbLogger(own)])
    assert [row["step/number"] for row in own.rows if "step/loss" in row] == [1, 2, 3, 4]
    # wandb drops values whose step is below the last one, unless the metric has its own step.
    assert set(own.defined.values()) == {"step/number"}
    assert set(own.defined) == {name for row in own.rows for name in row} - {"step/number"}
    assert not own.finished


def wandb_records(path):
    """Yield the records of a file of wandb: blocks of 32 KiB with parts of records, as LevelDB."""
    from wandb.proto import wandb_internal_pb2

    data, whole = path.read_bytes(), b""
    position, size = 7, 32 * 1024
    while position < len(data):
        if size - position % size < 7:
            position += size - position % size
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in {1, 4}:
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_wandb_offline_writes_a_run_that_wandb_reads(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = mezzo.WandbLogger(project="digits", mode="offline", dir=str(tmp_path))
    run = train([logger])
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history = [
        {".".join(one.nested_key) or one.key: one.value_json for one in record.history.item}
        for record in wandb_records(path)
        if record.WhichOneof("record_type") == "history"
    ]
    scales = [json.loads(row["step/scale"]) for row in history if "step/scale" in row]
    assert scales == [one.scale for one in run.steps]
    assert any("exponents of gradients/weight" in name for row in history for name in row)
    assert any("first in weight" in row.get("skips", "") for row in history)


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("wandb", lambda: mezzo.WandbLogger(), "wandb"),
        ("torch.utils.tensorboard", lambda: mezzo.TensorBoardLogger("board"), "tensorboard"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    module, make, extra, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(mezzo.UnsupportedError, match=rf"pip install 'mezzo\[{extra}\]'"):
        make()


def test_wandb_takes_a_run_or_options_for_one():
    pytest.importorskip("wandb")
    with pytest.raises(mezzo.UnsupportedError, match="Pass either the run"):
        mezzo.WandbLogger(Run(), project="digits")
