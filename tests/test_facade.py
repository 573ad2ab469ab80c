"""The public API, and what `import mezzo` imports."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import mezzo

ROOT = Path(__file__).parent.parent

# Runs in a fresh interpreter. A module that is set to None there cannot be imported.
PROBE = """
import json, sys, warnings
warnings.simplefilter("error")
for name in ("rich", "sklearn", "numpy", "scipy", "lightning", "hypothesis", "pytest"):
    sys.modules[name] = None
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns that NumPy is missing
    import torch
before = set(sys.modules)
import mezzo
after = sorted(name for name in set(sys.modules) - before if sys.modules[name] is not None)
from mezzo import _hardware
from mezzo.policy import decide, registry
from mezzo.policy.presets import torch_amp
caches = (
    registry.registry, registry._created, registry.aten_overloads, registry._functional,
    _hardware._detect, decide._effective, torch_amp.torch_entries,
)
filled = [cache.__qualname__ for cache in caches if cache.cache_info().currsize]
print(json.dumps({"imported": after, "filled": filled, "cuda": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def fresh():
    """The state of a fresh interpreter after `import mezzo`, with nothing installed but torch."""
    ran = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def test_all_lists_every_public_name():
    exposed = {
        name
        for name in dir(mezzo)
        if not name.startswith("_") and not isinstance(getattr(mezzo, name), ModuleType)
    }
    assert set(mezzo.__all__) == exposed


def test_names_imported_late_have_the_types_that_checkers_see():
    # The imports for type checkers and the table of modules state the same.
    tree = ast.parse(Path(mezzo.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    stated = {alias.name: node.module for node in block.body for alias in node.names}
    assert stated == mezzo._LAZY_IMPORTS


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mezzo' has no attribute 'decorat'"):
        mezzo.decorat  # noqa: B018


def test_the_version_is_the_one_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert ROOT / project["tool"]["hatch"]["version"]["path"] == Path(mezzo.__file__)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", mezzo.__version__)


def test_all_is_sorted_without_duplicates():
    # ruff's order: constants, classes, functions.
    assert len(set(mezzo.__all__)) == len(mezzo.__all__)
    assert mezzo.__all__ == sorted(
        mezzo.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )


@pytest.mark.parametrize("name", mezzo.__all__)
def test_everything_public_is_documented(name):
    assert getattr(mezzo, name).__doc__


def test_every_exception_is_public():
    from mezzo import _errors

    exceptions = {
        name
        for name, value in vars(_errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert exceptions <= set(mezzo.__all__)


def test_importing_mezzo_imports_no_integration(fresh):
    packages = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"}
    imported = {name.partition(".")[0] for name in fresh["imported"]}
    assert not imported & packages
    assert not any(name.startswith("mezzo.integrations") for name in fresh["imported"])


def test_importing_mezzo_needs_only_torch_and_does_not_warn(fresh):
    assert "mezzo.policy.policy" in fresh["imported"]


def test_importing_mezzo_queries_no_device_and_builds_no_registry(fresh):
    assert fresh["filled"] == []
    assert not fresh["cuda"]


def test_importing_mezzo_does_not_import_the_compiler(fresh):
    heavy = (
        "torch._dynamo",
        "torch._inductor",
        "torch._functorch.aot_autograd",
        "torch.onnx",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "sympy",
    )
    assert [name for name in fresh["imported"] if name in heavy] == []


def test_importing_mezzo_imports_no_optional_package(fresh):
    optional = {"torch.utils.tensorboard", "plotly", "rich", "typer", "jinja2", "transformers"}
    optional |= {"lightning", "pytorch_lightning", "accelerate", "triton", "onnx"}
    assert [name for name in fresh["imported"] if name in optional] == []


def test_importing_mezzo_imports_the_policy_autocast_and_scaler_alone(fresh):
    # The rest doubles the time of the import; each name loads what it needs when it is used.
    packages = {name.split(".")[1] for name in fresh["imported"] if name.startswith("mezzo.")}
    assert {name for name in packages if not name.startswith("_")} == {
        "autocasting",
        "policy",
        "scaling",
    }
