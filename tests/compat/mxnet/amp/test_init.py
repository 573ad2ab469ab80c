"""`amp.init` and `amp.uninit`, in one thread and in several."""

import importlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mezzo
from mezzo import PolicyError, UnsupportedError
from mezzo.compat.mxnet import amp, gluon


def linear_dtype():
    return nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype


def softmax_dtype():
    return torch.softmax(torch.ones(2, dtype=torch.float16), 0).dtype


@pytest.mark.parametrize(
    ("target_dtype", "dtype"),
    [("float16", torch.float16), (np.float16, torch.float16), ("bfloat16", torch.bfloat16)],
    ids=repr,
)
def test_init_activates_autocast_and_uninit_ends_it(target_dtype, dtype):
    amp.init(target_dtype=target_dtype)
    assert (linear_dtype(), softmax_dtype()) == (
        dtype,
        torch.float32 if dtype is torch.float16 else torch.float16,
    )
    amp.uninit()
    assert linear_dtype() is torch.float32
    amp.uninit()


def test_init_as_a_context_manager_ends_with_the_block():
    with amp.init():
        assert linear_dtype() is torch.float16
    assert linear_dtype() is torch.float32


def test_using_amp_is_logged_once(caplog):
    with caplog.at_level(logging.INFO):
        amp.init()
        amp.init("float16")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("root", "INFO", "Using AMP")
    ]
    assert linear_dtype() is torch.float16


def test_a_network_created_before_init_warns(caplog):
    network = nn.Linear(1, 1)
    amp.init()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith(f"Block network created in [{__file__}:")
    assert caplog.messages[0].endswith("] before AMP init.")
    assert network is not None


def test_init_without_a_network_does_not_warn(caplog):
    amp.init()
    assert not caplog.records


def test_passed_lists_replace_mxnets():
    amp.init(
        target_precision_ops=["Convolution"],
        fp32_ops=["FullyConnected"],
        conditional_fp32_ops=[("Activation", "act_type", ["relu"])],
    )
    assert nn.functional.conv1d(torch.ones(1, 1, 2), torch.ones(1, 1, 1)).dtype is torch.float16
    half = torch.ones(1, 1, dtype=torch.float16)
    assert nn.functional.linear(half, half).dtype is torch.float32
    assert (softmax_dtype(), torch.relu(half).dtype) == (torch.float16, torch.float32)


def test_other_dtypes_raise_and_activate_nothing():
    with pytest.raises(
        AssertionError,
        match="AMP currently supports only float16 or bfloat16 as a target_dtype, got 'int8'",
    ):
        amp.init("int8")
    with pytest.raises(AttributeError, match="MXNet has no op 'Conv'"):
        amp.init(fp32_ops=["Conv"])
    assert linear_dtype() is torch.float32


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            {"target_precision_ops": "Convolution"},
            r"target_precision_ops should be a list of strs, got str.*\['Convolution'\]",
        ),
        ({"fp32_ops": [1]}, "fp32_ops should be a list of strs, got 1 in it"),
        ({"fp32_ops": 3}, "fp32_ops should be a list of strs, got int"),
        (
            {"conditional_fp32_ops": [("Activation", "act_type")]},
            r"should be a list of \(str, str, list of str\), got \('Activation', 'act_type'\)",
        ),
        ({"conditional_fp32_ops": "Activation"}, r"list of \(str, str, list of str\), got str"),
        (
            {"target_precision_ops": ["Convolution", "softmax"], "fp32_ops": ["softmax"]},
            r"Ops cannot be in two or more lists. Common ops in target_precision_ops and fp32_ops",
        ),
        (
            {
                "fp32_ops": ["Activation"],
                "conditional_fp32_ops": [("Activation", "act_type", ["relu"])],
            },
            r"Common ops in fp32_ops and conditional_fp32_ops: \['Activation'\]",
        ),
    ],
    ids=[
        "a name",
        "a number in a list",
        "a number",
        "a short condition",
        "a name as conditions",
        "an op in both lists",
        "a conditional op in a list",
    ],
)
def test_invalid_lists_raise_and_activate_nothing(lists, message):
    with pytest.raises(AssertionError, match=message):
        amp.init(**lists)
    assert linear_dtype() is torch.float32


def test_an_unknown_op_in_a_condition_raises():
    with pytest.raises(AttributeError, match=r"MXNet has no op 'Activatoin'.*'Activation'"):
        amp.init(conditional_fp32_ops=[("Activatoin", "act_type", ["relu"])])


@pytest.mark.parametrize("path", ["mezzo.compat.mxnet.contrib.amp", "mezzo.compat.mxnet.amp"])
def test_both_paths_of_the_module_are_imported(path):
    assert importlib.import_module(path) is amp


# -- a second call ---------------------------------------------------------------------------------


def test_a_second_init_with_other_arguments_is_refused():
    amp.init()
    with pytest.raises(
        PolicyError,
        match=(
            r"active in this thread with target_dtype='float16', and a second call cannot change"
            r" it. This one has target_dtype='bfloat16' and differs in: target_dtype, .*"
            r"Call amp.uninit\(\) first"
        ),
    ):
        amp.init("bfloat16")
    with pytest.raises(PolicyError, match=r"differs in: fp32_ops\. Call"):
        amp.init(fp32_ops=["softmax"])
    assert linear_dtype() is torch.float16
    amp.uninit()
    amp.init("bfloat16")
    assert linear_dtype() is torch.bfloat16


def test_a_second_init_with_the_same_arguments_changes_nothing():
    amp.init(fp32_ops=["softmax", "log"])
    amp.init(
        np.float16,
        fp32_ops=("log", "softmax"),
        target_precision_ops=amp.list_lp16_ops(),
        conditional_fp32_ops=amp.list_conditional_fp32_ops(),
    )
    assert linear_dtype() is torch.float16


def test_leaving_an_inner_init_keeps_the_outer_one():
    with amp.init():
        with amp.init():
            pass
        assert linear_dtype() is torch.float16
    assert linear_dtype() is torch.float32


def test_init_works_again_after_other_code_disabled_autocast():
    amp.init()
    trainer = gluon.Trainer([nn.Parameter(torch.ones(1))], "sgd")
    amp.init_trainer(trainer)
    mezzo.disable_autocast()
    with pytest.raises(AssertionError, match="AMP not initialized"):
        amp.init_trainer(trainer)
    amp.init()
    assert (linear_dtype(), trainer.amp_loss_scale) == (torch.float16, 65536.0)
    amp.uninit()
    assert trainer.amp_loss_scale == 1.0


def test_uninit_leaves_the_region_of_other_code():
    amp.init()
    mezzo.enable_autocast("cpu", dtype="bfloat16")
    amp.uninit()
    assert linear_dtype() is torch.bfloat16
    mezzo.disable_autocast()


# -- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def worker():
    with ThreadPoolExecutor(1, thread_name_prefix="worker") as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def test_init_applies_to_the_thread_that_called_it(worker):
    worker(amp.init)
    assert (worker(linear_dtype), linear_dtype()) == (torch.float16, torch.float32)
    amp.init("bfloat16")
    assert (worker(linear_dtype), linear_dtype()) == (torch.float16, torch.bfloat16)
    worker(amp.uninit)
    assert (worker(linear_dtype), linear_dtype()) == (torch.float32, torch.bfloat16)


def test_a_trainer_needs_init_in_its_own_thread(worker):
    amp.init()
    trainer = gluon.Trainer([nn.Parameter(torch.ones(1))], "sgd")
    with pytest.raises(AssertionError, match=r"call amp.init\(\)\? Call it in this thread"):
        worker(amp.init_trainer, trainer)


def test_uninit_removes_loss_scaling_of_its_own_thread_only(worker):
    amp.init()
    worker(amp.init)
    here, there = (gluon.Trainer([nn.Parameter(torch.ones(1))], "sgd") for _ in range(2))
    amp.init_trainer(here)
    worker(amp.init_trainer, there)
    worker(amp.uninit)
    assert (here.amp_loss_scale, there.amp_loss_scale) == (65536.0, 1.0)


def test_uninit_in_a_thread_without_init_raises(worker):
    amp.init()
    with pytest.raises(
        UnsupportedError,
        match=r"in thread 'worker_0', but amp.init\(\) in 'MainThread'.*amp.uninit\(\) there",
    ):
        worker(amp.uninit)
    assert linear_dtype() is torch.float16
    amp.uninit()
    worker(amp.uninit)


def test_a_thread_that_ended_does_not_count():
    kept = []
    thread = threading.Thread(target=lambda: kept.append(amp.init()))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(amp.uninit).result()
    assert kept[0].dtype is torch.float16


def test_a_function_for_another_thread_takes_init_along(worker):
    amp.init()
    assert worker(mezzo.propagate_autocast(linear_dtype)) is torch.float16


def test_backward_runs_in_the_dtypes_of_the_forward_pass():
    amp.init()
    net = nn.Linear(2, 2)
    dtypes = []
    net.weight.register_hook(lambda gradient: dtypes.append(gradient.dtype))
    output = net(torch.ones(1, 2))
    output.register_hook(lambda gradient: dtypes.append(gradient.dtype))
    output.float().sum().backward()
    assert dtypes == [torch.float16, torch.float32]


class _Dtypes(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return linear_dtype() is torch.float16


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_worker_inherits_init_when_forked(workers):
    amp.init()
    loader = DataLoader(
        _Dtypes(), num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    assert [bool(batch) for batch in loader] == [True, True]


def test_layout_optimization_raises_with_a_remedy():
    with pytest.raises(RuntimeError, match=r"mezzo.channels_last\(net\)"):
        amp.init(layout_optimization=True)
