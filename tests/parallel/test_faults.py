"""A rank that dies or stops ends the others, and a restart continues as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import faulty_run
from support.processes import run_ranks
from support.states import assert_equal

pytestmark = pytest.mark.slow

SCRIPT = Path(faulty_run.__file__)


def torchrun(folder: Path, fault: str, restarts: int, seconds: float = 20.0) -> tuple[int, str]:
    """Return exit status and error output of a run with two ranks."""
    folder.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Otherwise gloo finds the addresses of the killed ranks in torchrun's store (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    options = ["--nproc-per-node=2", f"--max-restarts={restarts}", "--standalone"]
    arguments = [*options, str(SCRIPT), str(folder), fault, str(seconds)]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=90)
    finally:
        # The launcher and its ranks, if they are still there.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


def end_of(folder: Path) -> Any:
    return torch.load(folder / "end.pt", weights_only=True)


def assert_ends_as(killed: Path, clean: Path) -> None:
    """Assert that a run was continued from its last checkpoint, with the end of a clean run."""
    assert end_of(clean)["extra"] == {"first": 0}
    assert end_of(killed)["extra"] == {"first": 4}
    for part in ("model", "optimizer"):
        assert_equal(end_of(killed)[part], end_of(clean)[part])


def test_a_killed_rank_ends_the_others_and_the_next_run_ends_as_the_clean_run(tmp_path: Path):
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    clean.mkdir()
    killed.mkdir()
    with pytest.raises(AssertionError, match=r"closed by peer|reset by peer"):
        run_ranks(2, faulty_run.run, str(killed), "kill")
    # What a save that was killed in the middle leaves.
    (killed / ".5.pt.0123456789abcdef.part").write_bytes((killed / "4.pt").read_bytes()[:1000])
    run_ranks(2, faulty_run.run_clean_and_resumed, str(clean), str(killed))
    assert_ends_as(killed, clean)


@pytest.mark.exhaustive
def test_torchrun_restarts_after_a_killed_rank_and_ends_as_the_clean_run(tmp_path: Path):
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    assert torchrun(clean, "none", 0)[0] == 0
    status, errors = torchrun(killed, "kill", 1)
    assert status == 0, errors
    assert_ends_as(killed, clean)


@pytest.mark.exhaustive
def test_a_rank_that_stops_ends_the_others_with_an_error_within_the_timeout(tmp_path: Path):
    status, errors = torchrun(tmp_path / "stopped", "sleep", 0, seconds=10)
    assert status != 0
    assert re.search("[Tt]imed out|timeout", errors)
    assert not (tmp_path / "stopped" / "end.pt").exists()
    assert (tmp_path / "stopped" / "4.pt").exists()
