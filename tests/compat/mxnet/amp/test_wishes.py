import pytest
import torch
from torch import nn

from mezzo import Policy
from mezzo.compat.mxnet import amp
from mezzo.compat.mxnet._block import ConvertRequest, expected


def network():
    return nn.ModuleDict(
        {
            "conv": nn.Conv1d(2, 2, 1),
            "norm": nn.BatchNorm1d(2),
            "head": nn.ModuleDict({"fc": nn.Linear(2, 2)}),
        }
    )


def stored_in_16_bits(**words):
    wishes = ConvertRequest(Policy("O1", "float16", preset="mxnet"), **words)
    return sorted(
        name for name, value in expected(network(), wishes).items() if value.dtype is torch.float16
    )


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ({}, []),
        ({"cast_params": True}, ["conv.bias", "conv.weight", "head.fc.bias", "head.fc.weight"]),
        ({"cast_params": True, "excluded": ["head"]}, ["conv.bias", "conv.weight"]),
        ({"cast_params": True, "excluded": ["*.fc", "conv"]}, []),
    ],
    ids=["not asked for", "by the lists", "a part left out", "by globs"],
)
def test_parameters_of_listed_layers_are_expected_in_16_bits(words, names):
    assert stored_in_16_bits(**words) == names


def test_what_is_expected_is_what_a_conversion_stores():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
    ).eval()
    block = amp.convert_hybrid_block(net, cast_optional_params=True, excluded_sym_names=["3"])
    before = {name: value.dtype for name, value in block.params.items()}
    block(torch.ones(1, 3, 4, 4))
    assert {name: value.dtype for name, value in block.params.items()} == before


def test_the_products_of_attention_are_expected_in_16_bits_too():
    attention = nn.TransformerEncoderLayer(4, 2, 8)
    names = {
        name
        for name, value in expected(
            attention, ConvertRequest(Policy("O1", "float16", preset="mxnet"), cast_params=True)
        ).items()
        if value.dtype is torch.float16
    }
    assert names == {name for name, _ in attention.named_parameters() if "norm" not in name}
