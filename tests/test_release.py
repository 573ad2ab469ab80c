"""Wheel and sdist: what is in them, and that the core needs nothing installed but torch.

One worker builds and installs for all, and runs what the tests read; see the fixture `release`.
"""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from filelock import FileLock
from packaging.requirements import Requirement

import mezzo

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

# Runs where nothing is installed but torch, what torch needs, and the wheel.
PROGRAM = """
import importlib.util, json, pathlib
import mezzo, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = mezzo.TrainStep(model, torch.nn.functional.mse_loss, optimizer, "O2")
with mezzo.observe(step, log="run.jsonl", loggers=[mezzo.CSVLogger("run.csv")]):
    loss = step(torch.ones(8, 4), torch.zeros(8, 2)).item()

def message(call):
    try:
        call()
    except mezzo.MezzoError as error:
        return str(error)

extras = ("typer", "rich", "plotly", "wandb", "tensorboard", "transformers", "numpy", "pytest")
print(json.dumps({
    "version": mezzo.__version__,
    "folder": str(pathlib.Path(mezzo.__file__).parent),
    "loss": loss,
    "csv": pathlib.Path("run.csv").read_text().count("step/loss"),
    "missing": [name for name in mezzo.__all__ if not hasattr(mezzo, name)],
    "mxnet": str(mezzo.Policy("O1", preset="mxnet").preset),
    "visible": [name for name in extras if importlib.util.find_spec(name) is not None],
    "report": message(lambda: mezzo.write_report("run.jsonl", "report.html")),
    "wandb": message(mezzo.WandbLogger),
    "tensorboard": message(lambda: mezzo.TensorBoardLogger("board")),
}))
"""


@dataclass(frozen=True)
class Release:
    """What was built, and what the installed package printed."""

    wheel: Path
    sdist: Path
    site: Path
    """Folder that the wheel was installed to."""
    ran: dict
    """Name of a command → return code, stdout and stderr."""


@pytest.fixture(scope="session")
def release(tmp_path_factory, worker_id):
    """Build, install and run once, also if several workers of xdist need it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "release"
    result = folder / "ran.json"
    with FileLock(f"{folder}.lock"):
        if not result.exists():
            folder.mkdir(exist_ok=True)
            build(folder / "dist")
            install(folder)
            result.write_text(json.dumps(run_all(folder)))
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return Release(wheel, sdist, site_of(folder), json.loads(result.read_text()))


def build(target):
    """Build the sdist, and from what is in it the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr


def install(folder):
    venv.create(folder / "venv", symlinks=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    command = [sys.executable, "-m", "pip", "--python", str(python_of(folder)), "install", "-q"]
    command += ["--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run(command, check=True, env=plain_environment(), timeout=120)
    link_torch(folder / "torch")
    (site_of(folder) / "torch.pth").write_text(f"{folder / 'torch'}\n")


def link_torch(folder):
    """Make a folder of links to torch and the packages that it needs, and to no others."""
    folder.mkdir()
    for name in required_by("torch", set()):
        package = distribution(name)
        for top in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            if not (folder / top).exists() and not top.endswith(".pth"):
                (folder / top).symlink_to(package.locate_file(top))


def required_by(name, found):
    found.add(name)
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and requirement.name not in found:
            required_by(requirement.name, found)
    return found


def run_all(folder):
    """Run a program and the command line at the same time: each imports torch."""
    commands = {
        "program": [python_of(folder), "-c", PROGRAM],
        "module": [python_of(folder), "-m", "mezzo", "--help"],
    }
    running = {
        name: subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env=plain_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, command in commands.items()
    }
    printed = {name: process.communicate(timeout=120) for name, process in running.items()}
    return {name: (running[name].returncode, *printed[name]) for name in commands}


def python_of(folder):
    return folder / "venv" / "bin" / "python"


def site_of(folder):
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    return site


def plain_environment():
    hidden = {"PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "COVERAGE_PROCESS_START"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


@pytest.fixture(scope="session")
def printed(release):
    code, out, errors = release.ran["program"]
    assert code == 0, errors
    return json.loads(out)


def source_files():
    return {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "mezzo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(release):
    with zipfile.ZipFile(release.wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if name.startswith(f"mezzo-{mezzo.__version__}.dist-info/")}
    stored = (ROOT / "benchmarks" / "results").glob("compare-*.json")
    results = {f"mezzo/comparing/results/{path.name}" for path in stored}
    assert names - info == source_files() | results
    assert {"mezzo/py.typed", "mezzo/policy/missing_kernels.json"} <= names
    assert {f"mezzo/reporting/page.{ending}" for ending in ("html", "css", "js")} <= names
    assert any(name.endswith("licenses/LICENSE") for name in info)


def test_the_sdist_has_what_builds_and_tests_the_package(release):
    with tarfile.open(release.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in source_files()} <= names
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"} <= names
    assert "tests/test_release.py" in names
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {".git", ".venv", "dist", "shared"}


def test_the_metadata_has_one_dependency_extras_and_a_command(release):
    with zipfile.ZipFile(release.wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
        commands = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert [line for line in needed if "extra ==" not in line] == ["Requires-Dist: torch>=2.11"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in extras["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "mezzo = mezzo.cli:main" in commands
    assert "License-Expression: Apache-2.0" in metadata


def test_the_version_is_that_of_the_release(release, printed):
    assert printed["version"] == mezzo.__version__
    assert release.wheel.name == f"mezzo-{mezzo.__version__}-py3-none-any.whl"
    assert release.sdist.name == f"mezzo-{mezzo.__version__}.tar.gz"


def test_the_core_trains_and_logs_with_nothing_installed_but_torch(release, printed):
    assert printed["visible"] == []
    assert Path(printed["folder"]) == release.site / "mezzo"
    assert printed["loss"] > 0
    assert printed["csv"] == 1


def test_every_public_name_can_be_imported_with_nothing_installed_but_torch(printed):
    assert printed["missing"] == []
    assert printed["mxnet"] == "mxnet"


@pytest.mark.parametrize("name", ["report", "wandb", "tensorboard"])
def test_what_needs_an_extra_names_the_command_that_installs_it(printed, name):
    assert f"pip install 'mezzo[{name}]'" in printed[name]


def test_the_command_line_names_its_extra_in_one_line(release):
    code, out, errors = release.ran["module"]
    assert code == 1
    assert out == ""
    # torch itself warns that NumPy is missing.
    assert errors.splitlines()[-1] == (
        "mezzo: typer is not installed. Run: pip install 'mezzo[cli]'"
    )
    assert "Traceback" not in errors


def test_the_command_is_installed(release):
    script = release.site.parents[2] / "bin" / "mezzo"
    assert "from mezzo.cli import main" in script.read_text()
