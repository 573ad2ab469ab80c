"""Exchanging torch's names, and putting them back. They are installed when each test starts."""

import subprocess
import sys

import torch

import mezzo
from mezzo.compat import torch as dialect

PLACES = {
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


def found():
    return {
        (place, name): getattr(sys.modules[place], name)
        for name, places in PLACES.items()
        for place in places
    }


def test_every_public_name_is_mezzos():
    assert all(issubclass(kind, mezzo.autocast | mezzo.GradScaler) for kind in found().values())


def test_a_second_install_changes_nothing():
    before = found()
    dialect.install()
    assert found() == before
    dialect.uninstall()
    assert not any(issubclass(kind, mezzo.autocast | mezzo.GradScaler) for kind in found().values())


def test_uninstalling_twice_changes_nothing():
    dialect.uninstall()
    before = found()
    dialect.uninstall()
    assert found() == before
    assert not dialect.is_installed()


def test_as_a_context_it_lasts_as_long_as_the_body():
    dialect.uninstall()
    with dialect.install():
        assert dialect.is_installed()
        assert issubclass(torch.autocast, mezzo.autocast)
    assert not dialect.is_installed()


def test_a_context_inside_an_installation_leaves_it():
    with dialect.install():
        pass
    assert dialect.is_installed()


def test_what_others_put_there_since_stays(monkeypatch):
    mine = type("mine", (), {})
    own = torch.amp.autocast_mode.autocast
    torch.autocast = mine
    dialect.uninstall()
    assert torch.autocast is mine
    torch.autocast = own
    dialect.install()


def test_torchs_own_modules_keep_their_classes():
    # The compiler, torch.export and FSDP's scaler hold on to what is there.
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


def test_a_program_that_installs_first_and_imports_the_compiler_later():
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["mezzo.compat.torch._grad_scaler", "65536.0", "torch.float16"]
