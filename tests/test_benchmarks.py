"""The benchmarks of models and levels in their tiny form, and the tables of their results."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = argparse.Namespace(tiny=True, rounds=1, seconds=0.0, float32=False)


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_can_be_imported():
    sys.path.append(str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_finds_what_it_imports(name):
    importlib.import_module(name)


@pytest.mark.parametrize("name", ["dlrm", "muon"])
def test_a_model_is_compared_with_every_set_up_of_torch_that_has_a_bar(name):
    import models
    import zoo

    (row,) = models.model_rows(zoo.CASES[name], TINY, "cpu")
    assert set(row.ratios) == set(row.bars) == set(zoo.CASES[name].bars)
    assert set(row.times) == {*row.bars, "mezzo"} == set(row.losses)
    assert not row.errors
    assert row.losses["mezzo"] == pytest.approx(row.losses["torch.amp"], rel=0.01)
    assert "has no CUDA graphs" in str(row)


def test_float32_is_timed_beside_the_set_ups_with_a_bar_and_tf32_on_cuda():
    import models
    import training
    import zoo

    options = argparse.Namespace(**{**vars(TINY), "float32": True})
    (row,) = models.model_rows(zoo.CASES["dlrm"], options, "cpu")
    assert set(row.times) == {"float32", *row.bars, "mezzo"}
    assert set(training.float32_set_ups("cuda")) == {"float32", "TF32"}
    assert set(row.ratios) == set(row.bars)
    assert row.losses["float32"] == pytest.approx(row.losses["torch.amp"], rel=0.01)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_size_beside_a_multiple_of_8_is_compared_with_the_multiple(capsys):
    import shapes

    shapes.main(["--tiny"])
    printed = capsys.readouterr().out
    assert "linear 8 → 16, 16 rows for linear 8 → 15, 16 rows, float16" in printed
    assert "channels_last for 3 × 3 convolution 8 → 8, 2 × 6², channels first" in printed
    assert all(str(size) != str(than) for size, than in shapes.pairs())


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_shapes_are_not_stored_without_tensor_cores(capsys):
    import shapes

    shapes.main([])
    assert "needs a CUDA device" in capsys.readouterr().out


def test_the_table_of_shapes_has_a_line_for_each_pair_and_is_empty_without_results(
    tmp_path, monkeypatch
):
    import tables

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.shapes_table() == ""
    rows = [
        {"dtype": dtype, "size": "1024", "than": than, "times": {"1024": 1e3, than: time}}
        for dtype, than, time in [
            ("float16", "1023", 2e3),
            ("bfloat16", "1023", 3e3),
            ("float16", "1020", 1.5e3),
        ]
    ]
    record = {"machine": "A GPU", "torch": "2.11.0+cu130", "rows": rows}
    (tmp_path / "shapes-gpu.json").write_text(json.dumps(record))
    assert tables.shapes_table().splitlines() == [
        "| A GPU, torch 2.11.0 | instead of | float16 | bfloat16 |",
        "|---|---|---|---|",
        "| 1024 | 1023 | 2.000 → 1.000 ms (2.00 ×) | 3.000 → 1.000 ms (3.00 ×) |",
        "| 1024 | 1020 | 1.500 → 1.000 ms (1.50 ×) | – |",
    ]


def test_the_faster_memory_format_by_hand_counts():
    import models
    import zoo

    (row,) = models.model_rows(zoo.CASES["u-net"], TINY, "cpu")
    by_hand = [time for name, time in row.times.items() if name.startswith("torch by hand")]
    assert len(by_hand) == 2
    assert row.ratios["torch by hand"] == row.times["mezzo"] / min(by_hand)


def test_a_set_up_of_torch_that_fails_is_named_beside_the_others(monkeypatch):
    import models
    import training
    import zoo

    def broken(case, model, device):
        raise RuntimeError("no kernel")

    chosen = {"torch.amp": training.amp, "torch by hand": broken}
    monkeypatch.setattr(models, "set_ups", lambda case: chosen)
    (row,) = models.model_rows(zoo.CASES["dlrm"], TINY, "cpu")
    assert set(row.ratios) == {"torch.amp"}
    assert "torch by hand failed: RuntimeError: no kernel" in str(row)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_models_of_transformers_are_called_with_keyword_arguments(name):
    pytest.importorskip("transformers")
    import models
    import zoo

    (row,) = models.model_rows(zoo.CASES[name], TINY, "cpu")
    assert not row.errors
    assert row.losses["mezzo"] == pytest.approx(row.losses["torch.amp"], rel=0.1)


def test_training_on_many_lengths_counts_the_replays():
    pytest.importorskip("transformers")
    import lengths

    eager, speed = lengths.length_rows(TINY, "cpu")
    assert eager.value == 1.0  # nothing is replayed on a CPU
    assert speed.value > 0
    assert len(lengths.LENGTHS) == 40
    assert (min(lengths.LENGTHS), max(lengths.LENGTHS)) == (64, 2048)


def test_levels_are_compared_by_time_and_by_skips():
    import levels
    import zoo

    (time,) = levels.time_rows(zoo.MLP, 1.02, False, TINY, "cpu")
    assert set(time.times) == {"O1", "O2"}
    (skips,) = levels.skip_rows(zoo.MLP, TINY, "cpu")
    assert skips.value <= skips.bar
    assert skips.losses["O2"] == pytest.approx(skips.losses["O1"], rel=0.01)
    (memory,) = levels.memory_rows(zoo.POST_NORM, 0.8, TINY, "cpu")
    assert memory.bar == 0.8


def fails(options, device):
    raise RuntimeError("out of memory\nin line 3")


def test_a_row_that_fails_prints_its_error_and_the_rest_goes_on(capsys):
    import measure
    import training

    row = measure.Row("a model", {}, 0.5, "×", 1.0)
    groups = {"one": {"first": fails}, "two": {"second": lambda options, device: [row]}}
    assert not training.run_rows("models", None, groups, ["--tiny"])
    printed = capsys.readouterr().out
    assert "ERROR first: RuntimeError: out of memory\n" in printed
    assert str(row) in printed
    assert "failed: first" in printed
    assert training.run_rows("models", None, groups, ["--tiny", "two"])
    assert not training.run_rows("models", None, groups, ["--tiny", "--minutes=-1"])
    assert "no time left for: first second" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        training.run_rows("models", None, groups, ["--tiny", "third"])


def test_a_row_of_a_model_becomes_a_line_with_its_ratios_and_bars(tmp_path, monkeypatch):
    import tables

    rows = [
        {
            "name": "A model",
            "times": {"torch by hand": 4e3, "torch by hand, channels_last": 2e3, "mezzo": 1e3},
            "ratios": {"torch by hand": 0.5},
            "bars": {"torch by hand": 0.92},
            "captured": False,
        },
        {"name": "lengths", "times": {}, "value": 0.05, "bar": 0.1, "unit": "of all"},
    ]
    (tmp_path / "models-machine.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = tables.models_table()
    assert "| A model (not captured) | – | 2.00 | 1.00 | – | 0.50 (0.92) |" in table
    assert "| lengths | 0.1 of all | 0.05 of all |" in table
    assert "float32" not in table

    rows[0]["times"]["float32"] = 9e3
    (tmp_path / "models-machine.json").write_text(json.dumps({"rows": rows}))
    assert "| ms | float32 | torch.amp |" in tables.models_table()
    assert "| A model (not captured) | 9.00 | – | 2.00 |" in tables.models_table()


def test_the_table_of_numerics_counts_what_passes_and_shows_what_needs_a_policy():
    import tables

    lines = tables.numerics_table().splitlines()
    assert len(lines) <= 20
    assert any(line.startswith("| variance by hand |") for line in lines)
    assert "| of 40 trainings |" in lines[0]
    assert any(line.startswith("| O2 float16 | 35 | 40 |") for line in lines)


def test_the_table_of_the_long_run_has_a_row_for_each_precision():
    import tables

    assert len(tables.long_run_table().splitlines()) == 6
