"""Convolutions of images with few channels: other forms, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mezzo.step import inductor_pass

SHAPES = [
    # images, weight, stride, padding
    ((2, 3, 32, 32), (8, 3, 16, 16), (16, 16), (0, 0)),
    ((2, 3, 33, 47), (8, 3, 16, 16), (16, 16), (0, 0)),
    ((2, 3, 28, 28), (8, 3, 4, 4), (4, 4), (0, 0)),
    ((2, 3, 17, 16), (8, 3, 3, 3), (2, 2), (1, 1)),
    ((2, 1, 28, 28), (4, 1, 5, 5), (2, 2), (2, 2)),
    ((2, 3, 19, 23), (8, 3, 7, 5), (2, 3), (3, 1)),
    ((1, 4, 9, 9), (8, 4, 9, 9), (3, 3), (4, 4)),
    ((3, 2, 11, 13), (5, 2, 3, 3), (1, 2), (0, 2)),
    ((2, 3, 65, 64), (8, 3, 11, 11), (4, 4), (2, 2)),
    ((0, 3, 16, 16), (8, 3, 4, 4), (4, 4), (0, 0)),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", [inductor_pass.in_blocks, inductor_pass.with_four])
@pytest.mark.parametrize(("image", "kernel", "stride", "padding"), SHAPES, ids=str)
def test_values_and_gradients_are_those_of_torch(form, image, kernel, stride, padding, biased):
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in (image, kernel, *([kernel[:1]] if biased else []))
    ]
    x, weight, bias = (*leaves, None)[:3]
    ours, theirs = (
        form(x, weight, bias, (image, kernel), stride, padding),
        F.conv2d(x, weight, bias, stride, padding),
    )
    torch.testing.assert_close(ours, theirs)
    given = torch.randn_like(theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaves, given), torch.autograd.grad(theirs, leaves, given)
    )


@pytest.mark.parametrize(
    ("weight", "stride", "dtype", "form"),
    [
        ((768, 3, 16, 16), (16, 16), torch.bfloat16, inductor_pass.in_blocks),
        ((32, 3, 3, 3), (2, 2), torch.float16, inductor_pass.in_blocks),
        ((32, 4, 6, 6), (2, 2), torch.float16, inductor_pass.in_blocks),
        ((64, 3, 7, 7), (2, 2), torch.float16, inductor_pass.with_four),
        ((64, 3, 3, 3), (1, 1), torch.float16, inductor_pass.with_four),
        ((64, 3, 1, 1), (2, 2), torch.float16, inductor_pass.with_four),
        ((64, 3, 7, 7), (2, 2), torch.bfloat16, inductor_pass.in_blocks),
        ((64, 3, 9, 9), (2, 2), torch.bfloat16, None),
        ((64, 3, 3, 3), (1, 1), torch.bfloat16, None),
        ((64, 3, 4, 4), (4, 4), torch.float32, None),
        ((64, 4, 3, 3), (1, 1), torch.float16, None),
        ((64, 5, 16, 16), (16, 16), torch.float16, None),
    ],
)
def test_the_form_goes_by_kernel_and_dtype(weight, stride, dtype, form):
    assert inductor_pass.fast_conv_form(weight, stride, dtype) is form


def test_what_cuDNN_gets_has_channels_in_eights_and_last(monkeypatch):  # noqa: N802
    got = []
    monkeypatch.setattr(F, "conv2d", lambda *tensors: got.extend(tensors))
    inductor_pass.in_blocks(
        torch.ones(2, 3, 17, 16),
        torch.ones(8, 3, 3, 3),
        None,
        ((2, 3, 17, 16), (8, 3, 3, 3)),
        (2, 2),
        (1, 1),
    )
    images, weight, _ = got
    assert (images.shape, weight.shape) == ((2, 16, 10, 9), (8, 16, 2, 2))
    assert all(
        tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (images, weight)
    )
