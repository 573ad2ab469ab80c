"""`latest_checkpoint` finds the last complete checkpoint, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import mezzo


def save(path: Path, age: int) -> None:
    mezzo.save_checkpoint(path, nn.Linear(2, 1))
    os.utime(path, ns=(10**18 - age, 10**18 - age))


def test_the_checkpoint_that_was_saved_last_is_found(tmp_path: Path):
    save(tmp_path / "200.pt", age=2)
    save(tmp_path / "100.pt", age=1)
    assert mezzo.latest_checkpoint(str(tmp_path)) == tmp_path / "100.pt"


def test_the_larger_number_counts_at_equal_times(tmp_path: Path):
    for step in (9, 10, 8):
        save(tmp_path / f"step{step}.pt", age=0)
    assert mezzo.latest_checkpoint(tmp_path) == tmp_path / "step10.pt"


def test_what_is_not_a_complete_checkpoint_is_left_out(tmp_path: Path):
    save(tmp_path / "1.pt", age=1)
    whole = (tmp_path / "1.pt").read_bytes()
    (tmp_path / "2.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / ".3.pt.00.part").write_bytes(whole)
    (tmp_path / "4.pt").touch()
    (tmp_path / "5.txt").write_text("mezzo checkpoint")
    (tmp_path / "6").mkdir()
    torch.save({"epoch": 1}, tmp_path / "7.pt")
    assert mezzo.latest_checkpoint(tmp_path) == tmp_path / "1.pt"


def test_without_a_checkpoint_there_is_none(tmp_path: Path):
    assert mezzo.latest_checkpoint(tmp_path) is None
    assert mezzo.latest_checkpoint(tmp_path / "missing") is None
    with pytest.raises(mezzo.CheckpointError, match="is a file"):
        mezzo.latest_checkpoint(__file__)
