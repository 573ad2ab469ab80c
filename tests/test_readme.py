"""Check the README and the tables of docs: code runs, tables match stored results, links exist."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_program_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 21
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(program)
    runpy.run_path("train.py")
    printed = capsys.readouterr().out
    assert "precision: O2, float16" in printed
    assert "updates: 100, skipped: 0" in printed
    assert "linear (in 0) left the range of float16" in printed
    assert "verified: run with it, the batch does not fail" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "run.jsonl", "run.pt"}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 95


def test_every_link_of_the_readme_exists() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_picture_of_the_readme_is_small() -> None:
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert (ROOT / picture).stat().st_size < 150_000


@pytest.mark.parametrize(
    "name", ["README.md", "docs/index.md", "docs/performance.md", "docs/tensor-cores.md"]
)
def test_the_tables_of_a_page_match_the_stored_results(tables, name: str) -> None:
    assert name in tables.PAGES
    text = (ROOT / name).read_text()
    assert "<!-- benchmarks: " in text
    assert tables.fill(text) == text


def test_a_number_that_is_not_stored_is_replaced(tables) -> None:
    text = (ROOT / "docs/performance.md").read_text()
    wrong = text.replace("| make, enter and leave a region | 6 µs |", "| a region | 5 µs |")
    assert wrong != text
    assert tables.fill(wrong) == text


def test_every_benchmark_with_results_has_a_table(tables) -> None:
    texts = " ".join((ROOT / name).read_text() for name in tables.PAGES)
    stored = {path.stem.partition("-")[0] for path in tables.RESULTS.glob("*.json")}
    # Faults are counted in the README; results of `mezzo compare` have a page of their own.
    missing = {name for name in stored if f"<!-- benchmarks: {name} -->" not in texts}
    assert missing <= {"faults", "compare"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_every_stored_result_names_its_machine(path: Path) -> None:
    stored = json.loads(path.read_text())
    assert all(one["machine"] for one in (stored if isinstance(stored, list) else [stored]))


def test_numbers_in_sentences_are_those_of_the_stored_results(tables) -> None:
    times = {row["name"]: row["times"] for name in ("step", "optim") for row in tables._rows(name)}

    def ms(name: str, contestant: str, digits: int = 1) -> str:
        return f"{times[name][contestant] / 1e3:.{digits}f}"

    mlp = "step, MLP 256-128-10, batch 128, against torch.amp"
    cifar = "step, ResNet-50, CIFAR-10 shapes, batch 128, against torch.amp"
    imagenet = "step, ResNet-50, 224², batch 128, against torch.amp"
    gpt = "step, GPT-2 124M, 8 × 1024, AdamW, against torch.amp"
    adamw = "AdamW with clipping, 1B, bfloat16, split"
    text = " ".join((ROOT / "docs/why-not-faster.md").read_text().split())
    assert f"{ms(mlp, 'torch.amp', 2)} ms with eager" in text
    assert f"{ms(mlp, 'mezzo', 3)} ms as a captured" in text
    assert f"{ms(cifar, 'torch.amp')} ms and {ms(cifar, 'mezzo')} ms" in text
    assert f"{ms(gpt, 'torch.amp')} and {ms(gpt, 'mezzo')} ms" in text
    assert f"{ms(adamw, 'torch.amp')} ms with torch's fused AdamW" in text
    assert f"{ms(adamw, 'mezzo O2')} ms as mezzo's" in text
    ratios = [row["value"] for row in tables._rows("levels") if set(row["times"]) == {"O1", "O2"}]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} of the time of O1" in text
    text = " ".join((ROOT / "docs/tensor-cores.md").read_text().split())
    assert f"{ms(imagenet, 'torch.amp')} ms with torch.amp" in text
    assert f"{ms(imagenet, 'torch by hand')} ms with channels last" in text
    observed = {row["name"]: row["value"] for row in tables._rows("observe")}
    ratio = observed["observe, GPT-2 124M, 8 × 1024, AdamW, always on"]
    assert f"takes {ratio:.3f} of its time" in (ROOT / "docs/loss-is-nan.md").read_text()
