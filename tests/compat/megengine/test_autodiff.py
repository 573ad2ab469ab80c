"""`megengine.autodiff.GradManager`."""

import gc

import pytest
import torch
from torch import nn

import mezzo.compat.megengine as mge
from mezzo.compat.megengine import amp
from mezzo.compat.megengine.autodiff import GradManager


def test_gradients_accumulate_in_attached_tensors_only():
    attached, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    gm = GradManager().attach([attached])
    for _ in range(2):
        with gm:
            gm.backward(attached * other * 3.0)
    assert (attached.grad.tolist(), other.grad) == ([6.0], None)


def test_attaching_sets_requires_grad():
    x = torch.tensor([3.0])
    with GradManager() as gm:
        gm.attach(x)
        gm.backward(x * x, torch.tensor([2.0]))
    assert x.grad.tolist() == [12.0]


def test_an_intermediate_result_can_be_attached():
    weight = nn.Parameter(torch.ones(1))
    with GradManager() as gm:
        hidden = weight * 2.0
        gm.attach(hidden)
        gm.backward(hidden * hidden)
    assert (hidden.grad.tolist(), weight.grad) == ([4.0], None)


def test_output_gradients_default_to_one():
    x = nn.Parameter(torch.ones(2, 3))
    with GradManager().attach(x) as gm:
        gm.backward([x * 2.0, x.sum()])
    assert x.grad.tolist() == [[3.0] * 3] * 2


def test_a_single_output_gradient_is_expanded():
    x = nn.Parameter(torch.ones(3))
    with GradManager().attach(x) as gm:
        gm.backward(x * 2.0, dy=torch.tensor(16.0))
    assert x.grad.tolist() == [32.0] * 3


def test_callbacks_run_in_order_of_attachment():
    x, calls = nn.Parameter(torch.ones(1)), []

    def double(tensor, gradient):
        calls.append(tensor is x)
        return gradient * 2.0

    gm = (
        GradManager()
        .attach(x, callbacks=double)
        .attach([x], callbacks=[lambda _, gradient: gradient + 1.0])
    )
    with gm:
        gm.backward(x * 3.0)
    assert (x.grad.tolist(), calls) == ([7.0], [True])
    assert gm.attached_tensors() == [x]


def test_record_and_release_replace_the_context():
    x = nn.Parameter(torch.ones(1))
    gm = GradManager().attach(x)
    gm.record()
    gm.backward(x * 2.0)
    gm.record()
    gm.release()
    with pytest.raises(RuntimeError, match=r"no computation history. did you forget record\(\)"):
        gm.backward(x * 2.0)
    assert x.grad.tolist() == [2.0]


def test_backward_ends_the_recording():
    x = nn.Parameter(torch.ones(1))
    with GradManager().attach(x) as gm:
        gm.backward(x * 2.0)
        with pytest.raises(RuntimeError, match="no computation history"):
            gm.backward(x * 2.0)


def test_recording_twice_raises():
    gm = GradManager()
    with gm, pytest.raises(RuntimeError, match="already recording"):
        gm.record()


def test_backward_without_outputs_changes_nothing():
    x = nn.Parameter(torch.ones(1))
    with GradManager().attach(x) as gm:
        gm.backward()
    assert x.grad is None


def test_attached_tensors_are_held_weakly():
    gm = GradManager().attach([torch.ones(1)])
    gc.collect()
    assert gm.attached_tensors() == []


def test_attaching_a_module_raises_as_in_megengine():
    with pytest.raises(AssertionError, match="Object to be attached should be Tensor, got Linear"):
        GradManager().attach([nn.Linear(1, 1)])


def test_backward_inside_a_region_keeps_the_dtypes_of_the_forward_pass():
    net = nn.Linear(2, 2)
    dtypes = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            return gradient

    gm = GradManager().attach(net.parameters())
    with amp.autocast(), gm:
        gm.backward(Probe.apply(net(torch.ones(1, 2))).sum())
    assert dtypes == [torch.float32]
    assert net.weight.grad.dtype is torch.float32


def test_gradients_of_parameters_are_plain_tensors():
    net = torch.nn.Linear(2, 1)
    with GradManager().attach(net.parameters()) as gm:
        gm.backward(net(mge.tensor([[1.0, 2.0]])).sum())
    assert {type(parameter.grad) for parameter in net.parameters()} == {torch.Tensor}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: torch.nn.Linear(1, 1), "should be Tensor, got Linear. Pass tensors, such as net"),
        (lambda: 3, "should be Tensor, got int"),
        (lambda: [torch.ones(1), "weight"], "should be Tensor, got str"),
        (lambda: torch.ones(1, dtype=torch.int32), "must be floating-point, got torch.int32"),
    ],
    ids=["module", "number", "text", "integers"],
)
def test_what_cannot_be_attached_is_refused_and_nothing_is_attached(wrong, message):
    gm = GradManager()
    with pytest.raises(AssertionError, match=message):
        gm.attach(wrong())
    assert gm.attached_tensors() == []


@pytest.mark.parametrize(
    ("y", "dy", "error", "message"),
    [
        (3.0, None, TypeError, r"tensor or a list of tensors, got float. Pass the loss itself"),
        (torch.ones(1), None, RuntimeError, "do not depend on an attached tensor"),
        ([torch.ones(1)], [1.0, 2.0], ValueError, "one dy for each y, got 1 y and 2 dy"),
    ],
    ids=["number", "constant", "dy"],
)
def test_outputs_without_gradients_are_refused_in_plain_words(y, dy, error, message):
    weight = torch.ones(1)
    with GradManager().attach(weight) as gm, pytest.raises(error, match=message):
        gm.backward(y, dy)


def test_outputs_that_do_not_depend_on_attached_tensors_are_left_out():
    weight = torch.ones(1)
    with GradManager().attach(weight) as gm:
        gm.backward([2 * weight, torch.ones(1)])
    assert weight.grad.item() == 2.0
