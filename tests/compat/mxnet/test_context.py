"""Contexts: devices, the current context, and machines without or with few GPUs."""

import threading

import pytest
import torch

import mezzo.compat.mxnet as mx
from mezzo.compat.mxnet import _context


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(_context, "_has_warned", False)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_contexts_are_equal_by_type_and_id():
    assert mx.gpu(1) == mx.Context("gpu", 1) == mx.Context(mx.gpu(1))
    assert mx.cpu() != mx.gpu()
    assert {mx.cpu(): 1}[mx.cpu(0)] == 1
    assert str([mx.gpu(0), mx.cpu_pinned()]) == "[gpu(0), cpu_pinned(0)]"


def test_the_current_context_is_the_cpu_and_follows_with_blocks():
    assert mx.current_context() == mx.cpu(0)
    with mx.Context(mx.gpu(0)):
        with mx.Context("cpu", 1):
            assert mx.current_context() == mx.cpu(1)
        assert mx.current_context() == mx.gpu(0)
    assert mx.current_context() == mx.cpu(0)


def test_the_current_context_is_restored_when_the_body_raises():
    with pytest.raises(KeyError), mx.gpu(0):
        raise KeyError
    assert mx.current_context() == mx.cpu(0)


def test_each_thread_has_its_own_current_context():
    found = []
    with mx.gpu(0):
        thread = threading.Thread(target=lambda: found.append(mx.current_context()))
        thread.start()
        thread.join()
    assert found == [mx.cpu(0)]


def test_a_gpu_without_cuda_is_the_cpu_with_one_warning(no_gpu):
    message = r"gpu\(0\) was requested, .* running on the CPU"
    with pytest.warns(UserWarning, match=message) as record:
        device = mx.gpu(0).device
    assert device == torch.device("cpu")
    assert record[0].filename == __file__
    # The second context does not warn: here warnings are errors.
    assert mx.nd.zeros((2,), ctx=mx.gpu(3)).context == mx.cpu()


def test_contexts_that_are_not_used_do_not_warn(no_gpu):
    assert mx.num_gpus() == 0
    assert (mx.gpu(0) if mx.num_gpus() else mx.cpu()) == mx.cpu()
    mx.gpu(0)


def test_a_gpu_that_does_not_exist_raises(two_gpus):
    assert mx.gpu(1).device == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"gpu\(9\) does not exist .* one of: gpu\(0\), gpu\(1\)"):
        _ = mx.gpu(9).device


def test_bad_arguments_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"Unknown device type 'tpu'. Choose one of: cpu, gpu"):
        mx.Context("tpu")
    with pytest.raises(TypeError, match=r"device_id should be a number, got 'a'. Pass mx.gpu\(0\)"):
        mx.gpu("a")


def test_pinned_memory_without_cuda_is_ordinary_memory(no_gpu):
    assert mx.nd.ones((2,), ctx=mx.cpu_pinned()).context == mx.cpu()
    assert mx.cpu().empty_cache() is None


def test_a_network_has_one_device(two_gpus):
    assert _context.one_device([mx.cpu(0), mx.cpu(1)]) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"Pass one context. For several GPUs"):
        _context.one_device([mx.gpu(0), mx.gpu(1)])
    with pytest.raises(TypeError, match="Expected a Context or a list of them, got 'gpu'"):
        _context.one_device(["gpu"])
