import pytest
import torch
from torch import nn

from mezzo.compat.megengine import amp


def product():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_products_are_16_bit_and_exponentials_float32_inside():
    with amp.autocast():
        half = torch.ones(2, 2) @ torch.ones(2, 2)
        assert (half.dtype, torch.exp(half).dtype, half.mean().dtype) == (
            torch.float16,
            torch.float32,
            torch.float32,
        )
    assert product() is torch.float32


def test_batch_norm_takes_16_bit_inputs_and_keeps_float32_parameters():
    norm = nn.BatchNorm1d(2)
    with amp.autocast():
        out = norm(torch.randn(4, 2))
    assert (out.dtype, norm.weight.dtype, norm.running_mean.dtype) == (
        torch.float16,
        torch.float32,
        torch.float32,
    )


def test_a_disabled_region_switches_an_outer_one_off():
    with amp.autocast(), amp.autocast(enabled=False):
        assert product() is torch.float32


def test_an_inner_region_has_its_own_dtype_and_the_outer_one_gets_its_back():
    with amp.autocast():
        with amp.autocast(low_prec_dtype="bfloat16"):
            assert product() is torch.bfloat16
        assert product() is torch.float16


def test_what_was_assigned_inside_ends_with_the_region():
    with amp.autocast():
        amp.enabled = False
        amp.enabled = True
    assert (amp.enabled, product()) == (False, torch.float32)


def test_a_switch_thrown_before_is_put_back_after_a_region_that_threw_it_again():
    amp.enabled = True
    try:
        with amp.autocast(low_prec_dtype="bfloat16"):
            amp.enabled = False
            assert product() is torch.float32
        assert product() is torch.float16
    finally:
        amp.enabled = False
    assert product() is torch.float32


def test_precision_is_restored_when_the_body_raises():
    with pytest.raises(KeyError), amp.autocast():
        raise KeyError
    assert product() is torch.float32


def test_one_instance_decorates_and_nests():
    region = amp.autocast()

    @region
    def nested(depth):
        return product() if depth == 0 else nested(depth - 1)

    assert nested(2) is torch.float16
    with region, region:
        assert product() is torch.float16
    assert product() is torch.float32


def test_a_region_inside_compiled_code_compiles_whole():
    def run(x):
        with amp.autocast():
            return x @ x

    assert (
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype is torch.float16
    )


@pytest.mark.parametrize(
    "words", [{"low_prec_dtype": "float8"}, {"high_prec_dtype": "float16"}], ids=["low", "high"]
)
def test_dtypes_that_cannot_be_meant_are_refused(words):
    with pytest.raises(ValueError, match=next(iter(words))):
        amp.autocast(**words)
