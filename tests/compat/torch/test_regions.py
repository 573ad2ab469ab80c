"""What torch's own suite asks of autocast, asked of `torch.autocast` while mezzo is installed."""

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


# -- arguments, as strict as torch -----------------------------------------------------------------


def test_a_device_that_is_no_string_is_a_value_error():
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


def test_mezzos_own_words_are_not_torchs():
    with pytest.raises(TypeError, match="half"):
        torch.autocast("cpu", half={"add"})


def test_float32_is_warned_of_and_switches_off():
    with pytest.warns(
        UserWarning,
        match=r"In CPU autocast, but the target dtype is not supported. Disabling autocast.",
    ):
        region = torch.autocast("cpu", dtype=torch.float32)
    with region:
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float32


def test_float32_that_is_switched_off_is_not_warned_of():
    with torch.autocast(device_type="cpu", dtype=torch.float32, enabled=False):
        assert product() is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_device_warns_and_is_off():
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda"):
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("device", ["xpu", "mps", "hpu"])
def test_other_devices_are_as_torch_has_them(device):
    found, expected = [], []
    for kind, told in ((torch.autocast, found), (torch.amp.autocast_mode.autocast, expected)):
        with kind(device):
            told += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    assert found == expected == [True, expected[1]]
    assert not torch.is_autocast_enabled(device)


def test_a_thing_that_cannot_be_called_cannot_be_decorated():
    with pytest.raises(TypeError, match=r"requires a callable, but got int"):
        torch.autocast("cpu")(3)


@pytest.mark.parametrize(
    ("device", "region"),
    [
        ("cpu", lambda: torch.cpu.amp.autocast()),
        ("cuda", lambda: torch.cuda.amp.autocast(enabled=False)),
    ],
)
def test_the_old_names_warn_that_they_are_old(device, region):
    with pytest.warns(
        FutureWarning,
        match=(
            rf"`torch.{device}.amp.autocast\(args...\)` is deprecated. Please use"
            rf" `torch.amp.autocast\('{device}', args...\)` instead."
        ),
    ):
        region()


def test_old_arguments_come_in_the_old_order():
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


# -- what happens inside ---------------------------------------------------------------------------


def test_the_state_is_torchs_own():
    with torch.autocast("cpu"):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled("cpu")
            assert product() is torch.float32
        assert product() is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_the_dtype_is_the_one_when_the_region_was_made():
    region = torch.autocast("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        with region:
            assert product() is torch.bfloat16
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)


def test_the_state_is_put_back_when_the_body_raises():
    with pytest.raises(KeyError), torch.autocast("cpu"):
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_own_check_of_every_op_in_its_lists(half):
    # torch's own method says `torch.amp.autocast`, and compares dtypes and bits.
    check = torch_lists.TestAutocast("_run_autocast_outofplace")
    cases = [case for case in cpu_cases(half) if case[0] not in CANNOT_RUN]
    for op, args, kwargs, kind, out, module in cases:
        check._run_autocast_outofplace(
            op, args, kind, "cpu", out_type=out, module=module, add_kwargs=kwargs, amp_dtype=half
        )
    assert len(cases) > 50


def test_a_decorated_function_runs_inside():
    @torch.autocast("cpu", dtype=torch.float16)
    def run():
        """Words."""
        return product()

    assert run() is torch.float16
    assert run.__doc__ == "Words."


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning"
)
def test_a_decorated_function_is_refused_by_torchscript_as_torchs_is():
    @torch.autocast("cpu")
    def function(x):
        return torch.mm(x, x)

    with pytest.raises(
        RuntimeError, match=r"@autocast\(\) decorator is not supported in script mode"
    ):
        torch.jit.script(function)


def test_a_module_whose_forward_is_decorated():
    class Net(nn.Module):
        @torch.amp.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return torch.mm(x, x)

    assert Net()(ones()).dtype is torch.bfloat16


# -- what torch gets wrong -------------------------------------------------------------------------


def test_one_dtype_inside_the_other():
    weight = nn.Parameter(ones())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(ones(), weight).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert torch.mm(ones(), weight).dtype is torch.float16
        assert torch.mm(ones(), weight).dtype is torch.bfloat16


def test_an_instance_entered_twice_leaves_nothing_on():
    region = torch.autocast("cpu")
    with region, region:
        assert product() is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


# -- classes, copies, threads ----------------------------------------------------------------------


def test_an_instance_is_one_of_both_classes():
    region = torch.autocast("cpu")
    assert isinstance(region, mezzo.autocast)
    assert isinstance(region, torch.amp.autocast_mode.autocast)


def test_a_subclass_with_arguments_of_its_own():
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
def test_a_copy_does_the_same(copied):
    region = torch.autocast("cpu", dtype=torch.float16)
    with region:
        again = copied(region)
    assert type(again) is torch.autocast
    with again:
        assert product() is torch.float16


def test_a_thread_starts_outside_and_enters_its_own():
    seen = []

    def work():
        seen.append(product())
        with torch.autocast("cpu", dtype=torch.float16):
            seen.append(product())

    with torch.autocast("cpu"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [torch.float32, torch.float16]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_in_the_same_dtype(reentrant):
    seen, x = [], ones().requires_grad_()

    def block(value):
        seen.append(torch.mm(value.detach(), value.detach()).dtype)
        return torch.mm(value, value)

    with torch.autocast("cpu"):
        out = checkpoint(block, x, use_reentrant=reentrant)
    out.float().sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.autocast("cpu"):
        sequential = checkpoint_sequential(
            model, 2, torch.rand(2, 2, requires_grad=True), use_reentrant=reentrant
        )
    assert sequential.dtype is torch.bfloat16
    sequential.sum().backward()


# -- compiled, exported, scripted ------------------------------------------------------------------


def inside(x):
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.mm(x, x)


def old_name(x):
    with torch.cpu.amp.autocast():
        return torch.mm(x, x)


def disabled(x):
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        return torch.mm(x, x)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(inside, torch.float16), (old_name, torch.bfloat16), (disabled, torch.float32)],
    ids=["new", "old", "disabled"],
)
def test_a_region_inside_a_compiled_function(function, dtype):
    torch._dynamo.reset()
    assert torch.compile(function, backend="aot_eager", fullgraph=True)(ones()).dtype is dtype


def test_a_region_around_and_an_instance_inside_a_compiled_function():
    torch._dynamo.reset()
    region = torch.autocast("cpu", dtype=torch.float16)

    def made_outside(x):
        with region:
            return torch.mm(x, x)

    assert (
        torch.compile(made_outside, backend="eager", fullgraph=True)(ones()).dtype is torch.float16
    )
    around = torch.compile(lambda x: torch.mm(x, x), backend="eager", fullgraph=True)
    with torch.autocast("cpu"):
        assert around(ones()).dtype is torch.bfloat16
    assert around(ones()).dtype is torch.float32


def test_a_subclass_inside_a_compiled_function():
    class Mine(torch.autocast):
        pass

    def run(x):
        with Mine("cpu", dtype=torch.float16):
            return torch.mm(x, x)

    torch._dynamo.reset()
    assert torch.compile(run, backend="eager", fullgraph=True)(ones()).dtype is torch.float16


def test_a_compiled_function_that_was_decorated():
    torch._dynamo.reset()

    @torch.autocast("cpu", dtype=torch.float16)
    def decorated(x):
        return torch.mm(x, x)

    assert torch.compile(decorated, backend="eager", fullgraph=True)(ones()).dtype is torch.float16


def test_a_graph_break_inside_a_region_goes_on_inside_it():
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


class Inside(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(x, x)


@pytest.mark.parametrize("strict", [False, True])
def test_a_region_inside_an_exported_model(strict):
    torch._dynamo.reset()
    exported = torch.export.export(Inside(), (ones(),), strict=strict)
    assert exported.module()(ones()).dtype is torch.bfloat16
    dialect.uninstall()
    torch._dynamo.reset()
    assert [str(node.target) for node in exported.graph.nodes] == [
        str(node.target)
        for node in torch.export.export(Inside(), (ones(),), strict=strict).graph.nodes
    ]


def test_an_exported_region_is_put_back_when_the_body_raises():
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
    ("function", "dtype"), [(inside, torch.float16), (old_name, torch.bfloat16)], ids=["new", "old"]
)
def test_a_region_inside_a_script(function, dtype):
    assert torch.jit.script(function)(ones()).dtype is dtype


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning"
)
def test_a_script_and_a_trace_inside_a_region():
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", cache_enabled=False):
        assert torch.jit.script(model)(ones()).dtype is torch.bfloat16
        traced = torch.jit.trace(model, ones())
    assert traced(ones()).dtype is torch.bfloat16


def test_a_class_equals_the_one_it_stands_for_and_its_subclasses_only_themselves():
    own = torch.amp.autocast_mode.autocast
    mine = type("mine", (torch.autocast,), {})
    assert torch.autocast == own
    assert torch.autocast is not own
    assert {own: 1}[torch.autocast] == 1
    assert mine != own
    assert mine == mine  # noqa: PLR0124 - that is the question
    assert len({mine, torch.autocast, torch.cpu.amp.autocast}) == 3


# -- the cache -------------------------------------------------------------------------------------


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


class CountsCasts(TorchDispatchMode):
    """Counts how often a weight is cast, while nobody clears the cache."""

    def __init__(self, weight, monkeypatch):
        super().__init__()
        self.weight, self.count = weight, 0
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self.weight
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("listed", "casts"), [(False, 1), (True, 2)])
def test_the_cache_is_torchs_and_lasts_into_backward(listed, casts, monkeypatch):
    weight = nn.Parameter(torch.randn(4, 3))
    if listed:
        # A tensor that CUDA graphs hold is not to be cached.
        torch._C._set_cached_tensors_enabled(True)
        torch._C._add_cached_tensor(weight)
    try:
        with CountsCasts(weight, monkeypatch) as counting:
            with torch.autocast("cpu"):
                loss = Linear.apply(torch.randn(2, 3), weight).sum()
            loss.backward()
        assert counting.count == casts
    finally:
        if listed:
            torch._C._remove_cached_tensor(weight)
        torch._C._set_cached_tensors_enabled(False)
        monkeypatch.undo()
        torch.clear_autocast_cache()


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_what_was_cast_without_gradients_gets_them_afterwards(quiet):
    model = nn.Linear(2, 2)
    with torch.autocast("cpu"):
        for _ in range(2):
            with quiet():
                assert not model(ones()).requires_grad
            out = model(ones())
            assert out.requires_grad
            out.mean().backward()
    assert model.weight.grad is not None
    with torch.inference_mode(), torch.autocast("cpu"):
        assert model(ones()).dtype is torch.bfloat16


# -- functions of the user's own -------------------------------------------------------------------


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
        seen.append(torch.is_autocast_enabled("cpu"))
        return grad.mm(b.t()), a.t().mm(grad)


class InFloat32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a):
        seen.append(torch.is_autocast_enabled("cpu"))
        return a * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        seen.append(torch.is_autocast_enabled("cpu"))
        return grad * 2


seen = []


def test_backward_of_an_own_function_runs_as_its_forward_did():
    seen.clear()
    a = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = Product.apply(a, ones())
        assert out.dtype is torch.bfloat16
        loss = out.float().sum()
    loss.backward()
    assert seen == [True]
    assert a.grad.dtype is torch.float32


def test_an_own_function_with_cast_inputs_runs_outside():
    seen.clear()
    a = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = InFloat32.apply(torch.mm(a, a))
    assert out.dtype is torch.float32
    out.sum().backward()
    assert seen == [False, False]


@pytest.mark.parametrize("decorator", ["custom_fwd", "custom_bwd"])
def test_own_functions_are_refused_a_device_that_is_no_string(decorator):
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        getattr(torch.amp, decorator)(lambda ctx: None, device_type=torch.device("cpu"))


def test_data_parallel_threads_enter_by_torchs_own_name():
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
