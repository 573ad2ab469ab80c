"""Functions of the user's own under the rules of O1."""

import types

import pytest
import torch
from torch import nn

from mezzo.compat.apex import amp


def initialize(level="O1"):
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    return model


def dtypes(*tensors):
    """Words."""
    return [tensor.dtype for tensor in tensors]


A, HALF = torch.ones(2), torch.ones(2, dtype=torch.float16)


@pytest.mark.parametrize(
    ("decorate", "found"),
    [
        (amp.half_function, torch.float16),
        (amp.float_function, torch.float32),
        (amp.promote_function, torch.float32),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_decorated_function_gets_its_inputs_cast(decorate, found, first):
    if not first:
        _kept = initialize()
    function = decorate(dtypes)
    if first:
        _kept = initialize()
    assert function(A, HALF) == [found, found]
    assert function.__doc__ == "Words."


@pytest.mark.parametrize("decorate", [amp.half_function, amp.float_function, amp.promote_function])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_at_other_levels_it_is_left_alone(decorate, level):
    function = decorate(dtypes)
    assert function(A, HALF) == [torch.float32, torch.float16]
    _kept = initialize(level)
    assert function(A, HALF) == [torch.float32, torch.float16]


def test_inside_a_model_at_o2_too():
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append(amp.float_function(dtypes)(x)[0])
            return super().forward(x)

    model = Net(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    model(torch.ones(1, 2))
    assert seen == [torch.float16]


def test_without_casts_it_is_left_alone():
    function = amp.half_function(dtypes)
    _kept = initialize()
    with amp.disable_casts():
        assert function(A) == [torch.float32]


def test_a_float_function_is_float32_throughout():
    _kept = initialize()
    product = amp.float_function(lambda a: torch.mm(a, a))
    assert product(torch.ones(2, 2, dtype=torch.float16)).dtype is torch.float32


def test_an_autograd_function_is_decorated_by_its_apply():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    _kept = initialize()
    x = torch.ones(2, requires_grad=True)
    out = amp.half_function(Double.apply)(x)
    assert out.dtype is torch.float16
    out.sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [2.0, 2.0])


@pytest.mark.parametrize(
    ("register", "found"),
    [
        (amp.register_half_function, torch.float16),
        (amp.register_float_function, torch.float32),
        (amp.register_promote_function, torch.float32),
    ],
)
def test_a_function_of_a_module_is_registered_by_name(register, found):
    module = types.SimpleNamespace(dtypes=dtypes)
    register(module, "dtypes")
    _kept = initialize()
    assert module.dtypes(A, HALF) == [found, found]


def test_functions_of_torch_change_their_list_and_stay_in_their_place():
    einsum, relu = torch.einsum, torch.relu
    amp.register_half_function(torch, "relu")
    amp.register_float_function(torch, "mm")
    amp.register_half_function(torch, "einsum")
    _kept = initialize()
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
def test_a_name_that_is_not_there_is_a_value_error(register):
    with pytest.raises(ValueError, match="No function named nothing in module"):
        register(torch, "nothing")
