"""Run the Python code of documents on mezzo's dialects.

    python tests/support/documents.py FOLDER     # or MEZZO_DOCUMENTS=FOLDER

Every .md, .rst and .txt file of the folder is one program: its blocks of Python, joined in order
(fenced by ``` or ```python, or indented below `.. code-block::`). Import lines of other systems
become those of `mezzo.compat`. A file `substitutions.json` beside the documents may change more,
such as sizes: {"guide.md": [["range\\(100\\)", "range(3)"]]} has regular expressions and their
replacements, line by line, for the document of that name or, under "*", for all; the pattern
"\\A" inserts lines at the top.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEMS = ("apex", "gluoncv", "megengine", "mxnet", "oneflow", "paddle")
VARIABLE = "MEZZO_DOCUMENTS"
SUFFIXES = (".md", ".rst", ".txt")

_FENCE = re.compile(r"\s*```+\s*(\w*)")
_DIRECTIVE = re.compile(r"(\s*)\.\. (?:code-block|code|sourcecode)::\s*(\w*)\s*$")
_PYTHON = ("", "py", "python", "python3")
_IMPORT = re.compile(
    rf"^(\s*)(import|from) ({'|'.join(SYSTEMS)})\b([\w.]*)(?=\s)(.*)$", re.MULTILINE
)
_ERROR_LINE = re.compile(r'File ".*program\.py", line (\d+)')


@dataclass(frozen=True)
class Line:
    """A line of code, and its number in the document (0 for an inserted line)."""

    text: str
    number: int


@dataclass(frozen=True)
class Verdict:
    """Result of a document."""

    document: str
    blocks: int
    runs: bool
    why: str = ""


def code_blocks(text: str) -> list[list[Line]]:
    """Return the blocks of Python in a document, without their common indentation."""
    lines = [Line(line, number) for number, line in enumerate(text.splitlines(), 1)]
    return [block for block in _marked_blocks(lines) if any(line.text.strip() for line in block)]


def _marked_blocks(lines: list[Line]) -> Iterator[list[Line]]:
    place = 0
    while place < len(lines):
        fence, directive = _FENCE.match(lines[place].text), _DIRECTIVE.match(lines[place].text)
        place += 1
        if not fence and not directive:
            continue
        start = place
        if fence:
            while place < len(lines) and not _FENCE.match(lines[place].text):
                place += 1
            language, end = fence[1], place
            place += 1
        else:
            indent = directive[1] + " "
            while place < len(lines) and (
                not lines[place].text.strip() or lines[place].text.startswith(indent)
            ):
                place += 1
            language, end = directive[2], place
        if language.lower() in _PYTHON:
            yield _dedent([line for line in lines[start:end] if not _is_option(line.text)])


def _is_option(text: str) -> bool:
    """Return whether a line is an option of a directive, such as `:linenos:`."""
    return re.match(r"\s*:[\w-]+:", text) is not None


def _dedent(block: list[Line]) -> list[Line]:
    texts = textwrap.dedent("\n".join(line.text for line in block)).split("\n")
    return [Line(text, line.number) for text, line in zip(texts, block, strict=True)]


def change_import(line: str) -> str:
    """Return a line with the import of another system changed to that of its dialect."""
    return _IMPORT.sub(_dialect_import, line + " ").removesuffix(" ")


def _dialect_import(found: re.Match[str]) -> str:
    indent, verb, system, path, rest = found.groups()
    if verb == "from" or " as " in rest:
        return f"{indent}{verb} mezzo.compat.{system}{path}{rest}"
    both = f"import mezzo.compat.{system}{path}; " if path else ""
    return f"{indent}{both}from mezzo.compat import {system}{rest}"


def make_program(text: str, substitutions: list[list[str]]) -> tuple[list[Line], int]:
    """Return the lines of a document's program, and how many blocks it has."""
    blocks = code_blocks(text)
    program = [line for block in blocks for line in block]
    for pattern, replacement in substitutions:
        if pattern == r"\A":
            program = [*(Line(line, 0) for line in replacement.splitlines()), *program]
            continue
        if not any(re.search(pattern, line.text) for line in program):
            raise ValueError(f"the pattern {pattern!r} matches no line of code")
        program = [Line(re.sub(pattern, replacement, one.text), one.number) for one in program]
    return [Line(change_import(line.text), line.number) for line in program], len(blocks)


def read_substitutions(folder: Path, document: str) -> list[list[str]]:
    """Return the substitutions of a document."""
    file = folder / "substitutions.json"
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return [*table.get("*", []), *table.get(document, [])]


def run_document(path: Path, limit: float = 300.0) -> Verdict:
    """Run a document's program in a process and a folder of its own."""
    try:
        program, blocks = make_program(
            path.read_text(encoding="utf-8"), read_substitutions(path.parent, path.name)
        )
    except ValueError as error:
        return Verdict(path.name, 0, runs=False, why=str(error))
    if not blocks:
        return Verdict(path.name, 0, runs=False, why="it has no block of Python")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text("\n".join(line.text for line in program), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, str(file)],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Verdict(path.name, blocks, runs=False, why=f"more than {limit:g} s")
    why = "" if done.returncode == 0 else _explain(done.stderr, program)
    return Verdict(path.name, blocks, runs=done.returncode == 0, why=why)


def _explain(error: str, program: list[Line]) -> str:
    last = next((line for line in reversed(error.splitlines()) if line.strip()), "no message")
    places = [program[int(number) - 1].number for number in _ERROR_LINE.findall(error)]
    return f"line {places[-1]}: {last}" if places else last


def documents(folder: Path) -> list[Path]:
    """Return the documents of a folder."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)


def main(arguments: list[str]) -> int:
    """Print a table of all documents; return 0 if all run."""
    folder = Path(arguments[0] if arguments else os.environ.get(VARIABLE, "."))
    verdicts = [run_document(path) for path in documents(folder)]
    width = max((len(verdict.document) for verdict in verdicts), default=0)
    for verdict in verdicts:
        result = "runs" if verdict.runs else f"fails: {verdict.why}"
        print(f"{verdict.document:{width}}  {verdict.blocks:3} blocks  {result}")  # noqa: T201 - a command
    good = sum(verdict.runs for verdict in verdicts)
    print(f"{good} of {len(verdicts)} documents run")  # noqa: T201
    return 0 if good == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
