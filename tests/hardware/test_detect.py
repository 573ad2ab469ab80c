"""What torch reports about devices; torch's functions are patched for other devices."""

import platform
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mezzo._errors import PolicyError
from mezzo._hardware.detect import Backend, _cpu_name, _device_count, find_device, probe

NO_GPU = torch.accelerator.current_accelerator(check_available=True) is None
without_gpu = pytest.mark.skipif(not NO_GPU, reason="for machines without an accelerator")


@pytest.fixture(autouse=True)
def _fresh_cache():
    _device_count.cache_clear()
    yield
    _device_count.cache_clear()


@pytest.fixture
def back_end(monkeypatch):
    """Replace torch's module for a device type."""

    def install(kind, **functions):
        module = ModuleType(f"torch.{kind}")
        for name, function in functions.items():
            setattr(module, name, function)
        monkeypatch.setattr(torch, "get_device_module", lambda _kind: module)

    return install


@pytest.fixture
def accelerator(monkeypatch):
    """Replace torch's current accelerator."""

    def install(kind, index, *, count=4):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index)

    return install


@without_gpu
def test_without_an_accelerator_the_device_is_the_cpu():
    assert find_device(None) == torch.device("cpu")


def test_the_current_accelerator_has_its_current_index(accelerator):
    accelerator("cuda", 2)
    assert find_device(None) == find_device("cuda") == torch.device("cuda:2")
    assert find_device("cuda:0") == torch.device("cuda:0")
    assert find_device("xpu") == torch.device("xpu:0")


def test_an_accelerator_without_devices_gives_the_cpu(accelerator):
    accelerator("cuda", 0, count=0)
    assert find_device(None) == torch.device("cpu")
    assert find_device("cuda") == torch.device("cuda:0")


@pytest.mark.parametrize("value", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_every_name_of_the_cpu_gives_one_device(value):
    assert find_device(value) == torch.device("cpu")


@without_gpu
@pytest.mark.parametrize("value", ["gpu", "", "cuda:x", 3, ["cpu"]])
def test_an_unknown_device_raises_with_the_devices_of_the_machine(value):
    with pytest.raises(PolicyError) as caught:
        find_device(value)
    message = str(caught.value)
    assert message.startswith(f"Unknown device {value!r}. This machine has: cpu. Pass one of these")
    assert "npu, mlu" in message


def test_the_message_lists_the_accelerator(accelerator):
    accelerator("xpu", 0)
    with pytest.raises(PolicyError, match="This machine has: cpu, xpu"):
        find_device("gpu")


@without_gpu
def test_without_a_cuda_build_a_cuda_device_is_absent(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    facts = probe(torch.device("cuda:0"))
    assert (
        facts.absent
        == f"no CUDA device is visible: torch {torch.__version__} is built without CUDA"
    )
    assert facts.name == "no CUDA device"


@without_gpu
def test_a_cuda_build_without_a_visible_device_gives_a_hint(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "check the driver" in probe(torch.device("cuda:0")).absent


@pytest.mark.parametrize("kind", ["hpu", "vulkan", "meta", "privateuseone"])
def test_a_device_type_without_a_back_end_is_absent(kind):
    assert probe(torch.device(kind, 0)).absent.startswith(
        f"no {kind.upper()} device is visible to torch"
    )


def test_an_index_past_the_last_device_is_absent(back_end):
    back_end("cuda", device_count=lambda: 2)
    assert probe(torch.device("cuda:2")).absent == "no CUDA device 2 is visible, torch sees 2"


def test_cuda_reports_name_and_compute_capability(back_end, monkeypatch):
    back_end("cuda", device_count=lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    facts = probe(torch.device("cuda:0"))
    assert (facts.backend, facts.name, facts.capability, facts.absent) == (
        Backend.CUDA,
        "NVIDIA H200",
        "9.0",
        None,
    )


def test_rocm_reports_its_architecture_without_build_options(back_end, monkeypatch):
    back_end("cuda", device_count=lambda: 1)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _device: SimpleNamespace(
            name="AMD Instinct MI250X", gcnArchName="gfx90a:sramecc+:xnack-"
        ),
    )
    facts = probe(torch.device("cuda:0"))
    assert (facts.device, facts.backend, facts.name, facts.capability) == (
        "cuda",
        Backend.ROCM,
        "AMD Instinct MI250X",
        "gfx90a",
    )


def test_xpu_reports_its_properties(back_end, monkeypatch):
    properties = SimpleNamespace(
        name="Intel Data Center GPU Max 1550",
        version="12.60.7",
        has_fp16=True,
        has_bfloat16_conversions=False,
    )
    back_end("xpu", device_count=lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _device: properties)
    facts = probe(torch.device("xpu:0"))
    assert (facts.backend, facts.name, facts.capability) == (
        Backend.XPU,
        "Intel Data Center GPU Max 1550",
        "12.60.7",
    )
    assert facts.features == {"has_fp16"}


@pytest.mark.parametrize(("recent", "features"), [(True, {"macos14"}), (False, set())])
def test_mps_reports_chip_and_system(back_end, monkeypatch, recent, features):
    back_end("mps", device_count=lambda: 1)
    monkeypatch.setattr(
        torch.backends.mps,
        "is_macos_or_newer",
        lambda major, minor: recent and (major, minor) == (14, 0),
    )
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3 Max")
    facts = probe(torch.device("mps:0"))
    assert (facts.backend, facts.name, facts.features) == (Backend.MPS, "Apple M3 Max", features)


def test_another_back_end_reports_its_own_facts(back_end):
    back_end(
        "mtia",
        device_count=lambda: 1,
        get_device_name=lambda _index: "MTIA 2i",
        get_device_capability=lambda _index: (2, 1),
        is_bf16_supported=lambda including_emulation=True: including_emulation,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    facts = probe(torch.device("mtia:0"))
    assert (facts.backend, facts.name, facts.capability) == (Backend.OTHER, "MTIA 2i", "2.1")
    assert facts.autocast
    assert facts.dtypes == {torch.float16, torch.bfloat16}
    assert (facts.bfloat16, facts.native_bfloat16) == (True, False)


def test_a_back_end_may_not_distinguish_emulation(back_end):
    back_end("mtia", device_count=lambda: 1, is_bf16_supported=lambda: True)
    facts = probe(torch.device("mtia:0"))
    assert (facts.bfloat16, facts.native_bfloat16) == (True, None)


def test_a_back_end_without_queries_reports_none(back_end, monkeypatch):
    monkeypatch.delattr(torch.accelerator, "get_device_capability", raising=False)
    back_end("mtia", device_count=lambda: 1)
    facts = probe(torch.device("mtia:0"))
    assert (facts.name, facts.capability, facts.dtypes, facts.bfloat16) == (
        "MTIA",
        None,
        None,
        None,
    )


def test_a_back_end_whose_queries_raise_reports_none(back_end):
    def refuse(*_arguments):
        raise NotImplementedError

    back_end(
        "mtia",
        device_count=lambda: 1,
        get_device_name=refuse,
        get_device_capability=refuse,
        is_bf16_supported=refuse,
        get_amp_supported_dtype=refuse,
    )
    facts = probe(torch.device("mtia:0"))
    assert (facts.name, facts.capability, facts.bfloat16) == ("MTIA", None, None)


def test_a_back_end_that_is_not_the_current_accelerator_is_queried(back_end, monkeypatch):
    def refuse(device):
        raise ValueError(f"{device.type} doesn't match the current accelerator cuda.")

    monkeypatch.setattr(torch.accelerator, "get_device_capability", refuse, raising=False)
    back_end("mtia", device_count=lambda: 1, get_device_name=lambda _index: "MTIA 2i")
    facts = probe(torch.device("mtia:0"))
    assert (facts.name, facts.dtypes) == ("MTIA 2i", None)


def test_a_capability_that_is_a_dictionary_is_ignored(back_end):
    back_end("mtia", device_count=lambda: 1, get_device_capability=lambda _index: {"cores": 8})
    assert probe(torch.device("mtia:0")).capability is None


def test_dtypes_come_from_torch_accelerator_if_the_back_end_lists_none(back_end, monkeypatch):
    monkeypatch.setattr(
        torch.accelerator,
        "get_device_capability",
        lambda _device: {"supported_dtypes": {torch.float16}},
        raising=False,
    )
    back_end("mtia", device_count=lambda: 1)
    assert probe(torch.device("mtia:0")).dtypes == {torch.float16}


def test_the_cpu_has_a_name_and_a_capability():
    facts = probe(torch.device("cpu"))
    assert facts.backend is Backend.CPU
    assert facts.name
    assert facts.capability == torch.backends.cpu.get_cpu_capability().lower()


def test_features_of_a_cpu_are_its_true_capabilities(monkeypatch):
    capabilities = {
        "architecture": "x86_64",
        "cpu_name": "AMD EPYC 9654",
        "avx512_bf16": True,
        "amx_bf16": False,
        "num_sockets": 1,
    }
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    facts = probe(torch.device("cpu"))
    assert (facts.name, facts.features) == ("AMD EPYC 9654", {"avx512_bf16"})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 7763\nstepping: 1\n", "AMD EPYC 7763"),
        ("model name:\nprocessor: 0\n", "from platform"),
        ("", "from platform"),
        (None, "from platform"),
    ],
)
def test_the_name_of_a_cpu_is_read_from_cpuinfo_or_platform(tmp_path, monkeypatch, text, name):
    monkeypatch.setattr(platform, "processor", lambda: "from platform")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert _cpu_name(tmp_path / "cpuinfo") == name


def test_a_cpu_without_a_name_is_called_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "")
    assert _cpu_name(tmp_path / "none") == "CPU"
