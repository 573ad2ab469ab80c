"""Missing 16-bit kernels: known in advance, and recorded."""

import pytest
import torch
import torch.nn.functional as F

from mezzo.policy import missing_kernels
from mezzo.policy.missing_kernels import (
    is_recorded_missing,
    known_missing,
    lacks_kernel,
    missing,
    needs_one_dtype,
    record_missing,
)
from mezzo.policy.registry import registry

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def no_records(monkeypatch):
    """Keep the records of a test from the other tests."""
    monkeypatch.setattr(missing_kernels, "_recorded", set())


def test_every_name_in_the_table_of_missing_kernels_is_an_op():
    assert {
        op for table in missing_kernels._known().values() for ops in table.values() for op in ops
    } - registry().names == set()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "op",
    [
        "linear",
        "matmul",
        "conv2d",
        "softmax",
        "layer_norm",
        "add",
        "relu",
        "scaled_dot_product_attention",
    ],
)
def test_common_layers_have_kernels(op, device):
    assert not lacks_kernel(op, F16, device)
    assert not lacks_kernel(op, BF16, device)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("linalg_qr", torch.linalg.qr),
        ("linalg_inv", torch.linalg.inv),
        ("fft_fft", torch.fft.fft),
        ("cdist", lambda x: torch.cdist(x, x)),
        ("multi_margin_loss", lambda x: F.multi_margin_loss(x, torch.zeros(2, dtype=torch.int64))),
    ],
)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_ops_in_the_table_fail_on_a_cpu(op, call, dtype):
    assert lacks_kernel(op, dtype, "cpu")
    with pytest.raises((RuntimeError, NotImplementedError)):
        call(torch.eye(2, dtype=dtype))


def test_a_kernel_may_be_missing_for_one_dtype_only():
    assert lacks_kernel("rrelu", F16, "cpu") != lacks_kernel("rrelu", BF16, "cpu")


def test_known_missing_lists_ops_without_both_kernels():
    assert "linalg_qr" in known_missing("cpu")
    assert "rrelu" not in known_missing("cpu")
    assert known_missing("quantum") == frozenset()


def test_a_device_without_a_table_lacks_only_recorded_kernels():
    assert not lacks_kernel("linalg_qr", F16, "xpu")
    assert record_missing("linalg_qr", F16, "xpu")
    assert lacks_kernel("linalg_qr", F16, "xpu")
    assert not lacks_kernel("linalg_qr", BF16, "xpu")


def test_record_missing_returns_whether_it_is_new():
    assert record_missing("relu", F16, "cpu")
    assert not record_missing("relu", F16, "cpu")


def test_recorded_and_known_missing_kernels_are_distinguished():
    assert not is_recorded_missing("linalg_qr", F16, "cpu")
    record_missing("relu", F16, "cpu")
    assert is_recorded_missing("relu", F16, "cpu")
    assert not is_recorded_missing("relu", BF16, "cpu")


def test_missing_lists_known_and_recorded_sorted():
    record_missing("linalg_qr", F16, "xpu")
    assert missing("linalg_qr") == tuple(sorted(missing("linalg_qr")))
    assert {("cpu", "bfloat16"), ("cpu", "float16"), ("xpu", "float16")} <= set(
        missing("linalg_qr")
    )
    assert missing("relu") == ()


NORMS = {
    "layer_norm": lambda x, weight: F.layer_norm(x, (4,), weight, weight),
    # Several positions: with one, CUDA's forward accepts mixed dtypes but its backward does not.
    "group_norm": lambda x, weight: F.group_norm(x[:, :, None].repeat(1, 1, 2), 2, weight, weight),
    "batch_norm": lambda x, weight: F.batch_norm(x, None, None, weight, weight, training=True),
    "instance_norm": lambda x, weight: F.instance_norm(
        x[:, :, None].repeat(1, 1, 2), None, None, weight, weight
    ),
}


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cpu_norms_accept_float32_parameters_with_a_16_bit_input(op, dtype):
    assert not needs_one_dtype(op, "cpu")
    assert NORMS[op](torch.randn(3, 4, dtype=dtype), torch.ones(4)).dtype is dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_which_cuda_norms_accept_float32_parameters_with_a_16_bit_input(op, dtype):
    x, weight = torch.randn(3, 4, dtype=dtype, device="cuda"), torch.ones(4, device="cuda")
    if needs_one_dtype(op, "cuda"):
        with pytest.raises(RuntimeError, match="expected scalar type"):
            NORMS[op](x, weight)
    else:
        assert NORMS[op](x, weight).dtype is dtype


def test_other_devices_are_treated_like_cuda():
    assert {op for op in NORMS if needs_one_dtype(op, "xpu")} == {"layer_norm", "group_norm"}
