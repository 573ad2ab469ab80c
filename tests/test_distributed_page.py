"""The programs of docs/distributed.md run on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pages import DOCS, run_page
from support.processes import run_ranks

PAGE = DOCS / "distributed.md"


def run_programs(rank: int, folder: str) -> dict[str, Any]:
    own = Path(folder) / f"rank{rank}"
    own.mkdir()
    names = run_page(PAGE, own, {"folder": folder})
    return {"updates": names["updates"], "loss": names["step"].loss}


@pytest.mark.slow
def test_the_programs_of_the_page_run_and_all_ranks_end_alike(tmp_path: Path):
    first, second = run_ranks(2, run_programs, str(tmp_path))
    assert first["updates"] == second["updates"] == 6
    assert first["loss"] < 1.5
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["6.pt", "6.pt.rank1", "dcp", "rank0", "rank1"]
