"""The layout of the repository: folders of tests, names that scripts may use, words to avoid."""

import ast
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.attribute_writes import foreign_writes
from torch import nn

import mezzo

ROOT = Path(__file__).parent.parent
PACKAGES = {path.parent.name.lstrip("_") for path in (ROOT / "src" / "mezzo").glob("*/__init__.py")}
OTHER_FOLDERS = {"accuracy", "data", "gpu", "observe", "process", "seeds", "support"}
"""Folders of tests that need more than one package, of their data, and of single modules."""

SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")])
INTERNALS = ROOT / "benchmarks" / "internals.py"
"""The only script that may import private modules."""

# Reversed, so that this file does not contain the words.
AVOIDED = {
    word[::-1]
    for word in "dlot tirpluc tcepsus rood gnuh deeh regnarts ydobon ydobemos deliops".split()
}
AVOIDED |= {f"{word}{ending}" for word in AVOIDED for ending in ("s", "ed")}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
"""A word of a sentence, or a part of a name: `snake_case` has two and `CamelCase` too."""
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
SOURCE = ROOT / "src" / "mezzo"
TEXTS = ["src/**/*", "tests/**/*", "benchmarks/*", "examples/*", "docs/**/*", "*.md"]


_PATCHED = "a function of torch, of the user or of the script, which mezzo replaces"
_ACCELERATOR = "Accelerate's own object, which `use` makes one of mezzo's"
_PUBLIC = "a property that is part of the dialect, with a setter that does what it says"
ALLOWED_WRITES = {
    "_torch.py": {
        "owner": "fields of torch's FSDP, by name",
        "parameter": "fields of torch's FSDP, by name",
    },
    "autocasting/module_rules.py": {"forward": "a mark on the function that replaces a forward"},
    "autocasting/torch_hooks.py": {
        "module": _PATCHED,
        "script_class.__call__": _PATCHED,
        "torch_checkpoint": _PATCHED,
    },
    "cli/script_observer.py": {"owner": _PATCHED},
    "compat/apex/amp/_casts.py": {"module": _PATCHED},
    "compat/mxnet/_parameter.py": {
        "parameter": _PUBLIC,
        "self.tensor.grad_req": "a mark on the tensor of torch",
    },
    "compat/mxnet/_trainer.py": {"scheduler.base_lr": _PUBLIC},
    "compat/mxnet/amp/_scaling.py": {
        "node.loss_scale": "the context of an autograd function",
        "node.scaler": "the context of an autograd function",
    },
    "compat/oneflow/optim/lr_scheduler.py": {
        "self._inner.last_epoch": "the step of a scheduler of torch"
    },
    "compat/paddle/_tensor.py": {"result.stop_gradient": _PUBLIC},
    "compat/paddle/jit.py": {"marked": "a mark on a function"},
    "compat/torch/__init__.py": {"module": _PATCHED, "replaced.module": _PATCHED},
    "compat/torch/_autocast.py": {"decorated": "a mark on a function, which torch.jit reads"},
    "integrations/accelerate.py": {"target._mezzo": _ACCELERATOR, "target.scaler": _ACCELERATOR},
    "observing/attachments.py": {"owner": _PATCHED, "self._owner": _PATCHED},
    "parallel/process_groups.py": {"distributed.ProcessGroup": _PATCHED},
    "prepare/rollback.py": {"parameter": "the gradient of a parameter"},
    "scaling/schedule_sync.py": {"target": "the class of a scheduler or an optimizer of the user"},
}
"""Attributes of other objects that mezzo may write: the files, the targets and the reasons."""


def test_every_folder_of_tests_is_named_after_a_package():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert folders - PACKAGES - OTHER_FOLDERS - {"__pycache__"} == set()


def test_every_package_has_a_folder_of_tests():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert PACKAGES - folders == set()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_use_public_names_only(path):
    tree = ast.parse(path.read_text())
    if path != INTERNALS:
        assert [name for name in imported_modules(tree) if name.startswith("mezzo.")] == []
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "mezzo"
    }
    assert attributes <= set(mezzo.__all__)


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_words_of_the_old_style_do_not_come_back():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in sorted({path for pattern in TEXTS for path in ROOT.glob(pattern)})
        if path.suffix in {".py", ".md", ".txt", ".toml"}
        for number, line in enumerate([path.stem, *path.read_text().splitlines()])
        # The changelog's table of renamed names has the old ones.
        if not (path.name == "CHANGELOG.md" and line.startswith("|"))
        for word in WORD.findall(line)
        if word.lower() in AVOIDED
    ]
    assert not found, "\n".join([f"{len(found)} places", *found])


def core_modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).with_suffix("").as_posix()
        if not name.startswith("compat/") and not name.endswith("__init__"):
            yield name


def test_contributing_describes_every_module_of_the_core():
    expected = []
    for name in core_modules():
        summary = ast.get_docstring(ast.parse((SOURCE / f"{name}.py").read_text()))
        shown = name if name.startswith("_") else name.partition("/")[2]
        expected.append(f"| `{shown}` | {' '.join(summary.split(chr(10) * 2)[0].split())[:-1]} |")
    assert [row for row in expected if row not in CONTRIBUTING] == []


def test_the_walks_in_contributing_name_existing_functions():
    walks = CONTRIBUTING.partition("## Three walks")[2].partition("## The tree")[0]
    stops = re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`: ((?:`[\w.]+`,? ?)+)", walks)
    assert len(stops) >= 28
    for module, functions in stops:
        tree = ast.parse((SOURCE / f"{module}.py").read_text())
        names = set()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
                names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
        assert set(re.findall(r"`([\w.]+)`", functions)) <= names, module
    assert max(map(int, re.findall(r"^(\d+)\. ", walks, re.MULTILINE))) <= 10


def test_no_object_writes_attributes_of_another():
    assert set(foreign_writes(SOURCE)) == {
        f"{path}: {target}" for path, targets in ALLOWED_WRITES.items() for target in targets
    }


@pytest.mark.parametrize(
    ("body", "written"),
    [
        ("one.count = 1", ["one.count"]),
        ("one.count, other = 1, 2", ["one.count"]),
        ("one.part.count += 1", ["one.part.count"]),
        ("del one.count", ["one.count"]),
        ("setattr(one, name, 1)", ["one"]),
        ("callback(setattr, one, 'count', 1)", ["one"]),
        ("new = Counter(); new.count = 1", []),
        ("new = one.part(); new.count = 1", ["new.count"]),
        ("STATE.count = 1", []),
        ("one.grad = None", []),
        ("one.unknown = 1", []),
    ],
)
def test_writes_of_attributes_are_found(body, written, tmp_path):
    declared = "class Counter:\n    def __init__(self):\n        self.count = self.grad = 0\n"
    text = f"{declared}\nSTATE = Counter()\n\ndef write(one, name):\n    {body}\n"
    (tmp_path / "module.py").write_text(text)
    assert foreign_writes(tmp_path) == [f"module.py: {target}" for target in written]


def test_a_warm_train_step_enters_few_files_and_seldom_changes_the_package():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    step = mezzo.TrainStep(
        model, nn.functional.cross_entropy, optimizer, "O2", dtype="float16", clip_norm=1.0
    )
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    for _ in range(3):
        step(x, y)
    entered = entered_files(lambda: step(x, y))
    packages = [path.partition("/")[0] for path in entered]
    assert len(set(entered)) <= 28
    assert sum(one != other for one, other in pairwise(packages)) <= 60


def entered_files(call):
    entered, root = [], Path(mezzo.__file__).parent

    def record(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root):
            entered.append(path.relative_to(root).as_posix())

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered
