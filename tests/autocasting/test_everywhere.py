import pytest
import torch

import mezzo
from mezzo.autocasting import autocast as module
from mezzo.autocasting.autocast import (
    autocast_all_devices,
    device_types,
    disable_autocast,
    set_thread_region,
    thread_region,
)


def product():
    return torch.ones(2, 2) @ torch.ones(2, 2)


def test_the_cpu_is_among_the_devices_whatever_else_there_is(monkeypatch):
    monkeypatch.setattr(module, "hardware", lambda: type("Hardware", (), {"device": "cuda"}))

    assert device_types() == ("cpu", "cuda")


def test_a_machine_without_an_accelerator_has_one_region(monkeypatch):
    monkeypatch.setattr(module, "hardware", lambda: type("Hardware", (), {"device": "cpu"}))

    assert device_types() == ("cpu",)


def test_tensors_on_the_cpu_are_cast():
    with autocast_all_devices(preset="megengine", dtype="bfloat16"):
        assert product().dtype is torch.bfloat16
    assert product().dtype is torch.float32


def test_an_inner_region_that_is_off_switches_the_outer_one_off():
    with (
        autocast_all_devices(preset="megengine", dtype="bfloat16"),
        autocast_all_devices(preset="megengine", enabled=False),
    ):
        assert product().dtype is torch.float32


def test_precision_is_restored_when_the_body_raises():
    with pytest.raises(KeyError), autocast_all_devices(preset="megengine", dtype="bfloat16"):
        raise KeyError
    assert product().dtype is torch.float32


def test_as_a_decorator_every_call_runs_inside():
    assert (
        autocast_all_devices(preset="megengine", dtype="bfloat16")(product)().dtype
        is torch.bfloat16
    )


def test_a_region_made_in_compiled_code_compiles_whole():
    def run(x):
        with autocast_all_devices(preset="megengine", dtype="bfloat16"):
            return x @ x

    assert (
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2, 2)).dtype
        is torch.bfloat16
    )


def test_a_thread_that_was_switched_stays_inside_until_it_is_switched_off():
    region = autocast_all_devices(preset="megengine", dtype="bfloat16")
    try:
        set_thread_region(region)
        assert thread_region() is region
        assert product().dtype is torch.bfloat16
        mezzo.enable_autocast("cpu", dtype="float16")
        assert product().dtype is torch.float16
    finally:
        disable_autocast()
    assert thread_region() is None
    assert product().dtype is torch.float32
