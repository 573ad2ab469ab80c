import pytest
import torch
from torch import nn

from mezzo.compat.megengine import amp


def is_last(tensor):
    return tensor.is_contiguous(
        memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[tensor.dim()]
    )


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 3, 4, 4, 4)], ids=["image", "volume"])
@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "copied"])
def test_images_and_volumes_get_their_channels_last(shape, inplace):
    given = torch.randn(shape)
    before = given.clone()
    converted = amp.convert_tensor_format(given, inplace=inplace)
    assert is_last(converted)
    assert torch.equal(converted, before)
    assert (converted is given) is inplace
    assert is_last(given) is inplace


def test_other_tensors_are_left_alone():
    given = torch.randn(2, 3)
    assert amp.convert_tensor_format(given) is given


@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "copied"])
def test_a_module_keeps_its_values_and_its_parameters_their_identity(inplace):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(4, 4, 2), nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = list(module.parameters())
    converted = amp.convert_module_format(module, inplace=inplace)
    assert (converted is module) is inplace
    assert is_last(converted[0].weight)
    assert is_last(converted[1].weight)
    assert is_last(module[0].weight) is inplace
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())
