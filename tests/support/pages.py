"""Run the code of the pages in docs/: all pages are tested in this one way.

The blocks of Python of a page run in order, in one namespace, in an empty folder. A block of text
directly below one is what it prints; numbers with decimals may differ by 5 %, since they depend on
the CPU. Where there is no CUDA device, "cuda" is replaced by "cpu".

A page may use the names of `set_up` without making them. Blocks that do not assign such a name
get a fresh one each: a model that one block has decorated is plain in the next.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_program
from torch import nn

import mezzo

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r"^```(?P<language>python|sh|toml)\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code, and what the page shows that it prints."""

    code: str
    output: str | None
    line: int


def pages() -> list[Path]:
    """Return all pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def page_name(page: Path) -> str:
    """Return the path of a page in docs/, without its suffix."""
    return page.relative_to(DOCS).with_suffix("").as_posix()


def blocks(page: Path, language: str = "python") -> Iterator[Block]:
    """Yield the blocks of a page that are written in a language."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        if found["language"] == language:
            line = text.count("\n", 0, found.start()) + 2
            yield Block(found["code"], found["output"], line)


def set_up() -> dict[str, Any]:
    """Return the names that every page may use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(8, 16), torch.randint(2, (8,))
    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "mezzo": mezzo,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "scaler": mezzo.GradScaler("cpu"),
        "loss_fn": nn.functional.cross_entropy,
        "x": x,
        "y": y,
        "loader": [(x, y)] * 4,
    }


def run_page(page: Path, folder: Path, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run the blocks of a page, check what they print, and return the names that they made."""
    made: dict[str, Any] = dict(names or {})
    for block in blocks(page):
        provided = set_up()
        space = provided | made
        printed = _run_block(block, page, folder, space)
        if block.output is not None:
            check_output(printed, block.output, f"{page.name}:{block.line}")
        made |= {name: value for name, value in space.items() if value is not provided.get(name)}
    return made


def check_output(printed: str, shown: str, place: str) -> None:
    """Check that two texts are equal but for the digits of numbers with decimals."""
    decimals = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+")
    assert decimals.sub("#", printed) == decimals.sub("#", shown), place
    numbers = [[float(number) for number in decimals.findall(text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.05), place


def _run_block(block: Block, page: Path, folder: Path, space: dict[str, Any]) -> str:
    """Run a block, a program or a session with prompts, and return what it printed."""
    code = block.code if torch.cuda.is_available() else block.code.replace('"cuda"', '"cpu"')
    if code.startswith(">>> "):
        return _run_session(code, page, block.line, space)
    named = re.match(r"# (\w+\.py)\n", code)
    file = folder / (named[1] if named else "train.py")
    file.write_text(code, encoding="utf-8")
    linecache.checkcache()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(file), "exec"), space)
    except Exception as error:
        error.add_note(f"in the block of {page.name} that begins in line {block.line}")
        raise
    return printed.getvalue()


def _run_session(code: str, page: Path, line: int, space: dict[str, Any]) -> str:
    test = doctest.DocTestParser().get_doctest(code, space, page.name, str(page), line)
    test.globs = space  # the parser has made a copy
    report = io.StringIO()
    failed = doctest.DocTestRunner().run(test, out=report.write, clear_globs=False).failed
    assert not failed, report.getvalue()
    return ""


def run_in_process(page: Path, folder: Path) -> None:
    """Run a page in a process of its own, with warnings as errors as in every test."""
    code, output = run_program(Path(__file__), folder, arguments=[str(page), str(folder)])
    assert code == 0, f"{page.name}:\n{output}"


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), Path(sys.argv[2]))
