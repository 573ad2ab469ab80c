"""Functions of `paddle` itself: creation, math, gradients, files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from mezzo.compat import paddle

X = np.arange(24, dtype="float32").reshape(2, 3, 4)


@pytest.fixture
def x():
    return paddle.to_tensor(X, place="cpu")


@pytest.mark.parametrize(
    ("call", "shape", "dtype"),
    [
        (lambda: paddle.zeros([2, 3]), [2, 3], torch.float32),
        (lambda: paddle.ones(shape=(2,), dtype="int32"), [2], torch.int32),
        (lambda: paddle.full([1], 2.5), [1], torch.float32),
        (lambda: paddle.full([1], True), [1], torch.bool),
        (lambda: paddle.empty([2]), [2], torch.float32),
        (lambda: paddle.eye(2, 3), [2, 3], torch.float32),
        (lambda: paddle.arange(5), [5], torch.int64),
        (lambda: paddle.arange(0, 1, 0.25), [4], torch.float32),
        (lambda: paddle.arange(3, dtype="float32"), [3], torch.float32),
        (lambda: paddle.linspace(0, 1, 5), [5], torch.float32),
        (lambda: paddle.rand([2]), [2], torch.float32),
        (lambda: paddle.randn(shape=[2, 1], dtype="float64"), [2, 1], torch.float64),
        (lambda: paddle.normal(1.0, 2.0, shape=[3]), [3], torch.float32),
        (lambda: paddle.normal(paddle.zeros([2])), [2], torch.float32),
        (lambda: paddle.uniform([3], min=0.0), [3], torch.float32),
        (lambda: paddle.randint(0, 5, [4]), [4], torch.int64),
        (lambda: paddle.randperm(4), [4], torch.int64),
        (lambda: paddle.zeros_like(paddle.ones([2]), "int64"), [2], torch.int64),
        (lambda: paddle.ones_like(paddle.ones([2])), [2], torch.float32),
        (lambda: paddle.full_like(paddle.ones([2]), 3), [2], torch.float32),
        (lambda: paddle.assign([1, 2]), [2], torch.int64),
        (lambda: paddle.zeros(paddle.to_tensor([1, 2])), [1, 2], torch.float32),
        (lambda: paddle.zeros(3), [3], torch.float32),
    ],
)
def test_creation_functions_take_paddles_arguments(call, shape, dtype):
    made = call()
    assert (type(made), made.shape, made.dtype) == (paddle.Tensor, shape, dtype)


def test_a_seed_repeats_random_numbers():
    paddle.seed(3)
    first = paddle.rand([4])
    paddle.seed(3)
    assert torch.equal(first, paddle.rand([4]))
    with pytest.raises(ValueError, match=r"Call paddle.seed"):
        paddle.uniform([2], seed=3)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: paddle.mean(x, axis=[0, 1]), X.mean((0, 1))),
        (lambda x: paddle.sum(x, 1, "int64", True), X.sum(1, keepdims=True)),
        (lambda x: paddle.max(x, axis=-1), X.max(-1)),
        (lambda x: paddle.min(x), X.min()),
        (lambda x: paddle.prod(x[0], axis=0), X[0].prod(0)),
        (lambda x: paddle.std(x, axis=0), X.std(0, ddof=1)),
        (lambda x: paddle.var(x, unbiased=False), X.var()),
        (lambda x: paddle.norm(x), np.sqrt((X**2).sum())),
        (lambda x: paddle.argmax(x, axis=2), X.argmax(2)),
        (lambda x: paddle.cumsum(x), X.cumsum()),
        (lambda x: paddle.sort(x, descending=True), X[..., ::-1]),
        (lambda x: paddle.topk(x, 2)[0], X[..., :1:-1]),
        (lambda x: paddle.any(x > 100), False),
        (lambda x: paddle.all(x >= 0, axis=0), np.ones((3, 4), bool)),
        (lambda x: paddle.logsumexp(x[0] / 9, axis=1), np.log(np.exp(X[0] / 9).sum(1))),
        (lambda x: paddle.numel(x), 24),
        (lambda x: paddle.shape(x), [2, 3, 4]),
        (lambda x: paddle.reshape(x, [0, -1]), X.reshape(2, 12)),
        (lambda x: paddle.transpose(x, perm=[2, 0, 1]), X.transpose(2, 0, 1)),
        (lambda x: paddle.flatten(x, start_axis=1), X.reshape(2, 12)),
        (lambda x: paddle.concat([x, x], axis=1), np.concatenate([X, X], 1)),
        (lambda x: paddle.stack([x, x], axis=1), np.stack([X, X], 1)),
        (lambda x: paddle.split(x, 2)[1], X[1:]),
        (lambda x: paddle.split(x, [1, -1], axis=1)[1], X[:, 1:]),
        (lambda x: paddle.chunk(x, 2)[0], X[:1]),
        (lambda x: paddle.squeeze(paddle.unsqueeze(x, [0, 1]), axis=[0, 1]), X),
        (lambda x: paddle.unbind(x)[1], X[1]),
        (lambda x: paddle.tile(x[0, 0], [2]), np.tile(X[0, 0], 2)),
        (lambda x: paddle.expand(x[0], [2, -1, -1])[1], X[0]),
        (lambda x: paddle.gather(x, paddle.to_tensor([1, 0])), X[[1, 0]]),
        (lambda x: paddle.where(x > 3, x, paddle.zeros_like(x)), np.where(X > 3, X, 0)),
        (lambda x: paddle.masked_select(x, x > 20), X[X > 20]),
        (lambda x: paddle.nonzero(x > 22), np.argwhere(X > 22)),
        (lambda x: paddle.matmul(x, x, transpose_y=True), X @ X.transpose(0, 2, 1)),
        (lambda x: paddle.einsum("abc->ac", x), X.sum(1)),
        (lambda x: paddle.add(x, y=x), X + X),
        (lambda x: paddle.divide(x, paddle.full_like(x, 2)), X / 2),
        (lambda x: paddle.equal(x, x), np.ones_like(X, bool)),
        (lambda x: paddle.pow(x, 2), X**2),
        (lambda x: paddle.scale(x, 2.0, bias=1.0, bias_after_scale=False), (X + 1) * 2),
        (lambda x: paddle.clip(x, max=3), X.clip(max=3)),
        (lambda x: paddle.exp(x / 9, name="e"), np.exp(X / 9)),
        (lambda x: paddle.tril(x), np.tril(X)),
        (lambda x: paddle.cast(x, "int64"), X),
        (lambda x: paddle.squeeze(x[:1]), X[0]),
        (lambda x: paddle.index_select(x, paddle.to_tensor([2]), axis=1), X[:, 2:]),
    ],
)
def test_functions_take_paddles_arguments_and_compute_what_numpy_computes(call, expected, x):
    result = call(x)
    assert type(result) is paddle.Tensor
    assert result.numpy() == pytest.approx(np.asarray(expected), rel=1e-5)


def test_every_function_of_the_table_works(x):
    for name in ("abs", "sqrt", "tanh", "isnan", "square", "sign"):
        assert getattr(paddle, name)(x).shape == [2, 3, 4]
        assert getattr(paddle, name).__name__ == name
    assert paddle.is_tensor(x)
    assert not paddle.is_tensor(X)


def test_gradients_come_as_a_list():
    x = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    (first,) = paddle.grad([(x * x).sum()], [x], create_graph=True)
    assert first.numpy().tolist() == [2.0, 4.0]
    (second,) = paddle.grad(first.sum(), x)
    assert second.numpy().tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="no_grad_vars is not supported"):
        paddle.grad(first.sum(), x, no_grad_vars=[x])


def test_no_grad_is_a_context_and_a_decorator():
    weight = paddle.nn.Linear(2, 1)

    @paddle.no_grad()
    def infer(x):
        return weight(x)

    assert infer(paddle.ones([1, 2])).stop_gradient
    with paddle.no_grad():
        assert weight(paddle.ones([1, 2])).stop_gradient


def test_only_float32_is_a_default_dtype():
    paddle.set_default_dtype("float32")
    assert paddle.get_default_dtype() == "float32"
    with pytest.raises(ValueError, match=r"Use paddle.amp.decorate"):
        paddle.set_default_dtype("float16")


# -- files -----------------------------------------------------------------------------------------


def test_state_dicts_are_saved_and_loaded(tmp_path):
    layer, other = paddle.nn.Linear(2, 3), paddle.nn.Linear(2, 3)
    path = tmp_path / "new" / "net.pdparams"
    paddle.save(layer.state_dict(), path)
    loaded = paddle.load(str(path))
    assert {type(value) for value in loaded.values()} == {paddle.Tensor}
    other.set_state_dict(loaded)
    assert torch.equal(other.weight, layer.weight)
    assert type(paddle.load(path, return_numpy=True)["weight"]) is np.ndarray
    assert torch.load(path, weights_only=True).keys() == {"weight", "bias"}


def test_a_file_that_paddle_itself_wrote_is_loaded(tmp_path):
    path = tmp_path / "paddle.pdparams"
    arrays = {"weight": X[0], "bias": X[0, 0], "StructuredToParameterName@@": {"weight": "w_0"}}
    path.write_bytes(pickle.dumps(arrays, protocol=4))
    loaded = paddle.load(path)
    assert loaded.keys() == {"weight", "bias"}
    layer = paddle.nn.Linear(3, 4)
    layer.set_state_dict(loaded)
    assert layer.weight.numpy().tolist() == X[0].tolist()
    path.write_bytes(pickle.dumps({"lr": 0.1, "w": ("w_0", X), "l": [X]}, protocol=4))
    assert paddle.load(path)["w"].shape == [2, 3, 4]
    assert paddle.load(path, return_numpy=True)["l"][0].shape == (2, 3, 4)


def test_a_file_with_code_is_rejected(tmp_path):
    path = tmp_path / "code.pdparams"
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"it contains builtins.print"):
        paddle.load(path)
    with pytest.raises(ValueError, match="does not exist"):
        paddle.load(tmp_path / "missing")


def test_values_are_taken_and_put_by_their_index():
    x = paddle.to_tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    index = paddle.to_tensor([[2, 0]])
    assert paddle.take_along_axis(x, index, axis=1).tolist() == [[3.0, 1.0], [6.0, 4.0]]
    assert paddle.take_along_axis(x, index, 1, broadcast=False).tolist() == [[3.0, 1.0]]
    assert paddle.index_sample(x, paddle.to_tensor([[0], [2]])).tolist() == [[1.0], [6.0]]
    assert paddle.gather_nd(x, paddle.to_tensor([[1], [0]]))[0].tolist() == [4.0, 5.0, 6.0]
    put = paddle.put_along_axis(x, index, 0.0, axis=1)
    assert put.tolist() == [[0.0, 2.0, 0.0], [4.0, 5.0, 6.0]]
    added = paddle.put_along_axis(x, index, 1.0, axis=1, reduce="add")
    assert added[0].tolist() == [2.0, 2.0, 4.0]
    with pytest.raises(ValueError, match="reduce='mul' is not supported"):
        paddle.put_along_axis(x, index, 1.0, 1, "mul")


def test_axes_are_moved_repeated_and_cut():
    x = paddle.to_tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert paddle.flip(x, 1)[0].tolist() == [3.0, 2.0, 1.0]
    assert paddle.roll(x, 1, axis=1)[0].tolist() == [3.0, 1.0, 2.0]
    assert paddle.expand_as(x[:1], x).shape == [2, 3]
    assert paddle.repeat_interleave(x, 2, axis=0).shape == [4, 3]
    assert paddle.moveaxis(x, 0, 1).shape == [3, 2]
    assert paddle.slice(x, [0, 1], [0, 1], [1, 3]).tolist() == [[2.0, 3.0]]
    assert [grid.shape for grid in paddle.meshgrid(x[0], x[1])] == [[3, 3], [3, 3]]
    assert paddle.rank(x).item() == 2
    assert paddle.clone(x) is not x


def test_sums_and_extremes():
    x = paddle.to_tensor([[1.4, 2.6], [2.0, 0.0]])
    assert paddle.amax(x).item() == pytest.approx(2.6)
    assert paddle.amin(x, axis=1).tolist() == pytest.approx([1.4, 0.0])
    assert paddle.round(x).tolist() == [[1.0, 3.0], [2.0, 0.0]]
    assert paddle.add_n([x, x, x]).tolist() == (3 * x).tolist()
    assert paddle.add_n(x) is x
    assert paddle.addmm(x, x, x, beta=0.0).tolist() == (x @ x).tolist()
    assert paddle.allclose(x, x + 1e-9).item() is True
    assert paddle.multinomial(paddle.to_tensor([0.0, 1.0]), 1).tolist() == [1]


def test_gradients_are_clipped_by_a_function():
    layer = paddle.nn.Linear(1, 1, bias_attr=False)
    (layer.weight * 4.0).sum().backward()
    norm = paddle.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert (float(norm), layer.weight.grad.item()) == (4.0, pytest.approx(1.0))
    paddle.nn.utils.clip_grad_value_(layer.parameters(), 0.5)
    assert layer.weight.grad.item() == 0.5
    vector = paddle.nn.utils.parameters_to_vector(layer.parameters())
    paddle.nn.utils.vector_to_parameters(vector * 0.0, layer.parameters())
    assert layer.weight.item() == 0.0
