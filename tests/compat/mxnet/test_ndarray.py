"""`NDArray`: MXNet's attributes and methods, and torch's functions on arrays."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional

import mezzo
from mezzo.compat.mxnet import amp, autograd, nd
from mezzo.compat.mxnet._context import cpu
from mezzo.compat.mxnet._dtype import numpy_dtype
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor, on_arrays


@pytest.fixture
def array():
    return as_ndarray(torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int32", "int64", "uint8"])
def test_a_dtype_equals_that_of_numpy(array, name):
    cast = array.astype(name)
    assert cast.dtype == getattr(np, name)
    assert cast.dtype is getattr(np, name)
    assert cast.asnumpy().dtype == getattr(np, name)


def test_bfloat16_which_numpy_lacks_keeps_the_dtype_of_torch(array):
    cast = array.astype("bfloat16")
    assert cast.dtype is torch.bfloat16
    assert cast.asnumpy().dtype == np.float32


def test_an_array_shares_memory_and_graph_with_its_tensor():
    weight = torch.ones(2, requires_grad=True)
    array = as_ndarray(weight * 2)
    assert as_tensor(array).data_ptr() == array.data_ptr()
    assert type(as_tensor(array)) is torch.Tensor
    (array * 3).sum().backward()
    assert weight.grad.tolist() == [6.0, 6.0]


def test_other_values_than_arrays_are_unwrapped_to_themselves():
    tensor = torch.ones(1)
    assert as_tensor(tensor) is tensor
    assert as_tensor("text") == "text"


def test_torch_functions_return_arrays_and_see_the_dtype_of_torch(array):
    # Both read input.dtype in Python.
    assert isinstance(torch.relu(array), NDArray)
    upsampled = functional.interpolate(array.reshape((1, 1, 2, 3)), scale_factor=2.0)
    assert upsampled.shape == (1, 1, 4, 6)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    assert layer(as_ndarray(torch.ones(1, 2, 4))).shape == (1, 2, 4)


def test_operators_and_indices_work(array):
    assert isinstance(2 * array - array / 2 + 1, NDArray)
    assert array[1, 2].item() == 5.0
    array += 1
    array[0] = 7.0
    array[:] = array * 2
    assert array.asnumpy().tolist() == [[14.0, 14.0, 14.0], [8.0, 10.0, 12.0]]


def test_size_is_a_number_and_can_be_called_as_in_torch(array):
    assert array.size == 6
    assert array.size(0) == 2
    assert array.size() == (2, 3)


def test_comparisons_give_numbers_in_the_dtype_of_the_array(array):
    greater = array > 2
    assert greater.dtype == np.float32
    assert (greater - 1).asnumpy().tolist() == [[-1, -1, -1], [0, 0, 0]]
    assert (array == array.copy()).sum().asscalar() == 6.0


def test_reductions_over_all_axes_have_shape_1(array):
    assert array.sum().shape == (1,)
    assert array.mean().asnumpy()[0] == 2.5
    assert array.max(axis=1).asnumpy().tolist() == [2.0, 5.0]
    assert array.sum(axis=0, exclude=True).asnumpy().tolist() == [3.0, 12.0]
    assert array.argmax(axis=1).dtype == np.float32
    assert array.astype("int32").sum().dtype == np.int32


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((0, -1), (2, 12)),
        ((-1,), (24,)),
        ((-3, 0), (6, 4)),
        ((0, -2), (2, 3, 4)),
        ((4, 6), (4, 6)),
    ],
)
def test_reshape_has_the_codes_of_mxnet(shape, expected):
    array = nd.ones((2, 3, 4))
    assert array.reshape(shape).shape == expected
    assert array.reshape(*shape).shape == expected
    assert array.reshape(shape=shape).shape == expected


def test_an_unsupported_reshape_code_says_what_to_pass():
    with pytest.raises(
        mezzo.UnsupportedError, match=r"the code -4 is not supported. Pass the sizes"
    ):
        nd.ones((4,)).reshape((-4, 2, 2))


def test_shapes_change_as_in_mxnet():
    array = nd.ones((2, 3, 4))
    assert array.flatten().shape == (2, 12)
    assert array.transpose().shape == (4, 3, 2)
    assert array.transpose((1, 0, 2)).shape == (3, 2, 4)
    assert array.expand_dims(0).squeeze(axis=0).shape == (2, 3, 4)
    assert [part.shape for part in array.split(3, axis=1)] == [(2, 1, 4)] * 3
    assert array.slice_axis(axis=2, begin=1, end=None).shape == (2, 3, 3)
    assert array.swapaxes(0, 2).shape == (4, 3, 2)
    assert array.tile((1, 2, 1)).shape == (2, 6, 4)
    assert array.repeat(2, axis=0).shape == (4, 3, 4)
    assert nd.ones((1, 3)).broadcast_to((2, 0)).shape == (2, 3)


def test_split_into_unequal_parts_says_what_to_pass():
    with pytest.raises(ValueError, match="axis 1 of size 3 into 2 equal parts"):
        nd.ones((2, 3)).split(2)


def test_copies_go_to_a_context_or_into_an_array(array):
    assert array.as_in_context(cpu()) is array
    assert array.ctx == array.context == cpu()
    other = nd.zeros((2, 3))
    assert array.copyto(other) is other
    assert (other == array).min().asscalar() == 1
    moved = array.copyto(cpu())
    moved[:] = 0
    assert array.sum().asscalar() == 15.0
    assert array.copy().data_ptr() != array.data_ptr()
    assert array.astype("float32", copy=False).data_ptr() == array.data_ptr()


def test_only_one_element_is_a_scalar(array):
    assert nd.array([3]).asscalar() == 3.0
    assert float(nd.array([3])) == 3.0
    assert int(nd.array([3])) == 3
    assert f"{nd.array([3]):.2f}" == "3.00"
    with pytest.raises(ValueError, match=r"shape is \(2, 3\). Reduce it first"):
        array.asscalar()


def test_waiting_does_nothing_on_the_cpu(array):
    assert array.wait_to_read() is None


def test_a_gradient_is_an_array_and_replaced_by_the_next_backward(array):
    array.attach_grad()
    assert array.grad.asnumpy().sum() == 0.0
    for _ in range(2):
        with autograd.record():
            squares = array * array
        squares.backward()
    assert isinstance(array.grad, NDArray)
    assert torch.equal(as_tensor(array.grad), 2 * as_tensor(array).detach())


def test_gradients_add_up_with_grad_req_add(array):
    array.attach_grad(grad_req="add")
    for _ in range(2):
        (array * 3).backward(nd.ones((2, 3)))
    assert array.grad.asnumpy().tolist() == [[6.0] * 3] * 2


def test_grad_req_null_computes_no_gradient(array):
    array.attach_grad("null")
    assert not array.requires_grad
    with pytest.raises(
        ValueError, match=r"Unknown grad_req 'sum'. Choose one of: write, add, null"
    ):
        array.attach_grad("sum")


def test_a_computed_array_keeps_its_gradient(array):
    array.attach_grad()
    double = array * 2
    double.attach_grad()
    (double * 3).backward()
    assert double.grad.asnumpy().tolist() == [[3.0] * 3] * 2


def test_an_array_is_printed_as_in_mxnet(array):
    assert repr(array) == "\n[[0. 1. 2.]\n [3. 4. 5.]]\n<NDArray 2x3 @cpu(0)>"
    assert f"{array}" == str(array)


def test_arrays_are_copied_and_pickled(array):
    array.attach_grad()
    stream = io.BytesIO()
    torch.save(array, stream)
    stream.seek(0)
    for other in (
        copy.copy(array),
        copy.deepcopy(array),
        pickle.loads(pickle.dumps(array)),
        torch.load(stream, weights_only=False),
    ):
        assert isinstance(other, NDArray)
        assert other.requires_grad
        assert other.is_leaf
        assert torch.equal(as_tensor(other), as_tensor(array))
    assert copy.deepcopy([array, array])[0] is not array


def test_amp_casts_arrays_as_it_casts_tensors(array):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    with amp.init():
        for value in (array, array.astype("float16")):
            for function in (
                lambda x: functional.linear(x, weight),
                lambda x: torch.mm(x, weight.t()),
                lambda x: x @ weight.t(),
                lambda x: torch.softmax(x, -1),
                lambda x: torch.log_softmax(x, -1),
                lambda x: x + torch.ones(1),
                lambda x: x.sum(),
            ):
                expected = function(as_tensor(value)).dtype
                assert function(value).dtype is numpy_dtype(expected)
        assert functional.linear(array, weight).dtype == np.float16
        assert torch.log_softmax(array.astype("float16"), -1).dtype == np.float32


def test_autocast_of_torch_casts_arrays(array):
    with torch.autocast("cpu", torch.bfloat16):
        assert (array @ torch.ones(3, 2)).dtype is torch.bfloat16


def test_a_function_of_tensors_takes_arrays(array):
    function = on_arrays(lambda data, others: data + sum(others))
    assert isinstance(function(array, [array]), NDArray)
    assert type(function(torch.ones(1), [torch.ones(1)])) is torch.Tensor


def test_take_pick_and_one_hot_accept_float_indices():
    data = nd.array([[1, 2], [3, 4]])
    assert data.pick(nd.array([0, 1])).asnumpy().tolist() == [1.0, 4.0]
    assert data.pick(nd.array([0, 9]), keepdims=True).asnumpy().tolist() == [[1.0], [4.0]]
    assert data.take(nd.array([1, 5])).asnumpy().tolist() == [[3, 4], [3, 4]]
    assert data.take(nd.array([[2]]), mode="wrap").shape == (1, 1, 2)
    assert nd.array([1, 7]).one_hot(3).asnumpy().tolist() == [[0, 1, 0], [0, 0, 0]]
