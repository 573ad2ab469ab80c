"""`paddle.Tensor`: Paddle's methods on a subclass of torch's tensors."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.compat import paddle
from mezzo.compat.paddle._tensor import Gradient, Parameter, Shape


def make(*shape, **options):
    torch.manual_seed(0)
    return paddle.to_tensor(torch.randn(*shape), place="cpu", **options)


def test_results_of_torch_functions_stay_tensors_of_paddle():
    x = make(4, 3)
    for result in (x + 1, 1 - x, x @ x.T, torch.relu(x), x[0], x.mean(), x.detach(), x.float()):
        assert type(result) is paddle.Tensor
    assert [type(part) for part in torch.chunk(x, 2)] == [paddle.Tensor] * 2
    assert type(x.topk(2).values) is paddle.Tensor
    assert type(x + torch.ones(3)) is type(torch.ones(3) + x) is paddle.Tensor


def test_a_result_that_is_an_argument_keeps_its_type():
    plain = torch.zeros(3)
    assert plain.add_(make(3)) is plain
    assert torch.add(make(3), 1, out=plain) is plain
    assert type(plain) is torch.Tensor


def test_a_result_is_not_a_view_of_a_plain_one():
    result = make(3, stop_gradient=False) * 2
    assert result._base is None
    assert type(result.grad_fn).__name__ == "MulBackward0"


def test_a_loss_that_needs_gradients_becomes_an_array_and_a_number():
    loss = (make(3, stop_gradient=False) * 2).sum()
    value = loss.item()
    assert loss.numpy() == np.float32(value)
    assert loss.numpy().dtype == np.float32
    assert (float(loss), f"{loss:.3f}") == (value, f"{value:.3f}")
    assert np.asarray(loss) == np.float32(value)
    assert int(make(1) * 0 + 3) == 3


def test_bfloat16_becomes_a_uint16_array_as_in_paddle():
    assert make(2).astype("bfloat16").numpy().dtype == np.uint16


def test_gradients_have_paddles_methods():
    x = make(3, stop_gradient=False)
    (x * 2).sum().backward()
    assert x.grad.numpy().tolist() == [2.0, 2.0, 2.0] == x.gradient().tolist()
    x.clear_gradient()
    assert x.grad.numpy().tolist() == [0.0, 0.0, 0.0]
    x.clear_grad(set_to_zero=False)
    assert x.grad is None is x.gradient()


def test_stop_gradient_is_requires_grad_negated():
    x = make(2)
    assert x.stop_gradient
    x.stop_gradient = False
    assert x.requires_grad
    y = x * 2
    y.stop_gradient = True
    assert (y.stop_gradient, y.is_leaf) == (True, True)
    labels = paddle.to_tensor([1, 2], stop_gradient=False)
    assert labels.stop_gradient


def test_to_moves_in_place_only_with_an_underscore():
    x = make(2)
    assert x._to(paddle.CPUPlace()) is x
    assert x._to(dtype="float16").dtype is torch.float16 is x.dtype
    assert x.to("float64").dtype is torch.float64
    assert x.to("cpu", "float32").dtype is torch.float32
    assert x.to(device=paddle.CPUPlace(), dtype="int64", blocking=True).dtype is torch.int64
    assert x.dtype is torch.float16
    assert repr(x.place) == "Place(cpu)"


def test_casts_take_names_and_refuse_unknown_ones():
    assert make(2).astype("int32").dtype is torch.int32
    assert make(2).cast(np.float64).dtype is torch.float64
    assert make(2).astype(np.dtype("float16")).dtype is paddle.float16
    with pytest.raises(TypeError, match=r"dtype must be one of bool, uint8.* but got 'float31'"):
        make(2).astype("float31")


def test_a_shape_equals_a_list_and_works_as_a_tuple():
    shape = make(2, 3).shape
    assert shape == [2, 3]
    assert shape == (2, 3)
    assert shape != [3, 2]
    assert (repr(shape), shape + [1], shape.numel()) == ("[2, 3]", [2, 3, 1], 6)  # noqa: RUF005
    assert torch.zeros(shape).shape == shape
    assert {shape: 1} == {(2, 3): 1}
    assert Shape((1,)) + (2,) == (1, 2)  # noqa: RUF005


def test_methods_take_the_arguments_of_both_systems():
    x = make(4, 6)
    assert x.transpose([1, 0]).shape == x.transpose(perm=[1, 0]).shape == x.transpose(0, 1).shape
    assert x.flatten(start_axis=0).shape == x.flatten(start_dim=0).shape == [24]
    assert x.reshape([2, -1]).shape == x.reshape(2, 12).shape == [2, 12]
    assert x.reshape([0, 3, -1]).shape == [4, 3, 2]
    assert x.max(axis=1).shape == [4]
    assert x.min(1, keepdim=True).shape == [4, 1]
    assert x.max(dim=1).values.shape == [4]
    assert x.max().item() == x.numpy().max()
    assert x.max(torch.zeros(6)).shape == [4, 6]


def test_split_takes_a_number_of_parts_and_torchs_function_a_size():
    x = make(6)
    assert [part.shape[0] for part in x.split(2)] == [3, 3]
    assert [part.shape[0] for part in x.split([1, -1])] == [1, 5]
    assert [part.shape[0] for part in torch.split(x, 2)] == [2, 2, 2]
    assert [part.shape[0] for part in x.split(split_size=4)] == [4, 2]
    with pytest.raises(ValueError, match="size 6 of axis 0 cannot be split into 4 equal parts"):
        x.split(4)


def test_set_value_copies_and_checks_the_shape():
    x = make(2, stop_gradient=False)
    x.set_value(np.array([1.0, 2.0]))
    assert x.numpy().tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"shape of value is \[3\].* tensor is \[2\]"):
        x.set_value([1, 2, 3])


def test_copies_keep_the_type_and_files_hold_plain_tensors():
    x = make(2, stop_gradient=False)
    for copied in (copy.copy(x), copy.deepcopy(x)):
        assert type(copied) is paddle.Tensor
        assert (copied.stop_gradient, copied.is_leaf) == (False, True)
    assert copy.copy(x).data_ptr() == x.data_ptr() != copy.deepcopy(x).data_ptr()
    assert type(pickle.loads(pickle.dumps(x))) is torch.Tensor
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["x"], x)


def test_printing_shows_what_paddle_shows():
    assert repr(paddle.to_tensor([1.5, 2.0], place="cpu")) == (
        "Tensor(shape=[2], dtype=float32, place=Place(cpu), stop_gradient=True,\n       [1.5, 2. ])"
    )
    assert "dtype=bfloat16" in repr(make(2).astype("bfloat16"))
    assert "shape=[2]" in repr(torch.ones(2, device="meta").as_subclass(paddle.Tensor))
    assert repr(Parameter(torch.ones(1))).startswith("Parameter containing:\nTensor(shape=[1]")
    assert "stop_gradient=True" in f"{make(2)}"


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (1, torch.int64),
        ([1.0], torch.float32),
        (np.ones(2), torch.float64),
        ([np.ones(2, "float32"), np.zeros(2, "float32")], torch.float32),
        (torch.ones(2, dtype=torch.float16), torch.float16),
        (True, torch.bool),
    ],
    ids=["int", "list", "array", "arrays", "tensor", "bool"],
)
def test_to_tensor_copies_data_in_its_dtype(data, dtype):
    tensor = paddle.to_tensor(data, place="cpu")
    assert (type(tensor), tensor.dtype) == (paddle.Tensor, dtype)
    assert paddle.to_tensor(data, dtype="float32", place="cpu").dtype is torch.float32


def test_to_tensor_does_not_share_memory():
    array = np.zeros(2)
    paddle.to_tensor(array, place="cpu").add_(1)
    assert array.tolist() == [0.0, 0.0]


def test_parameters_are_torchs_with_paddles_methods():
    weight = Parameter(torch.ones(2, 3))
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, paddle.Tensor)
    assert (weight.shape, weight.stop_gradient, weight.trainable) == ([2, 3], False, True)
    assert weight.numpy().sum() == 6.0
    weight.trainable = False
    assert weight.stop_gradient
    assert type(copy.deepcopy(weight)) is type(pickle.loads(pickle.dumps(weight))) is Parameter


def test_the_gradient_of_a_parameter_is_one_object_with_paddles_methods():
    weight = Parameter(torch.ones(2))
    (weight * 3).sum().backward()
    gradient = weight.grad
    assert type(gradient) is Gradient
    assert gradient is weight.grad
    assert gradient.numpy().tolist() == [3.0, 3.0]
    assert (gradient.shape, gradient.place) == ([2], weight.place)
    assert type(gradient * 2) is torch.Tensor
    weight.grad = None
    assert weight.grad is None
    weight.grad = torch.ones(2)
    del weight.grad
    assert weight.grad is None


def test_autocast_and_a_scaler_work_with_tensors():
    weight = Parameter(torch.ones(3, 2))
    x = make(4, 3)
    with paddle.amp.auto_cast(dtype="bfloat16"):
        product = x @ weight
    assert (type(product), product.dtype) == (paddle.Tensor, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ weight).dtype is torch.bfloat16
    scaled = paddle.amp.GradScaler(init_loss_scaling=8.0).scale(x.sum())
    assert type(scaled) is paddle.Tensor
    assert scaled.item() == pytest.approx(8 * x.sum().item())


def test_importing_and_using_tensors_leaves_torch_unchanged():
    before = dict(vars(torch.Tensor)), dict(vars(nn.Parameter))
    loss = (make(2, stop_gradient=False) * Parameter(torch.ones(2))).sum()
    loss.backward()
    loss.numpy()
    assert (dict(vars(torch.Tensor)), dict(vars(nn.Parameter))) == before
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ones(1, requires_grad=True).numpy()


def test_backward_of_a_tensor_that_needs_no_gradient_says_why():
    with pytest.raises(RuntimeError, match=r"stop_gradient=True: it depends on no parameter"):
        paddle.to_tensor([1.0]).sum().backward()
    scaled = paddle.amp.GradScaler(init_loss_scaling=2.0).scale(paddle.to_tensor(1.0))
    with pytest.raises(RuntimeError, match=r"stop_gradient=True"):
        scaled.backward()


def test_backward_takes_paddles_arguments():
    x = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    y = x * x
    y.backward(grad_tensor=paddle.to_tensor([1.0, 10.0]), retain_graph=True)
    assert x.grad.tolist() == [2.0, 40.0]


def test_a_shape_that_is_no_shape_is_named():
    with pytest.raises(TypeError, match=r"shape should be integers such as \[2, 3\], got 'a'"):
        paddle.zeros("a")


def test_methods_take_paddles_arguments_or_torchs():
    x = paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]])
    index = paddle.to_tensor([1])
    assert x.unsqueeze([0, 2]).shape == [1, 2, 1, 2]
    assert x.unsqueeze(axis=1).shape == x.unsqueeze(dim=1).shape == [2, 1, 2]
    assert x.gather(index).tolist() == x.gather(index, axis=0).tolist() == [[3.0, 4.0]]
    assert x.gather(1, paddle.to_tensor([[1], [0]])).tolist() == [[2.0], [3.0]]
    assert x.index_select(index, axis=1).tolist() == x.index_select(1, index).tolist()
    assert torch.equal(x.matmul(x, transpose_y=True), x @ x.mT)
    assert torch.equal(x.matmul(x, transpose_x=True), x.mT @ x)
    assert x.scale(2.0, 1.0).tolist() == [[3.0, 5.0], [7.0, 9.0]]
    assert x.greater_than(x.mT).tolist() == [[False, False], [True, False]]
    with paddle.amp.auto_cast(dtype="bfloat16"):
        assert x.matmul(x, transpose_y=True).dtype is torch.bfloat16
