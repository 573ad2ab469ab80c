"""Translations of our own give what torch computes."""

import onnxruntime
import pytest
import torch
from support.saved_programs import export
from torch import nn

import mezzo
from mezzo.conversion import onnx_export

pytestmark = pytest.mark.usefixtures("one_registry")


@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:The program changes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm2d(3), (4, 3, 5, 5)),
        (nn.BatchNorm1d(3, affine=False), (6, 3)),
        (nn.BatchNorm1d(3, track_running_stats=False), (4, 3, 5)),
    ],
    ids=["images", "plain", "untracked"],
)
def test_batch_norm_in_training_uses_the_statistics_of_the_batch(norm, shape, dtype, tmp_path):
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(shape)).to(dtype)
    onnx_export.export(export(norm.train(), (x,)), tmp_path / "model.onnx")
    [found] = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    ).run(None, {"input": x.numpy()})
    expected = norm(x).detach()
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(torch.from_numpy(found), expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "norm",
    [
        nn.InstanceNorm2d(3, affine=True),
        nn.InstanceNorm2d(3),
        nn.InstanceNorm2d(3, track_running_stats=True).eval(),
    ],
    ids=str,
)
def test_instance_norm_takes_float32_parameters_beside_16_bit_numbers(norm, dtype, tmp_path):
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(4, 3, 5, 5)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
    converted = mezzo.convert(
        model, (x,), dtype=torch.float16, exclude=() if dtype is torch.float16 else ("0", "1")
    )
    converted.export_onnx(tmp_path / "model.onnx")
    [found] = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    ).run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), converted(x), rtol=5e-3, atol=5e-3)
