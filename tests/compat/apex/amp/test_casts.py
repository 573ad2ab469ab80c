"""The casts of O1: on, off, and Apex's older way to switch them."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import amp


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def initialize():
    model = nn.Linear(2, 2)
    return amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )


def test_casts_can_be_switched_off_for_a_while():
    model, _ = initialize()
    with amp.disable_casts():
        assert product() is torch.float32
        assert model(torch.ones(1, 2)).dtype is torch.float32
        with amp.disable_casts():
            pass
        assert product() is torch.float32
    assert product() is torch.float16


def test_casts_end_with_the_last_of_their_models():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    amp.initialize(
        [one, two], torch.optim.SGD(one.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )
    del one
    assert product() is torch.float16
    del two
    assert product() is torch.float32
    assert amp._amp_state.handle is None


def test_casts_of_a_later_call_outlive_earlier_models():
    first, _ = initialize()
    later, _ = initialize()
    del first
    assert product() is torch.float16
    del later
    assert product() is torch.float32


def test_a_model_that_goes_while_casts_are_off_for_a_while_disturbs_nothing():
    model, _ = initialize()
    with amp.disable_casts():
        del model
        assert product() is torch.float32
    assert product() is torch.float16


def test_casts_come_back_when_the_body_raises():
    _kept = initialize()
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert product() is torch.float16


def test_without_casts_there_is_nothing_to_switch_off():
    with amp.disable_casts():
        assert product() is torch.float32


def test_a_handle_switches_them_off_for_good():
    _kept = initialize()
    handle = amp._amp_state.handle
    assert handle.is_active()
    handle._deactivate()
    assert not handle.is_active()
    assert product() is torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_init_casts_without_a_model(dtype):
    handle = amp.init(enabled=True, patch_type=dtype)
    assert product() is dtype
    low, full = torch.ones(2, dtype=dtype), torch.ones(2)
    assert torch.cat([low, full]).dtype is torch.float32
    assert torch.cat([low, low]).dtype is dtype
    assert torch.atan2(low, full).dtype is torch.float32
    handle._deactivate()
    assert product() is torch.float32


def test_init_may_do_nothing():
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    assert product() is torch.float32
    with handle._disable_casts():
        handle._deactivate()


def test_what_is_banned_may_be_allowed():
    probabilities, targets = torch.tensor([0.5]).half(), torch.tensor([1.0]).half()
    amp.init()
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        nn.functional.binary_cross_entropy(probabilities, targets)
    amp.init(allow_banned=True)
    nn.functional.binary_cross_entropy(probabilities, targets)


@pytest.mark.parametrize("call", ["scale_loss", "wrap_optimizer"])
def test_the_oldest_way_is_refused_as_apex_does(call):
    with pytest.raises(RuntimeError, match=r"API before amp\.initialize"):
        getattr(amp.init(), call)(None, None)


@pytest.mark.parametrize("compiled", [False, True])
def test_binary_cross_entropy_is_refused_16_bit_inputs_and_takes_float32_as_there(compiled):
    model = amp.initialize(nn.Linear(4, 1), opt_level="O1", verbosity=0)

    def loss(probabilities):
        return nn.functional.binary_cross_entropy(probabilities, torch.ones(2, 1))

    call = torch.compile(loss, backend="eager", fullgraph=True) if compiled else loss
    probabilities = torch.sigmoid(model(torch.ones(2, 4))).detach()
    assert probabilities.dtype is torch.float16
    assert call(probabilities.float()).dtype is torch.float32
    with pytest.raises(
        Exception if compiled else NotImplementedError,
        match="binary_cross_entropy_with_logits, or cast the probabilities to float32 first",
    ):
        call(probabilities)
