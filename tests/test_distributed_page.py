"""The programs of docs/distributed.md run on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "distributed.md"


def run_programs(_rank: int, folder: str) -> dict[str, Any]:
    """Run the blocks one after the other, as one program."""
    names: dict[str, Any] = {"folder": folder}
    for program in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(program, str(PAGE), "exec"), names)
    return {"updates": names["updates"], "loss": names["step"].loss}


@pytest.mark.slow
def test_the_programs_of_the_page_run_and_all_ranks_end_alike(tmp_path: Path):
    first, second = run_ranks(2, run_programs, str(tmp_path))
    assert first["updates"] == second["updates"] == 6
    assert first["loss"] < 1.5
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == ["6.pt", "6.pt.rank1", "dcp"]
