"""Checks of torch's autocast tests, run on `torch.autocast` with mezzo installed."""

import copy
import pickle
import threading

import pytest
import torch
from support.torch_cases import CANNOT_RUN, cpu_cases
from torch import nn
from torch.testing._internal import autocast_test_lists as torch_lists
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mezzo
from mezzo.compat import torch as dialect


def ones():
    return torch.ones(2, 2)


def product():
    return torch.mm(ones(), ones()).dtype


# -- arguments -------------------------------------------------------------------------------------


def test_a_device_other_than_a_string_is_a_value_error():
    with pytest.raises(
        ValueError, match=r"Expected `device_type` of type `str`, got: `<class 'torch.device'>`"
    ):
        torch.autocast(device_type=torch.device("cpu"))


def test_an_unknown_device_is_a_runtime_error():
    with pytest.raises(RuntimeError, match="Invalid device string: 'not a real device'"):
        torch.autocast(device_type="not a real device")


def test_a_device_type_is_required():
    with pytest.raises(TypeError, match="device_type"):
        torch.autocast()


def test_arguments_of_mezzo_are_rejected():
    with pytest.raises(TypeError, match="half"):
        torch.autocast("cpu", half={"add"})


def test_float32_warns_and_disables():
    with pytest.warns(
        UserWarning,
        match=r"In CPU autocast, but the target dtype is not supported. Disabling autocast.",
    ):
        region = torch.autocast("cpu", dtype=torch.float32)
    with region:
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float32


def test_disabled_float32_does_not_warn():
    with torch.autocast(device_type="cpu", dtype=torch.float32, enabled=False):
        assert product() is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_device_warns_and_is_disabled():
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda"):
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("device", ["xpu", "mps", "hpu"])
def test_other_devices_behave_as_in_torch(device):
    states, expected = [], []
    for cls, state in ((torch.autocast, states), (torch.amp.autocast_mode.autocast, expected)):
        with cls(device):
            state += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    assert states == expected == [True, expected[1]]
    assert not torch.is_autocast_enabled(device)


def test_decorating_a_non_callable_is_a_type_error():
    with pytest.raises(TypeError, match=r"requires a callable, but got int"):
        torch.autocast("cpu")(3)


@pytest.mark.parametrize(
    ("device", "region"),
    [
        ("cpu", lambda: torch.cpu.amp.autocast()),
        ("cuda", lambda: torch.cuda.amp.autocast(enabled=False)),
    ],
)
def test_deprecated_names_warn(device, region):
    with pytest.warns(
        FutureWarning,
        match=(
            rf"`torch.{device}.amp.autocast\(args...\)` is deprecated. Please use"
            rf" `torch.amp.autocast\('{device}', args...\)` instead."
        ),
    ):
        region()


def test_deprecated_names_keep_their_argument_order():
    with pytest.warns(FutureWarning):
        region = torch.cpu.amp.autocast(True, torch.float16, False)
    with region:
        assert product() is torch.float16
        assert not torch.is_autocast_cache_enabled()


def test_attributes_are_those_of_torch():
    region = torch.autocast("cpu", dtype=torch.float16, enabled=False, cache_enabled=False)
    assert (region.device, region.fast_dtype, region._enabled, region._cache_enabled) == (
        "cpu",
        torch.float16,
        False,
        False,
    )


# -- inside a region -------------------------------------------------------------------------------


def test_torchs_autocast_state_is_set():
    with torch.autocast("cpu"):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled("cpu")
            assert product() is torch.float32
        assert product() is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_the_default_dtype_is_read_at_construction():
    region = torch.autocast("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        with region:
            assert product() is torch.bfloat16
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)


def test_the_state_is_restored_when_the_body_raises():
    with pytest.raises(KeyError), torch.autocast("cpu"):
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_check_of_every_listed_op_passes(half):
    # torch's method uses `torch.amp.autocast` and compares dtypes and bits.
    check = torch_lists.TestAutocast("_run_autocast_outofplace")
    cases = [case for case in cpu_cases(half) if case[0] not in CANNOT_RUN]
    for op, args, kwargs, kind, out, module in cases:
        check._run_autocast_outofplace(
            op, args, kind, "cpu", out_type=out, module=module, add_kwargs=kwargs, amp_dtype=half
        )
    assert len(cases) > 50


def test_a_decorated_function_runs_in_the_region():
    @torch.autocast("cpu", dtype=torch.float16)
    def run():
        """Return a dtype."""
        return product()

    assert run() is torch.float16
    assert run.__doc__ == "Return a dtype."


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning"
)
def test_torchscript_rejects_a_decorated_function():
    @torch.autocast("cpu")
    def function(x):
        return torch.mm(x, x)

    with pytest.raises(
        RuntimeError, match=r"@autocast\(\) decorator is not supported in script mode"
    ):
        torch.jit.script(function)


def test_a_decorated_forward_runs_in_the_region():
    class Net(nn.Module):
        @torch.amp.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return torch.mm(x, x)

    assert Net()(ones()).dtype is torch.bfloat16


# -- cases in which torch is wrong -----------------------------------------------------------------


def test_nested_dtypes_do_not_share_the_cache():
    weight = nn.Parameter(ones())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(ones(), weight).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert torch.mm(ones(), weight).dtype is torch.float16
        assert torch.mm(ones(), weight).dtype is torch.bfloat16


def test_an_instance_entered_twice_restores_the_state():
    region = torch.autocast("cpu")
    with region, region:
        assert product() is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


# -- classes, copies, threads ----------------------------------------------------------------------


def test_an_instance_belongs_to_both_classes():
    region = torch.autocast("cpu")
    assert isinstance(region, mezzo.autocast)
    assert isinstance(region, torch.amp.autocast_mode.autocast)


def test_a_subclass_may_have_other_arguments():
    class Mine(torch.autocast):
        def __init__(self, note):
            super().__init__("cpu", dtype=torch.float16)
            self.note = note

    region = Mine("hello")
    with region as entered:
        assert entered is region
        assert product() is torch.float16


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda region: pickle.loads(pickle.dumps(region))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_behaves_the_same(copied):
    region = torch.autocast("cpu", dtype=torch.float16)
    with region:
        duplicate = copied(region)
    assert type(duplicate) is torch.autocast
    with duplicate:
        assert product() is torch.float16


def test_a_thread_starts_outside_and_enters_its_own_region():
    dtypes = []

    def work():
        dtypes.append(product())
        with torch.autocast("cpu", dtype=torch.float16):
            dtypes.append(product())

    with torch.autocast("cpu"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert dtypes == [torch.float32, torch.float16]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_in_the_same_dtype(reentrant):
    dtypes, x = [], ones().requires_grad_()

    def block(value):
        dtypes.append(torch.mm(value.detach(), value.detach()).dtype)
        return torch.mm(value, value)

    with torch.autocast("cpu"):
        out = checkpoint(block, x, use_reentrant=reentrant)
    out.float().sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.autocast("cpu"):
        sequential = checkpoint_sequential(
            model, 2, torch.rand(2, 2, requires_grad=True), use_reentrant=reentrant
        )
    assert sequential.dtype is torch.bfloat16
    sequential.sum().backward()


# -- compiled, exported, scripted ------------------------------------------------------------------


def in_region(x):
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.mm(x, x)


def deprecated_name(x):
    with torch.cpu.amp.autocast():
        return torch.mm(x, x)


def disabled(x):
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        return torch.mm(x, x)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(in_region, torch.float16), (deprecated_name, torch.bfloat16), (disabled, torch.float32)],
    ids=["new", "deprecated", "disabled"],
)
def test_a_region_inside_a_compiled_function_casts(function, dtype):
    torch._dynamo.reset()
    assert torch.compile(function, backend="aot_eager", fullgraph=True)(ones()).dtype is dtype


def test_regions_around_and_created_outside_a_compiled_function_cast():
    torch._dynamo.reset()
    region = torch.autocast("cpu", dtype=torch.float16)

    def use_outer_instance(x):
        with region:
            return torch.mm(x, x)

    assert (
        torch.compile(use_outer_instance, backend="eager", fullgraph=True)(ones()).dtype
        is torch.float16
    )
    around = torch.compile(lambda x: torch.mm(x, x), backend="eager", fullgraph=True)
    with torch.autocast("cpu"):
        assert around(ones()).dtype is torch.bfloat16
    assert around(ones()).dtype is torch.float32


def test_a_subclass_inside_a_compiled_function_casts():
    class Mine(torch.autocast):
        pass

    def run(x):
        with Mine("cpu", dtype=torch.float16):
            return torch.mm(x, x)

    torch._dynamo.reset()
    assert torch.compile(run, backend="eager", fullgraph=True)(ones()).dtype is torch.float16


def test_a_decorated_function_can_be_compiled():
    torch._dynamo.reset()

    @torch.autocast("cpu", dtype=torch.float16)
    def decorated(x):
        return torch.mm(x, x)

    assert torch.compile(decorated, backend="eager", fullgraph=True)(ones()).dtype is torch.float16


def test_a_graph_break_keeps_the_region():
    def broken(x):
        with torch.autocast("cpu"):
            before = torch.mm(x, x)
            torch._dynamo.graph_break()
            after = torch.mm(x, x)
        return before.dtype, after.dtype, torch.mm(x, x).dtype

    torch._dynamo.reset()
    assert torch.compile(broken, backend="eager")(ones()) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


class InRegion(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(x, x)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_region_equals_that_of_torch(strict):
    torch._dynamo.reset()
    exported = torch.export.export(InRegion(), (ones(),), strict=strict)
    assert exported.module()(ones()).dtype is torch.bfloat16
    dialect.uninstall()
    torch._dynamo.reset()
    assert [str(node.target) for node in exported.graph.nodes] == [
        str(node.target)
        for node in torch.export.export(InRegion(), (ones(),), strict=strict).graph.nodes
    ]


def test_an_exported_region_is_restored_when_the_body_raises():
    class Raising(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu"):
                raise ValueError(f"no {x.dtype}")

    with pytest.raises(ValueError, match=r"no torch\.float32"):
        torch.export.export(Raising(), (ones(),), strict=False)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning"
)
@pytest.mark.parametrize(
    ("function", "dtype"),
    [(in_region, torch.float16), (deprecated_name, torch.bfloat16)],
    ids=["new", "deprecated"],
)
def test_a_region_inside_a_script_casts(function, dtype):
    assert torch.jit.script(function)(ones()).dtype is dtype


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning"
)
def test_scripts_and_traces_run_inside_a_region():
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", cache_enabled=False):
        assert torch.jit.script(model)(ones()).dtype is torch.bfloat16
        traced = torch.jit.trace(model, ones())
    assert traced(ones()).dtype is torch.bfloat16


def test_a_class_equals_its_counterpart_and_subclasses_do_not():
    counterpart = torch.amp.autocast_mode.autocast
    subclass = type("subclass", (torch.autocast,), {})
    assert torch.autocast == counterpart
    assert torch.autocast is not counterpart
    assert {counterpart: 1}[torch.autocast] == 1
    assert subclass != counterpart
    assert subclass == subclass  # noqa: PLR0124 - tests __eq__
    assert len({subclass, torch.autocast, torch.cpu.amp.autocast}) == 3


# -- weight cache ----------------------------------------------------------------------------------


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with torch.autocast("cpu"):
            return torch.matmul(grad, weight), torch.matmul(x.t(), grad).t()


class CastCounter(TorchDispatchMode):
    """Counts the casts of a weight, with clearing of the cache disabled."""

    def __init__(self, weight, monkeypatch):
        super().__init__()
        self.weight, self.count = weight, 0
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self.weight
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("graph_owned", "casts"), [(False, 1), (True, 2)])
def test_torchs_weight_cache_is_used_and_kept_for_backward(graph_owned, casts, monkeypatch):
    weight = nn.Parameter(torch.randn(4, 3))
    if graph_owned:
        # Tensors owned by CUDA graphs must not be cached.
        torch._C._set_cached_tensors_enabled(True)
        torch._C._add_cached_tensor(weight)
    try:
        with CastCounter(weight, monkeypatch) as counter:
            with torch.autocast("cpu"):
                loss = Linear.apply(torch.randn(2, 3), weight).sum()
            loss.backward()
        assert counter.count == casts
    finally:
        if graph_owned:
            torch._C._remove_cached_tensor(weight)
        torch._C._set_cached_tensors_enabled(False)
        monkeypatch.undo()
        torch.clear_autocast_cache()


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_casts_without_gradients_are_not_reused_with_gradients(grad_mode):
    model = nn.Linear(2, 2)
    with torch.autocast("cpu"):
        for _ in range(2):
            with grad_mode():
                assert not model(ones()).requires_grad
            out = model(ones())
            assert out.requires_grad
            out.mean().backward()
    assert model.weight.grad is not None
    with torch.inference_mode(), torch.autocast("cpu"):
        assert model(ones()).dtype is torch.bfloat16


# -- custom autograd functions ---------------------------------------------------------------------


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        enabled_states.append(torch.is_autocast_enabled("cpu"))
        return grad.mm(b.t()), a.t().mm(grad)


class InFloat32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a):
        enabled_states.append(torch.is_autocast_enabled("cpu"))
        return a * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        enabled_states.append(torch.is_autocast_enabled("cpu"))
        return grad * 2


enabled_states = []


def test_backward_of_a_custom_function_runs_with_the_state_of_its_forward():
    enabled_states.clear()
    a = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = Product.apply(a, ones())
        assert out.dtype is torch.bfloat16
        loss = out.float().sum()
    loss.backward()
    assert enabled_states == [True]
    assert a.grad.dtype is torch.float32


def test_a_custom_function_with_cast_inputs_runs_without_autocast():
    enabled_states.clear()
    a = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = InFloat32.apply(torch.mm(a, a))
    assert out.dtype is torch.float32
    out.sum().backward()
    assert enabled_states == [False, False]


@pytest.mark.parametrize("decorator", ["custom_fwd", "custom_bwd"])
def test_custom_functions_reject_a_device_other_than_a_string(decorator):
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        getattr(torch.amp, decorator)(lambda ctx: None, device_type=torch.device("cpu"))


def test_data_parallel_threads_enter_regions():
    # What torch.nn.parallel.parallel_apply does in every worker.
    dtypes = []

    def worker():
        with torch.amp.autocast("cpu", enabled=True):
            dtypes.append(product())

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dtypes == [torch.bfloat16] * 4
