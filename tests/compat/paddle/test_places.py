"""Places, the default place, and what `paddle.device` reports about this machine."""

from __future__ import annotations

import warnings

import pytest
import torch

from mezzo.compat import paddle
from mezzo.compat.paddle import _places
from mezzo.compat.paddle._places import device_of

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def fresh_places(monkeypatch):
    monkeypatch.setattr(_places, "_default_device", None)
    monkeypatch.setattr(_places, "_warned", set())


@pytest.fixture
def two_gpus(monkeypatch):
    """Make the dialect see a machine with two GPUs."""
    counts = {"cpu": 1, "gpu": 2, "cuda": 2}
    monkeypatch.setattr(_places, "device_count", lambda name: counts.get(name, 0))
    monkeypatch.setattr(_places, "_best_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(_places, "_current_index", lambda _: 0)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("place", "device"),
    [
        (lambda: paddle.CPUPlace(), "cpu"),
        (lambda: paddle.CUDAPinnedPlace(), "cpu"),
        (lambda: paddle.CUDAPlace(1), "cuda:1"),
        (lambda: "gpu", "cuda:0"),
        (lambda: "gpu:1", "cuda:1"),
        (lambda: "cuda:0", "cuda:0"),
        (lambda: torch.device("cpu"), "cpu"),
        (lambda: None, "cuda:0"),
    ],
)
def test_a_place_or_name_gives_a_torch_device(place, device):
    assert device_of(place()) == torch.device(device)


@pytest.mark.parametrize("place", ["gpu0", "abacus", "gpu:", 3, ["gpu"]], ids=str)
def test_an_invalid_place_raises(place):
    with pytest.raises(
        ValueError, match=r"The device must be a string such as 'cpu', 'gpu', 'gpu:0'"
    ):
        device_of(place)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("make", [lambda: paddle.CUDAPlace(7), lambda: device_of("gpu:7")])
def test_a_gpu_beyond_the_machines_raises(make):
    message = (
        r"Invalid CUDAPlace\(7\), must inside \[0, 2\), because GPU number on your machine is 2"
    )
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: paddle.CUDAPlace(-1), ValueError, r"Invalid CUDAPlace\(-1\), must"),
        (lambda: paddle.CUDAPlace("0"), TypeError, "device id '0', which is str"),
        (lambda: paddle.NPUPlace([0]), TypeError, r"NPUPlace\(\[0\]\) has the device id \[0\]"),
        (lambda: paddle.CustomPlace(0), TypeError, r"CustomPlace\('npu', 0\)"),
        (lambda: paddle.set_device(None), ValueError, "a place, but got None"),
    ],
    ids=["negative", "str", "list", "custom", "None"],
)
def test_an_invalid_device_id_raises(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_places_print_paddles_names_and_compare_by_them():
    assert [repr(place) for place in (paddle.CUDAPlace(0), paddle.CPUPlace())] == [
        "Place(gpu:0)",
        "Place(cpu)",
    ]
    assert paddle.CustomPlace("npu", 0) == paddle.NPUPlace(0) != paddle.NPUPlace(1)
    assert len({paddle.CUDAPlace(0), paddle.CUDAPlace(0), paddle.XPUPlace(0)}) == 2


def test_places_answer_what_they_are():
    place = paddle.CUDAPlace(0)
    assert (place.get_device_id(), place.gpu_device_id(), place.get_device_type()) == (0, 0, "gpu")
    assert [
        (one.is_cpu_place(), one.is_gpu_place(), one.is_xpu_place(), one.is_custom_place())
        for one in (paddle.CPUPlace(), place, paddle.XPUPlace(0), paddle.MLUPlace(0))
    ] == [
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
    ]
    assert paddle.CUDAPinnedPlace().is_cuda_pinned_place()


# -- devices that this machine lacks ---------------------------------------------------------------


@without_gpu
def test_a_gpu_place_without_a_gpu_uses_the_cpu_and_warns_once_in_the_callers_file():
    with pytest.warns(
        UserWarning, match=r"^CUDAPlace\(0\) is used .* without GPU.*Place\(cpu\) is used instead"
    ) as warned:
        devices = [device_of(place) for place in (paddle.CUDAPlace(0), "gpu", paddle.CUDAPlace(1))]
    assert devices == [torch.device("cpu")] * 3
    assert [one.filename for one in warned] == [__file__]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "make",
    [
        lambda: paddle.XPUPlace(0),
        lambda: paddle.NPUPlace(0),
        lambda: paddle.MLUPlace(0),
        lambda: paddle.IPUPlace(),
        lambda: paddle.CustomPlace("gcu", 0),
        lambda: "npu:0",
    ],
)
def test_a_place_that_the_machine_lacks_is_the_default_place(make):
    with pytest.warns(UserWarning, match=r"Place\(gpu:0\) is used instead"):
        assert device_of(make()) == torch.device("cuda", 0)


@without_gpu
def test_setting_a_missing_gpu_sets_the_cpu_and_warns():
    assert not paddle.is_compiled_with_cuda()
    with pytest.warns(UserWarning, match=r"CUDAPlace\(0\) is used on a machine without GPU"):
        assert paddle.set_device("gpu") == paddle.CPUPlace()
    assert paddle.get_device() == "cpu"


def test_creating_a_place_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paddle.CUDAPlace(0)


# -- the default place -----------------------------------------------------------------------------


def test_set_device_sets_the_default_place():
    assert paddle.set_device("cpu") == paddle.CPUPlace()
    assert paddle.get_device() == "cpu"
    assert device_of(None) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_set_device_leaves_torchs_default_device_as_it_is():
    before = torch.get_default_device()
    assert paddle.get_device() == "gpu:0"
    assert paddle.set_device("gpu:1") == paddle.CUDAPlace(1)
    assert (paddle.get_device(), device_of(None)) == ("gpu:1", torch.device("cuda", 1))
    assert torch.get_default_device() == before
    assert torch.empty(0).device == before


# -- paddle.device ---------------------------------------------------------------------------------


def test_what_is_compiled_is_what_this_machine_has():
    here = {
        "cuda": torch.cuda.is_available(),
        "rocm": torch.cuda.is_available() and torch.version.hip is not None,
        "xpu": torch.xpu.is_available(),
        "npu": False,
        "mlu": False,
        "ipu": False,
        "cinn": False,
        "distribute": torch.distributed.is_available(),
    }
    assert {
        name: (
            getattr(paddle, f"is_compiled_with_{name}")(),
            getattr(paddle.device, f"is_compiled_with_{name}")(),
        )
        for name in here
    } == {name: (value, value) for name, value in here.items()}
    assert not paddle.device.is_compiled_with_custom_device("npu")


@without_gpu
def test_devices_of_a_machine_without_accelerators():
    assert paddle.device.get_available_device() == ["cpu"]
    assert paddle.device.get_all_device_type() == ["cpu"]
    assert paddle.device.get_all_custom_device_type() == []
    assert paddle.device.get_available_custom_device() == []
    assert paddle.device.get_cudnn_version() is None
    assert paddle.device.cuda.device_count() == 0
    paddle.device.synchronize()


def test_devices_are_listed_by_paddles_names(monkeypatch):
    counts = {"cpu": 1, "gpu": 2, "npu": 1}
    monkeypatch.setattr(paddle.device, "device_count", lambda name: counts.get(name, 0))
    assert paddle.device.get_available_device() == ["cpu", "gpu:0", "gpu:1", "npu:0"]
    assert paddle.device.get_available_custom_device() == ["npu:0"]


@without_gpu
def test_without_a_gpu_no_memory_is_used_and_properties_raise():
    cuda = paddle.device.cuda
    assert [cuda.memory_allocated(), cuda.max_memory_allocated("gpu:0")] == [0, 0]
    assert [cuda.memory_reserved(), cuda.max_memory_reserved()] == [0, 0]
    cuda.synchronize()
    cuda.empty_cache()
    for name in ("get_device_capability", "get_device_name", "get_device_properties"):
        with pytest.raises(ValueError, match=rf"paddle.device.cuda.{name}\(\) needs a GPU"):
            getattr(cuda, name)()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("device.cuda.Stream", "Use torch.cuda.Stream"),
        ("static.nn", "Use the layers of paddle.nn"),
        ("static.amp.bf16", r"Use static.amp.decorate\(optimizer, dtype='bfloat16'\)"),
        ("device.nope", "mezzo.compat.paddle.device has no nope"),
    ],
)
def test_a_missing_name_raises_with_what_to_use(name, remedy):
    *modules, last = name.split(".")
    module = paddle
    for part in modules:
        module = getattr(module, part)
    with pytest.raises(AttributeError, match=remedy):
        getattr(module, last)
