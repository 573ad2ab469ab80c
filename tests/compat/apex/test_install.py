"""`install()` provides `import apex`."""

import importlib
import sys

import pytest
from support.processes import run_program

import mezzo.compat.apex
from mezzo.compat.apex import install, is_installed, uninstall


@pytest.fixture(autouse=True)
def uninstalled_afterwards():
    yield
    uninstall()
    assert "apex" not in sys.modules


def test_imports_of_apex_find_the_dialect():
    install()
    from apex import amp
    from apex.amp import _amp_state
    from apex.fp16_utils import FP16_Optimizer
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
    from apex.parallel import DistributedDataParallel

    assert amp is mezzo.compat.apex.amp
    assert _amp_state is amp._amp_state
    assert {
        cls.__module__.partition(".optimizers")[0] for cls in (FusedAdam, FusedLAMB, FusedSGD)
    } == {"mezzo.compat.apex"}
    assert not multi_tensor_applier.available
    assert FusedLayerNorm is mezzo.compat.apex.normalization.FusedLayerNorm
    assert FP16_Optimizer is mezzo.compat.apex.fp16_utils.FP16_Optimizer
    assert DistributedDataParallel is mezzo.compat.apex.parallel.DistributedDataParallel


def test_install_and_uninstall_are_idempotent():
    install()
    install()
    assert is_installed()
    uninstall()
    uninstall()
    assert not is_installed()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("apex")


def test_install_raises_when_apex_is_installed(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        RuntimeError,
        match=r"package named apex is already installed .*from mezzo\.compat\.apex import amp",
    ):
        install()
    importlib.import_module("apex")
    with pytest.raises(RuntimeError, match="package named apex is already installed"):
        install()
    del sys.modules["apex"]


PROGRAM = """
import mezzo.compat.apex
mezzo.compat.apex.install()

import torch
from apex import amp
from apex.optimizers import FusedSGD

model = torch.nn.Linear(4, 2)
optimizer = FusedSGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
loss = model(torch.ones(3, 4)).square().mean() / 64
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""


def test_an_unchanged_program_runs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code, output = run_program(program, tmp_path)
    assert code == 0, output
    assert output.startswith("Selected optimization level O2")
