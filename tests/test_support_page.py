"""Check docs/support.md and docs/versions.md against the code that decides what they describe."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mezzo
from mezzo import _launch, _torch
from mezzo._hardware.detect import Backend, DeviceFacts
from mezzo._hardware.support import judge
from mezzo.step.capture_obstacles import capture_obstacle

ROOT = Path(__file__).parent.parent
SUPPORT = (ROOT / "docs" / "support.md").read_text()
VERSIONS = (ROOT / "docs" / "versions.md").read_text()
TYPES = {"CUDA": "cuda", "CPU": "cpu", "ROCm": "cuda", "XPU": "xpu", "MPS": "mps"}
"""Columns of the page → device types of torch."""
DEVICES = {
    "NVIDIA, compute capability 8.0": [
        DeviceFacts("cuda", "GPU", Backend.CUDA, one) for one in ("8.0", "8.9", "9.0", "12.0")
    ],
    "NVIDIA 7.0 to 7.5": [DeviceFacts("cuda", "GPU", Backend.CUDA, one) for one in ("7.0", "7.5")],
    "NVIDIA 5.3 to 6.2": [DeviceFacts("cuda", "GPU", Backend.CUDA, one) for one in ("5.3", "6.2")],
    "NVIDIA before 5.3": [DeviceFacts("cuda", "GPU", Backend.CUDA, "5.2")],
    "AMD gfx90a": [
        DeviceFacts("cuda", "GPU", Backend.ROCM, one)
        for one in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
    ],
    "AMD gfx10": [DeviceFacts("cuda", "GPU", Backend.ROCM, one) for one in ("gfx1030", "gfx906")],
    "Intel GPU": [
        DeviceFacts(
            "xpu",
            "GPU",
            Backend.XPU,
            features=frozenset({"has_fp16", "has_bfloat16_conversions"}),
        )
    ],
    "Apple M3": [
        DeviceFacts("mps", f"Apple M{one}", Backend.MPS, features=frozenset({"macos14"}))
        for one in (3, 4)
    ],
    "Apple M1": [
        DeviceFacts("mps", f"Apple M{one}", Backend.MPS, features=frozenset({"macos14"}))
        for one in (1, 2)
    ],
    "x86 with AMX": [
        DeviceFacts("cpu", "CPU", Backend.CPU, features=frozenset(one))
        for one in ({"amx_fp16", "amx_bf16"}, {"avx512_fp16", "avx512_bf16"})
    ],
    "x86 with AVX2": [
        DeviceFacts("cpu", "CPU", Backend.CPU, features=frozenset(one))
        for one in ({"avx2"}, {"avx512_f"})
    ],
    "Arm": [
        DeviceFacts("cpu", "CPU", Backend.CPU, features=frozenset({"neon", "fp16_arith", "bf16"}))
    ],
}
"""Beginning of a row of the page → devices of that kind."""


def rows(title: str) -> dict[str, list[str]]:
    """Return the rows of the table whose header begins with a cell."""
    lines = SUPPORT.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"| {title}"))
    table = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        table[first] = cells
    return table


def row_of(beginning: str, title: str = "| CUDA") -> list[str]:
    (found,) = [cells for first, cells in rows(title).items() if first.startswith(beginning)]
    return found


def test_the_table_has_a_column_for_every_back_end_with_rules():
    columns = rows("| CUDA")[""]
    assert {column.lower() for column in columns} == {
        backend.value for backend in Backend if backend is not Backend.OTHER
    }
    assert columns == list(TYPES)


@pytest.mark.parametrize(("column", "kind"), TYPES.items())
def test_capture_is_refused_where_the_page_lists_it(column, kind, monkeypatch):
    monkeypatch.setattr(_launch, "has_triton", lambda _: True)
    # A step on a device that this machine lacks: no parameters, and no scaler.
    components = SimpleNamespace(device=torch.device(kind), models=(), scaler=None)
    obstacle = capture_obstacle(components)
    cell = row_of("`TrainStep`, `EvalStep`: captured")[list(TYPES).index(column)]
    assert (cell == "refused") == (obstacle is not None)
    assert cell != "refused" or "has no CUDA graphs" in obstacle


def test_a_step_that_must_be_captured_raises_on_a_cpu():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mezzo.UnsupportedError, match="the model is on cpu, which has no CUDA"):
        mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, "O2", capture=True)


@pytest.mark.parametrize(("column", "kind"), TYPES.items())
def test_fused_steps_run_where_triton_does(column, kind, monkeypatch):
    monkeypatch.setattr(_launch, "_is_triton_installed", lambda: True)
    cell = row_of("fused optimizer steps")[list(TYPES).index(column)]
    assert (cell == "own step") == (not _launch.has_triton(torch.device(kind)))


@pytest.mark.parametrize("kind", sorted(set(TYPES.values())))
def test_torch_has_autocast_for_every_column(kind):
    assert torch.amp.is_autocast_available(kind)
    assert "refused" not in row_of("`autocast`")


@pytest.mark.parametrize("beginning", DEVICES)
def test_the_dtypes_of_a_device_are_those_that_the_code_decides(beginning):
    shown = row_of(beginning, "device |")
    for facts in DEVICES[beginning]:
        found = judge(facts)
        assert [found.float16.label, found.bfloat16.label] == shown, facts


def test_every_kind_of_device_on_the_page_is_checked():
    assert len(rows("device |")) == len(DEVICES) + 2


def test_a_device_without_the_dtype_raises_if_the_policy_asks_for_that():
    policy = mezzo.Policy("O1", dtype="float16", on_unsupported="error")
    if not torch.cuda.is_available():
        with pytest.raises(mezzo.UnsupportedError, match="no CUDA device"):
            mezzo.autocast(policy, device_type="cuda").__enter__()


def test_the_versions_of_the_page_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "| Python | ≥ 3.11 |" in VERSIONS
    assert project["dependencies"] == [f"torch>={_torch.FIRST}"]
    (pinned,) = re.findall(r"\ntorch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text())
    (line,) = re.findall(r"^\| torch \| .*$", VERSIONS, re.MULTILINE)
    assert f"≥ {_torch.FIRST} |" in line
    assert {_torch.FIRST, pinned, _torch.LAST} == set(re.findall(r"\d\.\d+(?= \()", line))


def test_extras_on_the_page_of_versions_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    line = VERSIONS.partition("Extras have")[2].partition("##")[0]
    named = set(re.findall(r"`(\w+)`", line)) | {"cli", "report"}
    assert named <= project["optional-dependencies"].keys()
