"""Casts of O1: activating and disabling them, decorated and registered functions."""

import types

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


def test_disable_casts_nests():
    model, _ = initialize()
    with amp.disable_casts():
        assert product() is torch.float32
        assert model(torch.ones(1, 2)).dtype is torch.float32
        with amp.disable_casts():
            pass
        assert product() is torch.float32
    assert product() is torch.float16


def test_casts_end_when_the_last_model_is_freed():
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


def test_freeing_the_model_inside_disable_casts_keeps_the_casts():
    model, _ = initialize()
    with amp.disable_casts():
        del model
        assert product() is torch.float32
    assert product() is torch.float16


def test_casts_are_restored_when_the_body_raises():
    _alive = initialize()
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert product() is torch.float16


def test_disable_casts_without_initialize_does_nothing():
    with amp.disable_casts():
        assert product() is torch.float32


def test_a_deactivated_handle_casts_nothing():
    _alive = initialize()
    handle = amp._amp_state.handle
    assert handle.is_active()
    handle._deactivate()
    assert not handle.is_active()
    assert product() is torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_init_activates_casts_without_a_model(dtype):
    handle = amp.init(enabled=True, patch_type=dtype)
    assert product() is dtype
    low, full = torch.ones(2, dtype=dtype), torch.ones(2)
    assert torch.cat([low, full]).dtype is torch.float32
    assert torch.cat([low, low]).dtype is dtype
    assert torch.atan2(low, full).dtype is torch.float32
    handle._deactivate()
    assert product() is torch.float32


def test_init_disabled_casts_nothing():
    handle = amp.init(enabled=False)
    assert not handle.is_active()
    assert product() is torch.float32
    with handle._disable_casts():
        handle._deactivate()


def test_allow_banned_permits_binary_cross_entropy():
    probabilities, targets = torch.tensor([0.5]).half(), torch.tensor([1.0]).half()
    amp.init()
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        nn.functional.binary_cross_entropy(probabilities, targets)
    amp.init(allow_banned=True)
    nn.functional.binary_cross_entropy(probabilities, targets)


@pytest.mark.parametrize("call", ["scale_loss", "wrap_optimizer"])
def test_the_api_before_initialize_raises(call):
    with pytest.raises(RuntimeError, match=r"API before amp\.initialize"):
        getattr(amp.init(), call)(None, None)


@pytest.mark.parametrize("compiled", [False, True])
def test_binary_cross_entropy_raises_for_16_bit_inputs_only(compiled):
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


# -- decorated and registered functions ------------------------------------------------------------


def initialize_level(level="O1"):
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    return model


def dtypes(*tensors):
    """Return dtypes."""
    return [tensor.dtype for tensor in tensors]


A, HALF = torch.ones(2), torch.ones(2, dtype=torch.float16)


@pytest.mark.parametrize(
    ("decorate", "dtype"),
    [
        (amp.half_function, torch.float16),
        (amp.float_function, torch.float32),
        (amp.promote_function, torch.float32),
    ],
)
@pytest.mark.parametrize("decorated_first", [True, False])
def test_inputs_of_a_decorated_function_are_cast(decorate, dtype, decorated_first):
    if not decorated_first:
        _alive = initialize_level()
    function = decorate(dtypes)
    if decorated_first:
        _alive = initialize_level()
    assert function(A, HALF) == [dtype, dtype]
    assert function.__doc__ == "Return dtypes."


@pytest.mark.parametrize("decorate", [amp.half_function, amp.float_function, amp.promote_function])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_decorated_functions_cast_nothing_at_other_levels(decorate, level):
    function = decorate(dtypes)
    assert function(A, HALF) == [torch.float32, torch.float16]
    _alive = initialize_level(level)
    assert function(A, HALF) == [torch.float32, torch.float16]


def test_decorated_functions_cast_nothing_inside_an_o2_model():
    dtypes_seen = []

    class Net(nn.Linear):
        def forward(self, x):
            dtypes_seen.append(amp.float_function(dtypes)(x)[0])
            return super().forward(x)

    model = Net(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    model(torch.ones(1, 2))
    assert dtypes_seen == [torch.float16]


def test_decorated_functions_cast_nothing_inside_disable_casts():
    function = amp.half_function(dtypes)
    _alive = initialize_level()
    with amp.disable_casts():
        assert function(A) == [torch.float32]


def test_the_body_of_a_float_function_runs_in_float32():
    _alive = initialize_level()
    product = amp.float_function(lambda a: torch.mm(a, a))
    assert product(torch.ones(2, 2, dtype=torch.float16)).dtype is torch.float32


def test_the_apply_of_an_autograd_function_can_be_decorated():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    _alive = initialize_level()
    x = torch.ones(2, requires_grad=True)
    out = amp.half_function(Double.apply)(x)
    assert out.dtype is torch.float16
    out.sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [2.0, 2.0])


@pytest.mark.parametrize(
    ("register", "dtype"),
    [
        (amp.register_half_function, torch.float16),
        (amp.register_float_function, torch.float32),
        (amp.register_promote_function, torch.float32),
    ],
)
def test_registered_functions_of_a_module_are_cast(register, dtype):
    module = types.SimpleNamespace(dtypes=dtypes)
    register(module, "dtypes")
    _alive = initialize_level()
    assert module.dtypes(A, HALF) == [dtype, dtype]


def test_registering_a_torch_op_changes_its_rule_but_not_the_function():
    einsum, relu = torch.einsum, torch.relu
    amp.register_half_function(torch, "relu")
    amp.register_float_function(torch, "mm")
    amp.register_half_function(torch, "einsum")
    _alive = initialize_level()
    a = torch.ones(2, 2)
    assert (torch.relu(a).dtype, torch.mm(a, a).dtype, torch.einsum("ij,jk->ik", a, a).dtype) == (
        torch.float16,
        torch.float32,
        torch.float16,
    )
    assert torch.einsum is einsum
    assert torch.relu is relu


@pytest.mark.parametrize(
    "register",
    [amp.register_half_function, amp.register_float_function, amp.register_promote_function],
)
def test_registering_an_unknown_name_is_a_value_error(register):
    with pytest.raises(ValueError, match="No function named nothing in module"):
        register(torch, "nothing")
