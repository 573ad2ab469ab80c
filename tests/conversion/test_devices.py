import pytest
import torch
from torch import nn

import mezzo
from mezzo.conversion.signature import available_device, available_devices

ABSENT = "xpu" if torch.cuda.is_available() else "cuda:1"


def test_a_device_is_read_from_its_name():
    assert available_device("cpu") == available_device(torch.device("cpu")) == torch.device("cpu")
    assert available_device("meta").type == "meta"


@pytest.mark.parametrize("device", [ABSENT, "gpu"])
def test_one_that_is_not_here_is_refused_with_those_that_are(device):
    with pytest.raises(
        mezzo.UnsupportedError,
        match=f"There is no device '{device}' here. Choose one of: .*{min(available_devices())}",
    ):
        available_device(device)


def test_a_program_is_not_moved_where_nothing_is():
    converted = mezzo.convert(nn.Linear(4, 2), (torch.ones(1, 4),), dtype="bfloat16")
    with pytest.raises(mezzo.UnsupportedError, match="There is no device"):
        converted.to(ABSENT)
