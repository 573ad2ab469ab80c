"""torch's private names are used only in `mezzo._torch`, and each may be missing."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiers import EXHAUSTIVE
from torch import nn

import mezzo
from mezzo import _torch

SOURCE = Path(mezzo.__file__).parent


# -- one module ------------------------------------------------------------------------------------


def test_no_other_module_uses_a_private_name_of_torch():
    names = {
        str(path.relative_to(SOURCE)): set(private_names(ast.parse(path.read_text())))
        for path in SOURCE.rglob("*.py")
    }
    assert [path for path, found in names.items() if found and path != "_torch.py"] == []


def test_private_names_are_found_in_imports_attributes_and_strings():
    code = """
import torch._dynamo.config as config
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
a = torch._C._get_schema("x"), nn.modules.batchnorm._BatchNorm, sys.modules.get("torch._dynamo")
b = torch.Tensor.__add__, torch.ops.aten.add_, self._torch, model._parameters, "torch.nn.Linear"
"""
    found = ["torch._dynamo.config", "torch._ops.OpOverload", "torch.utils._pytree"]
    found += ["torch._C._get_schema", "torch.nn.modules.batchnorm._BatchNorm", "torch._dynamo"]
    assert sorted(private_names(ast.parse(code))) == sorted(found)


def test_parts_lists_what_is_used_of_each_module():
    used = {
        name: set()
        for name in ("pytree", "schema", "serialize", "inductor_config", "dynamo_config")
    }
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in used
                and not node.attr.startswith("__")
            ):
                used[node.value.id].add(node.attr)
    parts = {name: set(_torch.PARTS[".".join(_torch.place(name))]) for name in used}
    # Schemas of the dispatcher are called `schema` too.
    used["schema"] -= {"arguments", "returns", "name"}
    used["dynamo_config"] = parts["dynamo_config"]
    assert used == parts


def private_names(tree):
    """Yield the dotted names below torch with a private part, in imports, code and strings."""
    roots = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if is_private(f"{node.module}.{alias.name}")
            )
            roots |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, _, rest = ast.unparse(node).partition(".")
            if (
                root in roots
                and is_private(dotted := f"{roots[root]}.{rest}")
                and not is_private(roots[root])
                and re.fullmatch(r"[\w.]+", rest)
            ):
                yield dotted
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[\w.]+", node.value)
            and is_private(node.value)
        ):
            yield node.value


def is_private(dotted):
    parts = dotted.split(".")
    return parts[0] == "torch" and any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )


# -- missing names ---------------------------------------------------------------------------------

CHILDREN = r"""
import gc, json, os, sys, warnings
import torch

torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # imports dynamo, once
gc.disable()
# Only the first child compiles mezzo's bytecode.
sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["MEZZO_COMPILED"]

def remove(dotted):
    holder, _, name = dotted.rpartition(".")
    if dotted in sys.modules or holder not in sys.modules:
        sys.modules[dotted if dotted in sys.modules else holder] = None
    if sys.modules[holder] and hasattr(sys.modules[holder], name):
        delattr(sys.modules[holder], name)

def run(names, code):
    for name in names:
        remove(name)
    scope = {"torch": torch}
    try:
        exec(code, scope)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return scope.get("result")

for line in sys.stdin:
    names, code = json.loads(line)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, json.dumps(run(names, code)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        print(pipe.read().decode() or json.dumps("died"), flush=True)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Run code in a process whose torch lacks some names; return its `result` or its error."""
    command = [sys.executable, "-c", CHILDREN]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"MEZZO_COMPILED": str(tmp_path_factory.mktemp("compiled"))},
    ) as parent:

        def run(names, code):
            parent.stdin.write(json.dumps([sorted(names), code]) + "\n")
            parent.stdin.flush()
            return json.loads(parent.stdout.readline())

        yield run
        parent.stdin.close()


STEP = """
import mezzo
from mezzo import *  # what is imported late too
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = mezzo.GradScaler("cpu", init_scale=8.0)
with REGION:
    loss = model(torch.ones(1, 2)).float().sum()
before = model.bias.detach().clone()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
result = (before - model.bias).round(decimals=3).tolist()
"""
SCALED = STEP.replace("REGION", "torch.autocast('cpu', dtype=torch.float16)")
"""A step with a scaler, in a region of torch's own."""
TRAINED = STEP.replace("REGION", "mezzo.autocast('cpu', dtype='float16')")
"""A step with a scaler, in a region of mezzo's."""
LOOKED_UP = (
    "from mezzo import *; from mezzo import _torch; result = [n[a] for n in"
    " _torch.FEATURES.values() for a in n if a in vars(_torch)]"
)

NAMES = {
    dotted: feature
    for feature, names in _torch.FEATURES.items()
    for dotted in names.values()
    if not dotted.startswith("torch.ops.")
}
FOREACH = {dotted for dotted in NAMES if dotted.startswith("torch._foreach_")}
"""Removed together: they share one look-up."""
CHECK = "torch._amp_foreach_non_finite_check_and_unscale_"
NEEDED = {
    CHECK,
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._are_functorch_transforms_active",
}
"""Names that the step, or torch in it, cannot work without."""


def test_mezzo_trains_without_each_private_name_that_the_step_does_not_need(without):
    looked_up = set(without([], LOOKED_UP)) - NEEDED
    assert len(looked_up) > len(FOREACH) + 15
    # Names of a feature are removed together, each alone by `make test-all`, and those that are not
    # looked up on import.
    alone = sorted(looked_up - FOREACH)
    together = {NAMES[name]: [one for one in alone if NAMES[one] == NAMES[name]] for name in alone}
    experiments = [
        *together.values(),
        *([name] for name in alone if EXHAUSTIVE),
        FOREACH,
        NAMES.keys() - looked_up - NEEDED,
    ]
    results = {str(names): without(names, SCALED) for names in experiments}
    assert {names: result for names, result in results.items() if result != [0.5, 0.5]} == {}


def test_a_region_with_torchs_own_lists_needs_only_the_op_registry(without):
    registry = {dotted for dotted, feature in NAMES.items() if feature == "op registry"}
    assert without(
        NAMES.keys()
        - registry
        - NEEDED
        - {"torch._C._dispatch_get_registrations_for_dispatch_key"},
        TRAINED,
    ) == [0.5, 0.5]


USES = {
    "torch._C._get_schema": "mezzo.Policy(conditional=[('softplus', 'beta', [2])])",
    "torch._C._dispatch_get_all_op_names": "mezzo.ops()",
    "torch._C._len_torch_function_stack": "mezzo.autocast('cpu', half={'add'}).__enter__()",
    "torch._C._get_function_stack_at": "mezzo.autocast('cpu', half={'add'}).__enter__()",
    CHECK: SCALED,
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "from mezzo.observing.count_dtypes import count_dtypes; count_dtypes().__enter__()"
    ),
    "torch.utils._pytree.tree_leaves": "from mezzo._torch import pytree; pytree.tree_leaves([])",
    "torch._subclasses.fake_tensor.FakeTensor": (
        "mezzo.convert(torch.nn.Linear(2, 2), (torch.ones(1, 2),), dtype='bfloat16')"
    ),
    "torch._export.serde.schema": "mezzo.Converted.load('nowhere')",
    "torch._C._cuda_clearCublasWorkspaces": (
        "from mezzo.step.cuda_graph import clear_cublas_workspaces; clear_cublas_workspaces()"
    ),
}


@pytest.mark.parametrize("name", USES)
def test_a_feature_without_its_name_raises_unsupported_error(name, without):
    message = without([name], f"import mezzo\n{USES[name]}")
    feature = NAMES.get(name, "handling of nested inputs")
    assert (
        message
        == f"UnsupportedError: mezzo's {feature} needs {name}, which torch {torch.__version__} does"
        f" not have. Use torch {_torch.FIRST} to {_torch.LAST}."
    )


# -- substitutes -----------------------------------------------------------------------------------

OPERANDS = {
    "add_": (0.5,),
    "addcmul_": ([torch.ones(2), torch.full((3,), 2.0)], [torch.full((2,), 3.0), torch.ones(3)]),
    "clamp_max_": (1.0,),
    "clamp_min_": (-1.0,),
    "copy_": ([torch.ones(2), torch.zeros(3)],),
    "div": ([2.0, 4.0],),
    "div_": ([torch.full((2,), 2.0), torch.full((3,), 4.0)],),
    "lerp_": ([torch.ones(2), torch.zeros(3)], 0.25),
    "maximum_": ([torch.zeros(2), torch.ones(3)],),
    "mul": (torch.tensor(3.0),),
    "mul_": ([torch.tensor(3.0), torch.tensor(2.0)],),
    "norm": (torch.inf,),
    "sub_": ([torch.ones(2), torch.ones(3)],),
}


@pytest.mark.parametrize(
    "name",
    sorted(name.removeprefix("foreach_") for name in _torch.FEATURES["math on lists of tensors"]),
)
def test_substitutes_of_foreach_functions_give_the_same_values(name):
    def run(compute):
        tensors = [torch.tensor([-1.5, 2.5]), torch.tensor([4.0, 0.0, 9.0])]
        return [*compute(tensors, *OPERANDS.get(name, ())), *tensors]

    expected = run(getattr(torch, f"_foreach_{name}"))
    values = run(_torch._SUBSTITUTES[f"foreach_{name}"])
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_public_foreach_functions_are_preferred():
    if not hasattr(torch, "foreach"):
        pytest.skip("torch.foreach came with 2.15")
    assert _torch.foreach_mul_ is torch.foreach.mul_


@pytest.mark.parametrize(
    "kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d]
)
def test_the_base_of_batch_norms_is_found(kind):
    assert issubclass(kind, _torch.BatchNorm)
    assert issubclass(kind, _torch.BatchOrInstanceNorm)
    assert not issubclass(kind, _torch.InstanceNorm)


@pytest.mark.parametrize(
    "kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LazyInstanceNorm2d]
)
def test_the_base_of_instance_norms_is_found(kind):
    assert issubclass(kind, _torch.InstanceNorm)
    assert issubclass(kind, _torch.BatchOrInstanceNorm)
    assert not any(
        issubclass(other, _torch.BatchOrInstanceNorm)
        for other in (nn.Linear, nn.LayerNorm, nn.GroupNorm)
    )
