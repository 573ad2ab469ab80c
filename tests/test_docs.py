"""The documentation site: code runs, commands and links exist, every public name is documented."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import torch
import typer
from support.accelerate_state import reset_accelerate_state
from support.pages import DOCS, blocks, page_name, pages, run_in_process, run_page

import mezzo
from mezzo.autocasting import arguments
from mezzo.cli.app import app
from mezzo.observing.op_stats_table import OpRow

ROOT = DOCS.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ELSEWHERE = {"distributed", "loggers"}
"""Pages whose programs a module of their own runs, to check more than what they print."""


def pages_with(language: str) -> list[object]:
    found = [page for page in pages() if any(blocks(page, language))]
    return [
        pytest.param(page, id=page_name(page)) for page in found if page_name(page) not in ELSEWHERE
    ]


@pytest.fixture
def fresh_accelerate():
    """Reset the settings that Accelerate shares between all its objects, before and after."""
    pytest.importorskip("accelerate.state")
    reset_accelerate_state()
    yield
    reset_accelerate_state()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning")
@pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning")
@pytest.mark.parametrize("page", pages_with("python"))
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    if page_name(page).startswith("coming-from/"):  # dialects set defaults of the process
        run_in_process(page, tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    # Regions that earlier tests have used emit no event again, and reports have the dtype from it.
    arguments._resolved.cache_clear()
    try:
        run_page(page, tmp_path)
    finally:
        torch._dynamo.reset()


def commands(page: Path):
    """Yield the commands of a page as lists of arguments, without prompts and comments."""
    for block in blocks(page, "sh"):
        for line in block.code.replace("\\\n", " ").splitlines():
            if parts := shlex.split(line.removeprefix("$ "), comments=True):
                yield parts


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_targets_and_extras_of_a_page_exist(page):
    for parts in commands(page):
        match parts:
            case ["mezzo", *rest] | ["python", "-m", "mezzo", *rest]:
                check_command(rest)
            case ["make", *targets]:
                makefile = (ROOT / "Makefile").read_text()
                for target in targets:
                    assert "=" in target or f"\n{target}:" in makefile, parts
            case ["pip", "install", *packages]:
                assert set(packages) <= {".", "-e"} | set(map(extra, packages)), parts


def check_command(parts: list[str]) -> None:
    command, used = typer.main.get_command(app), []
    while parts and parts[0] in getattr(command, "commands", {}):
        used.append(parts[0])
        command, parts = command.commands[parts[0]], parts[1:]
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    if used == ["run"]:  # options behind the script are the script's
        script = next(place for place, part in enumerate(parts) if part.endswith(".py"))
        parts = parts[:script]
    passed = {part.partition("=")[0] for part in parts if part.startswith("-")}
    assert used or passed, "a command"
    assert passed <= options | {"--help", "--version"}, used


def extra(package: str) -> str:
    """Return a package if its extras exist."""
    names = re.fullmatch(r"(?:mezzo|\.)\[([\w,-]+)\]", package)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return package if not names or set(names[1].split(",")) <= known.keys() else ""


def slugs(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, the same on GitHub and in the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*pages(), ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    code = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
    for link in LINK.findall(code.sub("`", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target), link


def load_script(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawings():
    yield load_script(DOCS / "figures" / "draw.py")
    del sys.modules["draw"]


def test_the_figures_are_those_that_the_script_draws(drawings):
    for name, drawing in drawings.figures().items():
        assert (DOCS / "images" / name).read_text() == drawing, "run docs/figures/draw.py"
        ET.fromstring(drawing)
        assert f"(images/{name})" in (DOCS / "how-it-works.md").read_text()


def test_the_loss_scale_saves_the_gradients_that_float16_would_lose(drawings):
    counts = json.loads(drawings.RECORD.read_text())["counts"]
    values = {int(exponent): count for exponent, count in counts.items()}
    smallest = torch.tensor(2.0**-25).nextafter(torch.tensor(1.0))
    assert smallest.half() > 0  # what the figure counts as lost is what float16 makes zero
    assert (torch.tensor(2.0**-25).half(), torch.tensor(2.0**-26).half()) == (0, 0)
    assert drawings.shares(values, 0)[0] > 0.19
    assert drawings.shares(values, 16)[0] < 0.0002


def test_the_formats_of_the_figure_are_those_of_torch(drawings):
    for one in drawings.FORMATS:
        if one.name != "TF32":
            limits = torch.finfo(getattr(torch, one.name))
            assert limits.tiny == 2.0**one.smallest
            assert limits.eps == 2.0**-one.fraction
            assert limits.max < 2.0**one.largest <= limits.max * 1.01


STORED = {
    ("step", "step, GPT-2 124M, 8 × 1024, AdamW, against torch.amp"): ["train-step"],
    ("step", "step, ResNet-50, 224², batch 128, against torch.amp"): ["train-step"],
    ("step", "step, MLP 256-128-10, batch 128, against torch.amp"): ["train-step"],
    ("levels", "BERT-base, 32 × 128, activations: O2 against O1"): ["levels"],
    ("levels", "BERT-base, 32 × 128, captured: O2 against O1"): ["levels"],
    ("levels", "ConvNeXt-T, 224², batch 64, captured: O2 against O1"): ["levels"],
    ("convert", "BERT-base-like, 32 × 128, compiled, float16"): ["convert"],
    ("convert", "BERT-base-like, 32 × 128, eager, float16"): ["convert"],
    ("convert", "ResNet-50, batch 64, eager, float16"): ["convert"],
    ("convert", "ResNet-50, batch 64, compiled, float16"): ["convert"],
    ("optim", "AdamW with clipping, 1B, bfloat16, split"): ["masters"],
}
"""Stored measurements, and the pages that have them with two decimals."""


@pytest.mark.parametrize(("benchmark", "name"), STORED)
def test_a_number_of_the_pages_is_the_stored_one(benchmark, name):
    record = ROOT / "benchmarks" / "results" / f"{benchmark}-nvidia-h200.json"
    rows = {row["name"]: row["value"] for row in json.loads(record.read_text())["rows"]}
    for page in STORED[benchmark, name]:
        text = (DOCS / f"{page}.md").read_text()
        assert re.search(rf"(?<![\d.]){rows[name]:.2f}(?!\d)", text), page


def documented() -> set[str]:
    """Return the names that the reference shows."""
    text = "\n".join(page.read_text() for page in DOCS.joinpath("reference").glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


def test_every_public_name_is_in_the_reference():
    assert {f"mezzo.{name}" for name in mezzo.__all__} - documented() == set()


def test_the_list_of_the_reference_has_every_public_name():
    text = (DOCS / "reference" / "index.md").read_text()
    assert [name for name in mezzo.__all__ if f"`{name}`" not in text] == []


def test_every_public_name_of_an_integration_is_in_the_reference():
    shared = {"accelerate.MezzoOptimizer", "precision"}  # made by `use`; shared by the others
    own = {
        f"{path.stem}.{node.name}"
        for path in (ROOT / "src" / "mezzo" / "integrations").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if path.stem not in shared
    }
    assert {f"mezzo.integrations.{name}" for name in own - shared} - documented() == set()


def test_every_page_is_in_the_navigation_once():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (?:[^#\n]*: )?([\w/-]+)\.md$", nav, re.MULTILINE)
    assert sorted(listed) == [page_name(page) for page in pages()]


@pytest.mark.parametrize("link", ["", "missing.md", "#missing", "/index.md"])
def test_a_dead_link_or_anchor_fails_the_strict_build(link, tmp_path):
    makefile, settings = ((ROOT / name).read_text() for name in ("Makefile", "mkdocs.yml"))
    (command,) = re.findall(r"\ndocs:.*\n\t.*-m (mkdocs .*)\n", makefile)  # --quiet would hide all
    validation = re.search(r"^validation:\n(?:  .*\n)+", settings, re.MULTILINE)[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: page\nplugins: []\n{validation}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n[link]({link or '#page'})\n")
    built = subprocess.run([sys.executable, "-m", *command.split()], cwd=tmp_path, check=False)
    assert (built.returncode != 0) == bool(link)


def test_sessions_in_docstrings_are_shown_as_code_and_links_out_of_docs_as_text():
    hooks = load_script(DOCS / "hooks.py")
    assert hooks.fence("Add.\n\n>>> 1 + 1\n2\n\nMore.") == (
        "Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    )
    page = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(DOCS / "reference" / "index.md")))
    text = "[make](../../Makefile#L1) [levels](../levels.md) [gone](../gone.md)"
    shown = hooks.on_page_markdown(text, page, SimpleNamespace(docs_dir=str(DOCS)))
    assert shown == "make [levels](../levels.md) [gone](../gone.md)"


def test_pages_load_nothing_from_other_hosts():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "https:" not in settings
    for page in pages():
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(script|iframe|link)\b", page.read_text()), (
            page
        )


def test_the_page_on_op_statistics_names_every_column_of_a_row():
    text = (DOCS / "op_stats.md").read_text()
    assert [name for name in OpRow.__annotations__ if f"`{name}`" not in text] == []
