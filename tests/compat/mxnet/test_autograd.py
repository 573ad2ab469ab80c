"""`mxnet.autograd`."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from mezzo import ScalerError
from mezzo.compat.mxnet import amp, autograd


def test_head_gradients_default_to_one():
    weight = nn.Parameter(torch.ones(2))
    autograd.backward(weight * 3.0)
    assert weight.grad.tolist() == [3.0, 3.0]
    autograd.backward([weight * 1.0, weight.sum()], [torch.tensor([10.0, 20.0]), torch.tensor(1.0)])
    assert weight.grad.tolist() == [11.0, 21.0]
    autograd.backward([weight * 1.0, weight.sum()], [None, torch.tensor(3.0)])
    assert weight.grad.tolist() == [4.0, 4.0]


def test_backward_replaces_earlier_gradients_of_the_variables_it_reaches():
    reached, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    autograd.backward([reached * 2.0, other * 2.0])
    autograd.backward(reached * 3.0)
    assert (reached.grad.item(), other.grad.item()) == (3.0, 2.0)
    autograd.backward(reached)
    assert reached.grad.item() == 1.0


def test_gradients_are_added_with_grad_req_add_and_by_torchs_backward():
    weight = nn.Parameter(torch.ones(1))
    weight.grad_req = "add"
    for _ in range(2):
        autograd.backward(weight * 3.0)
    assert weight.grad.item() == 6.0
    del weight.grad_req
    autograd.backward(weight * 3.0)
    (weight * 3.0).backward()
    assert weight.grad.item() == 6.0


def test_retain_graph_allows_a_second_backward():
    weight = nn.Parameter(torch.ones(2))
    squared = weight * weight
    for _ in range(2):
        autograd.backward(squared, torch.tensor([1.0, 2.0]), retain_graph=True)
    assert weight.grad.tolist() == [2.0, 4.0]
    autograd.backward(squared)
    with pytest.raises(RuntimeError, match="twice, you need to pass retain_graph=True"):
        autograd.backward(squared)
    assert weight.grad.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="twice, you need to pass retain_graph=True"):
        autograd.grad(squared, weight)


def test_grad_returns_gradients_and_stores_none():
    x, y = (nn.Parameter(torch.tensor([value])) for value in (2.0, 3.0))
    assert autograd.grad(x * y, x).tolist() == [3.0]
    first, second = autograd.grad(x * x * y, [x, y], create_graph=True)
    assert (first.tolist(), second.tolist(), x.grad) == ([12.0], [4.0], None)
    assert autograd.grad(first, [x])[0].tolist() == [6.0]


@pytest.mark.parametrize("call", [autograd.backward, lambda heads: autograd.grad(heads, heads)])
def test_an_array_outside_a_graph_cannot_be_differentiated(call):
    weight = nn.Parameter(torch.ones(1))
    with autograd.pause():
        loss = weight * 2.0
    for heads, name in ((loss, "heads"), ([weight * 1.0, loss], r"heads\[1\]")):
        with pytest.raises(
            ScalerError,
            match=rf"Cannot differentiate {name}, because it is not in a computational graph."
            r" Compute it inside `with autograd.record\(\):`",
        ):
            call(heads)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3.0,), TypeError, "heads should be an NDArray, here a tensor, got float"),
        (([],), ValueError, "heads is an empty list"),
        ((None,), TypeError, "got NoneType"),
        (
            (torch.ones(2, requires_grad=True), [torch.ones(2), torch.ones(2)]),
            AssertionError,
            "heads and head_grads must be lists of the same length: 1 vs. 2",
        ),
        (
            (torch.ones(2, requires_grad=True), torch.ones(3)),
            ValueError,
            r"head_grads\[0\] has shape \(3,\), but heads\[0\] has \(2,\)",
        ),
    ],
    ids=["number", "empty", "None", "lengths", "shapes"],
)
def test_invalid_heads_raise(arguments, error, message):
    with pytest.raises(error, match=message):
        autograd.backward(*arguments)


def test_record_and_pause_set_grad_mode():
    weight = nn.Parameter(torch.ones(1))
    with torch.no_grad(), autograd.record():
        assert (weight * 2).requires_grad
        with autograd.pause():
            assert not (weight * 2).requires_grad


def test_modes_are_set_inside_and_restored():
    def modes():
        return autograd.is_recording(), autograd.is_training(), torch.is_grad_enabled()

    assert modes() == (False, False, True)
    with autograd.record():
        assert modes() == (True, True, True)
        with autograd.pause():
            assert modes() == (False, False, False)
            with autograd.train_mode():
                assert modes() == (False, True, False)
        with autograd.predict_mode():
            assert modes() == (True, False, True)
    with autograd.record(train_mode=False):
        assert modes() == (True, False, True)
    with pytest.raises(KeyError), autograd.pause():
        raise KeyError
    assert modes() == (False, False, True)


def test_modes_belong_to_the_thread():
    with autograd.record(), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(autograd.is_recording).result()


def test_backward_runs_without_autocast():
    weight, dtypes = nn.Parameter(torch.ones(1)), []
    amp.init()
    head = weight * 2.0
    head.register_hook(
        lambda _: dtypes.append(nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype)
    )
    autograd.backward(head)
    assert dtypes == [torch.float32]
