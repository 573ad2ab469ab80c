"""The program of docs/observe.md runs, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "observe.md"


def test_the_program_of_the_page_prints_its_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, shown = re.findall(r"^```\w*\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[
        :2
    ]
    exec(compile(program, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    # Digits depend on the CPU, and so does the order of tensors that are alike.
    skeletons = [sorted(re.sub(r"[-\d.e+]+", "#", text).split()) for text in (printed, shown)]
    assert skeletons[0] == skeletons[1]
    assert "steps: 200, skipped: 1, loss scale: 32768" in printed
    assert "last skip: step 121, 0.weight" in printed
