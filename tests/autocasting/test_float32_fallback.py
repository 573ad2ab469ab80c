"""Ops without a 16-bit kernel run in float32, with an event."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import mezzo
from mezzo import _events
from mezzo.autocasting.float32_fallback import retry_in_float32
from mezzo.autocasting.float32_kernels import register_float32_kernels
from mezzo.policy import missing_kernels

HALF = torch.bfloat16
MATRIX = torch.eye(3) + 0.25

CALLS = {
    "linalg_det": lambda x: torch.linalg.det(x),
    "det": lambda x: x.det(),
    "special_bessel_j0": lambda x: torch.special.bessel_j0(x),
    "special_zeta": lambda x: torch.special.zeta(x + 2, x + 2),
    "linalg_slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "logdet": lambda x: torch.logdet(x),
    "linalg_pinv": lambda x: torch.linalg.pinv(x),
    "linalg_lu": lambda x: torch.linalg.lu(x)[2],
    "histogram": lambda x: torch.histogram(x, 4).hist,
    "matrix_power": lambda x: torch.linalg.matrix_power(x, -1),
    "fft_hfft2": lambda x: torch.fft.hfft2(x),
    "pdist": lambda x: torch.pdist(x),
}
POLICY_FIELDS = {
    "default": {},
    "custom": {"half": {"add"}},
    "default_rule half": {"default_rule": "half"},
    "O3": {"policy": "O3"},
}


@pytest.mark.parametrize("fields", POLICY_FIELDS.values(), ids=POLICY_FIELDS.keys())
@pytest.mark.parametrize("half", [HALF, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_op_without_a_16_bit_kernel_runs_in_float32(
    call: Any, half: torch.dtype, fields: dict[str, Any]
) -> None:
    with mezzo.autocast(device_type="cpu", dtype=half, **fields):
        result = call(MATRIX.to(half))
    assert result.dtype in (torch.float32, torch.complex64)


def test_gradients_flow_through_the_float32_fallback() -> None:
    x = MATRIX.to(HALF).requires_grad_()
    with mezzo.autocast("cpu", dtype=HALF):
        torch.linalg.det(x).backward()
    assert x.grad.dtype is HALF
    assert x.grad.any()


@pytest.mark.parametrize("fields", [{}, {"half": {"linalg_det"}}], ids=["default", "custom"])
def test_the_float32_fallback_emits_an_event(fields: dict[str, Any]) -> None:
    with mezzo.autocast("cpu", dtype=HALF, **fields), _events.listen() as events:
        torch.linalg.det(MATRIX.to(HALF))
    fell = [
        event
        for event in events
        if isinstance(event, _events.Float32Fallback | _events.OpCastOverridden)
    ]
    assert [event.op for event in fell] == ["linalg_det"]


def test_an_op_with_float32_inputs_emits_no_event() -> None:
    with mezzo.autocast("cpu", dtype=HALF), _events.listen() as events:
        torch.linalg.det(MATRIX)
    assert not events


@pytest.mark.usefixtures("_own_missing_kernels")
def test_an_op_that_fails_falls_back_and_is_recorded_and_listed() -> None:
    calls = []

    def without_kernel(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        if x.dtype is HALF:
            raise RuntimeError("\"mine_cpu\" not implemented for 'BFloat16'")
        return x

    mine = mezzo.register_op(without_kernel, "mine_without_kernel", "half")
    try:
        with mezzo.autocast("cpu", dtype=HALF), _events.listen() as events:
            assert mine(torch.ones(1)).dtype is torch.float32
            assert mine(torch.ones(1)).dtype is torch.float32
        assert calls == [HALF, torch.float32, torch.float32]
        assert [
            (event.op, event.device, event.asked)
            for event in events
            if isinstance(event, _events.Float32Fallback)
        ] == [("mine_without_kernel", "cpu", "bfloat16")]
        (row,) = [op for op in mezzo.ops() if op.name == "mine_without_kernel"]
        assert row.no_kernel == (("cpu", "bfloat16"),)
    finally:
        from mezzo.policy.registry import registry

        registry().unregister("mine_without_kernel")


@pytest.mark.usefixtures("_own_missing_kernels")
def test_another_error_is_raised_and_not_recorded() -> None:
    with (
        mezzo.autocast("cpu", dtype=HALF, half={"add"}),
        pytest.raises(RuntimeError, match="must match the size"),
    ):
        torch.ones(2) + torch.ones(3)
    assert not missing_kernels.is_recorded_missing("add", HALF, "cpu")


def test_only_16_bit_calls_are_retried() -> None:
    error = RuntimeError("not implemented for 'Half'")
    with pytest.raises(RuntimeError, match="Half"):
        retry_in_float32(error, torch.add, "add", torch.float32, "cpu", (), {})


def test_float32_kernels_are_registered_once() -> None:
    register_float32_kernels("cpu")
    before = torch._C._dispatch_dump("aten::linalg_det")
    # Registering a kernel twice warns, and warnings are errors here.
    register_float32_kernels("cpu")
    register_float32_kernels("meta")
    assert torch._C._dispatch_dump("aten::linalg_det") == before


def test_float64_and_complex_inputs_are_not_cast() -> None:
    with mezzo.autocast("cpu", dtype=HALF):
        assert torch.linalg.det(MATRIX.double()).dtype is torch.float64
        assert torch.linalg.det(MATRIX.to(torch.complex128)).dtype is torch.complex128


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_compiled_code_uses_the_float32_kernels(fields: dict[str, Any]) -> None:
    compiled = torch.compile(
        lambda x: torch.linalg.det(x) + torch.special.bessel_j0(x).sum(),
        backend="aot_eager",
        fullgraph=True,
    )
    with mezzo.autocast("cpu", dtype=HALF, **fields):
        assert torch.isfinite(compiled(MATRIX.to(HALF)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_lstm_runs_on_a_processor_without_a_16_bit_kernel(dtype: str) -> None:
    program = (
        f"import mezzo, torch\nwith mezzo.autocast('cpu', dtype='{dtype}'):\n   "
        " print(torch.nn.LSTM(4, 4)(torch.ones(1, 3, 4))[0].isfinite().all().item())"
    )
    # In a new process without a limit on oneDNN: the tests limit it to AVX2, which torch does not
    # take into account.
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == "True\n"


@pytest.mark.usefixtures("_own_missing_kernels")
def test_an_lstm_listed_half_runs_on_a_processor_without_a_16_bit_kernel() -> None:
    with mezzo.autocast("cpu", dtype=HALF, half={"lstm"}):
        assert torch.nn.LSTM(4, 4)(torch.ones(1, 3, 4))[0].isfinite().all()


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_code_that_enters_a_region_uses_the_float32_kernels() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with mezzo.autocast("cpu", dtype=torch.bfloat16):
            return torch.linalg.det(x)

    assert torch.isfinite(compiled(MATRIX.to(HALF)))
