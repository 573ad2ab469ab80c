"""Exceptions that are torch's and mezzo's at once."""

import pytest

from mezzo._errors import PolicyError, ScalerError
from mezzo.compat.torch._grad_scaler import TorchScalerError, TorchValueError, as_torch_error


def test_whoever_waits_for_torchs_type_or_for_mezzos_is_heard():
    assert issubclass(TorchScalerError, ScalerError)
    assert issubclass(TorchScalerError, AssertionError)
    assert issubclass(TorchValueError, PolicyError)
    assert issubclass(TorchValueError, AssertionError)


def test_torchs_words_come_before_mezzos():
    with (
        pytest.raises(AssertionError, match=r"^torch says so\. Do this\.$"),
        as_torch_error("torch says so."),
    ):
        raise ScalerError("Do this.")


def test_other_errors_pass_as_they_are():
    with pytest.raises(KeyError), as_torch_error("torch says so."):
        raise KeyError
