"""Templates, hooks and the security page: they are well formed, and name what exists."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
HOOKS = ROOT / ".pre-commit-config.yaml"
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))


def hooks():
    (repo,) = yaml.safe_load(HOOKS.read_text())["repos"]
    assert repo["repo"] == "local"
    return repo["hooks"]


def test_the_hooks_run_the_checks_of_make_test_from_its_environment():
    makefile = (ROOT / "Makefile").read_text()
    commands = {hook["entry"].removeprefix(".venv/bin/").split()[0] for hook in hooks()}
    assert commands == {"ruff", "mypy", "lint-imports"}
    for hook in hooks():
        assert hook["entry"].startswith(".venv/bin/")
        assert f"$(BIN)/{hook['entry'].removeprefix('.venv/bin/').split()[0]}" in makefile


@pytest.mark.skipif(find_spec("pre_commit") is None, reason="needs pre-commit")
def test_the_hooks_are_valid():
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(HOOKS)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_files_of_hooks_are_those_of_the_package():
    for pattern in {hook["files"] for hook in hooks() if "files" in hook}:
        assert re.search(pattern, "src/mezzo/__init__.py")
        assert re.search(pattern, "pyproject.toml")
        assert not re.search(pattern, "tests/test_facade.py")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_of_issues_have_a_name_and_a_description(path):
    _, header, body = path.read_text().split("---\n", 2)
    assert {"name", "about", "labels"} <= set(yaml.safe_load(header))
    assert body.strip()


def test_a_report_of_a_bug_has_the_output_of_doctor():
    assert [path.stem for path in TEMPLATES] == ["bug", "feature"]
    assert "mezzo doctor --json" in TEMPLATES[0].read_text()


def test_the_workflow_runs_what_ci_runs_anywhere():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert runs == [".ci/run"]
    assert shutil.which(str(ROOT / ".ci" / "run"))


def test_the_security_page_names_the_version_that_is_supported():
    import mezzo

    text = (ROOT / "SECURITY.md").read_text()
    series = ".".join(mezzo.__version__.split(".")[:2])
    assert f"| {series}.x | yes |" in text
    assert "docs/security.md" in text
