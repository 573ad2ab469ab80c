"""`install` and `uninstall`; the names are installed when each test starts."""

import pickle
import subprocess
import sys

import pytest
import torch

import mezzo
from mezzo.compat import torch as dialect

MODULES = {
    "autocast": [
        "torch",
        "torch.amp",
        "torch.cuda.amp",
        "torch.cuda.amp.autocast_mode",
        "torch.cpu.amp",
        "torch.cpu.amp.autocast_mode",
    ],
    "GradScaler": [
        "torch",
        "torch.amp",
        "torch.cuda.amp",
        "torch.cuda.amp.grad_scaler",
        "torch.cpu.amp",
        "torch.cpu.amp.grad_scaler",
    ],
}


def installed_classes():
    return {
        (module, name): getattr(sys.modules[module], name)
        for name, modules in MODULES.items()
        for module in modules
    }


def test_every_public_name_is_replaced():
    assert all(
        issubclass(cls, mezzo.autocast | mezzo.GradScaler) for cls in installed_classes().values()
    )


def test_a_second_install_changes_nothing():
    before = installed_classes()
    dialect.install()
    assert installed_classes() == before
    dialect.uninstall()
    assert not any(
        issubclass(cls, mezzo.autocast | mezzo.GradScaler) for cls in installed_classes().values()
    )


def test_uninstalling_twice_changes_nothing():
    dialect.uninstall()
    before = installed_classes()
    dialect.uninstall()
    assert installed_classes() == before
    assert not dialect.is_installed()


@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
def test_a_pickled_instance_can_be_loaded_without_install(name):
    cls = getattr(torch.amp, name)
    pickled = pickle.dumps(cls("cpu"))
    dialect.uninstall()
    assert type(pickle.loads(pickled)) is cls is not getattr(torch.amp, name)


def test_install_as_a_context_manager_ends_with_the_body():
    dialect.uninstall()
    with dialect.install():
        assert dialect.is_installed()
        assert issubclass(torch.autocast, mezzo.autocast)
    assert not dialect.is_installed()


def test_a_context_inside_an_installation_keeps_it():
    with dialect.install():
        pass
    assert dialect.is_installed()


def test_uninstall_keeps_later_replacements_of_other_code(monkeypatch):
    other = type("other", (), {})
    original = torch.amp.autocast_mode.autocast
    torch.autocast = other
    dialect.uninstall()
    assert torch.autocast is other
    torch.autocast = original
    dialect.install()


def test_torchs_implementation_modules_keep_their_classes():
    # torch.compile, torch.export and FSDP's scaler refer to the classes there.
    assert not issubclass(torch.amp.autocast_mode.autocast, mezzo.autocast)
    assert not issubclass(torch.amp.grad_scaler.GradScaler, mezzo.GradScaler)


PROGRAM = """
import mezzo.compat.torch
mezzo.compat.torch.install()

import torch
from torch.amp import GradScaler, autocast

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu")

@torch.compile(backend="aot_eager", fullgraph=True)
def forward(x):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(x)

for _ in range(2):
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(3, 4)).float().mean() / 64
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(type(scaler).__module__, scaler.get_scale(), forward(torch.ones(3, 4)).dtype)
"""


def test_a_program_that_installs_first_runs_and_compiles():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["mezzo.compat.torch._grad_scaler", "65536.0", "torch.float16"]


def test_a_policy_decides_op_rules_and_dtype_of_all_regions():
    x = torch.ones(2, 2)
    dialect.uninstall()
    with dialect.install(policy=mezzo.Policy(dtype="bfloat16", half={"softmax"}, full={"mm"})):
        with torch.autocast("cpu", dtype=torch.float16):
            assert torch.softmax(x, 0).dtype is torch.bfloat16
            assert torch.mm(x, x).dtype is torch.float32
        with torch.autocast("cpu", enabled=False):
            assert torch.softmax(x, 0).dtype is torch.float32
    with dialect.install(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(x, x).dtype is torch.bfloat16


def test_a_policy_without_a_dtype_leaves_the_one_that_is_passed():
    x = torch.ones(2, 2)
    dialect.uninstall()
    install = dialect.install(policy=mezzo.Policy(full={"mm"}))
    with install, torch.autocast("cpu", dtype=torch.float16):
        assert torch.nn.functional.linear(x, x).dtype is torch.float16
        assert torch.mm(x, x).dtype is torch.float32


def test_a_policy_is_refused_while_another_one_is_installed():
    with pytest.raises(mezzo.UnsupportedError, match="is installed without a policy"):
        dialect.install(policy=mezzo.Policy("O1"))
    dialect.uninstall()
    dialect.install(policy=mezzo.Policy("O1"))
    dialect.install(policy=mezzo.Policy("O1"))
