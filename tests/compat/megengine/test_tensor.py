"""`megengine.Tensor`, `tensor` and `Parameter`; `save` and `load`."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import mezzo.compat.megengine as mge


@pytest.mark.parametrize(
    ("data", "dtype", "expected"),
    [
        (np.zeros(2), None, torch.float32),
        (np.zeros(2), "int32", torch.int32),
        (np.zeros(2, dtype="int64"), None, torch.int64),
        (np.zeros(2), np.float64, torch.float64),
        (np.zeros(2), np.dtype("float16"), torch.float16),
        ([1, 2], torch.bfloat16, torch.bfloat16),
        (16.0, None, torch.float32),
    ],
    ids=["float64", "int32", "int64", "explicit", "numpy", "torch", "number"],
)
def test_dtypes_are_those_of_megengine(data, dtype, expected):
    assert mge.tensor(data, dtype=dtype).dtype is expected


def test_the_data_are_copied():
    data = np.ones(1, dtype="float32")
    tensor = mge.tensor(data)
    data[0] = 5.0
    assert tensor.item() == 1.0


def test_an_unknown_dtype_is_rejected_with_a_suggestion():
    with pytest.raises(ValueError, match=r"Unknown dtype 'flaot32'.*Did you mean 'float32'"):
        mge.tensor([1.0], dtype="flaot32")


def test_numpy_returns_the_values_of_tensors_with_gradients():
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight * mge.tensor([1.0, 2.0])).sum()
    assert isinstance(loss, mge.Tensor)
    assert loss.numpy() == 3.0
    assert mge.tensor([1.0], dtype="bfloat16").numpy().dtype == np.float32


def test_a_tensor_has_megengines_methods():
    x = mge.tensor(np.zeros((2, 3, 4)), dtype="float32")
    assert x.astype("int32").dtype is torch.int32
    assert x.transpose(2, 0, 1).shape == x.transpose((2, 0, 1)).shape == (4, 2, 3)
    assert x.transpose(0, 2).shape == (4, 3, 2)
    assert x.to("cpu0").device.type == x.to("cpu").device.type == "cpu"
    assert x.to(torch.float16).dtype is torch.float16
    assert mge.tensor is mge.Tensor


def test_a_tensor_can_be_copied_pickled_and_printed():
    x = mge.tensor([1.0, 2.0])
    for other in (copy.deepcopy(x), copy.copy(x), pickle.loads(pickle.dumps(x))):
        assert type(other) is mge.Tensor
        assert torch.equal(other, x)
    assert repr(x) == "Tensor([1., 2.])"


def test_a_parameter_is_torchs():
    parameter = mge.Parameter(np.ones(2))
    assert type(parameter) is torch.nn.Parameter
    assert (parameter.dtype, parameter.requires_grad) == (torch.float32, True)
    assert isinstance(torch.nn.Linear(1, 1).weight, mge.Parameter)
    assert not isinstance(mge.tensor([1.0]), mge.Parameter)


@pytest.mark.parametrize("data", [[[1.0], [1.0, 2.0]], "text", {"a": 1}, None], ids=str)
def test_data_that_are_no_array_are_refused_in_plain_words(data):
    with pytest.raises(TypeError, match=r"megengine.tensor takes an array, a list of numbers"):
        mge.tensor(data)


def test_saved_states_are_loaded_again(tmp_path):
    net = torch.nn.Linear(2, 1)
    mge.save({"net": net.state_dict(), "epoch": 3}, tmp_path / "state.pkl")
    state = mge.load(tmp_path / "state.pkl", map_location="cpu0")
    assert torch.equal(state["net"]["weight"], net.weight)
    assert state["epoch"] == 3
    assert mge.load(tmp_path / "state.pkl", map_location={"xpu0": "cpu0"})["epoch"] == 3


def test_a_pickle_of_arrays_is_loaded_and_other_objects_are_refused():
    arrays = {"weight": np.ones(2, "float32"), "step": np.int64(3)}
    loaded = mge.load(io.BytesIO(pickle.dumps(arrays, protocol=4)))
    assert loaded["weight"].tolist() == [1.0, 1.0]
    old_names = pickle.dumps(arrays, protocol=2).replace(b"numpy._core", b"numpy.core")
    assert mge.load(io.BytesIO(old_names))["step"] == 3
    with pytest.raises(pickle.UnpicklingError, match=r"refers to builtins.print.*state_dict"):
        mge.load(io.BytesIO(pickle.dumps(print)))


def test_random_tensors_have_megengines_arguments_and_dtypes():
    mge.random.seed(1)
    values = mge.random.normal(10.0, 0.1, (100,))
    assert (values.dtype, round(values.mean().item())) == (torch.float32, 10)
    low = mge.random.uniform(2.0, 3.0, size=(4, 5))
    assert low.shape == (4, 5)
    assert bool(((low >= 2.0) & (low < 3.0)).all())
    order = mge.random.permutation(5)
    assert (order.dtype, sorted(order.numpy().tolist())) == (torch.int32, [0, 1, 2, 3, 4])
    assert mge.random.uniform().shape == (1,)
    with pytest.raises(AttributeError, match=r"Use torch.poisson"):
        mge.random.poisson()
