"""AutocastMode: which arguments of a call are cast, which calls are not, and events."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo import _events

HALF, FULL = torch.bfloat16, torch.float32


def region(**fields: Any) -> mezzo.autocast:
    return mezzo.autocast(device_type="cpu", dtype=HALF, **fields)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + x,
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: torch.add(x, x),
        lambda x: torch.add(input=x, other=x),
        lambda x: x.add(x),
        lambda x: x.add(other=x),
        lambda x: torch.add(x, x, alpha=2),
    ],
)
def test_every_spelling_of_an_op_is_overridden(call: Any) -> None:
    with region(half={"add"}):
        assert call(torch.ones(2)).dtype is HALF
    with region(full={"add"}):
        assert call(torch.ones(2, dtype=HALF)).dtype is FULL


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.softmax(x, -1),
        lambda x: torch.softmax(x, dim=-1),
        lambda x: F.softmax(x, -1),
        lambda x: F.softmax(x, dim=-1),
        lambda x: x.softmax(-1),
        lambda x: x.softmax(dim=-1),
        lambda x: nn.Softmax(dim=-1)(x),
        lambda x: nn.Softmax(-1)(x),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {"conditional": [("softmax", "dim", [-1])]},
        {"half": {"softmax"}, "conditional": [("softmax", "dim", [-1])]},
    ],
    ids=str,
)
def test_a_conditional_entry_applies_to_every_spelling(call: Any, fields: dict[str, Any]) -> None:
    with region(**fields):
        assert call(torch.ones(2, 2, dtype=HALF)).dtype is FULL
        assert torch.softmax(torch.ones(2, 2, dtype=HALF), 0).dtype is HALF


def test_a_condition_on_a_tensor_argument_does_not_read_it() -> None:
    with region(conditional=[("pow", "exponent", [2])]):
        x = torch.full((2,), 3.0, dtype=HALF)
        assert torch.pow(x, torch.full((2,), 2.0, dtype=HALF)).dtype is HALF
        assert torch.pow(x, 2).dtype is FULL
        assert (x**2).dtype is FULL


def test_a_condition_on_a_default_applies_if_the_argument_is_omitted() -> None:
    with region(conditional=[("gelu", "approximate", ["none"])]):
        assert F.gelu(torch.ones(2, dtype=HALF), approximate="none").dtype is FULL
        assert F.gelu(torch.ones(2, dtype=HALF)).dtype is FULL
        assert F.gelu(torch.ones(2, dtype=HALF), approximate="tanh").dtype is HALF


def test_an_exempt_argument_is_not_cast_by_position_or_name() -> None:
    seen: list[Any] = []

    class Spy(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch._C._nn.linear:
                seen.append(
                    (
                        [one.dtype for one in args],
                        {name: one.dtype for name, one in (kwargs or {}).items()},
                    )
                )
                return args[0]
            return func(*args, **(kwargs or {}))

    x, weight, bias = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2)
    with Spy(), region(half={"linear"}, exempt_args={"linear": ["bias"]}):
        F.linear(x, weight, bias)
        F.linear(x, weight, bias=bias)
    assert seen == [([HALF, HALF, FULL], {}), ([HALF, HALF], {"bias": FULL})]


def test_an_exempt_argument_is_cast_to_float32() -> None:
    x, weight = torch.randn(2, 3, dtype=HALF), torch.ones(3, dtype=HALF)
    with region(full={"layer_norm"}, exempt_args={"layer_norm": ["weight", "bias"]}):
        assert F.layer_norm(x, (3,), weight, weight).dtype is FULL


NORMS = {
    "layer_norm": (lambda x, weight, bias: F.layer_norm(x, (4,), weight, bias), "half"),
    "layer_norm by name": (
        lambda x, weight, bias: F.layer_norm(x, (4,), weight=weight, bias=bias),
        "promote",
    ),
    "torch.layer_norm": (lambda x, weight, bias: torch.layer_norm(x, (4,), weight, bias), "half"),
    "group_norm": (lambda x, weight, bias: F.group_norm(x, 2, weight, bias), "half"),
}


@pytest.mark.parametrize(("call", "rule"), NORMS.values(), ids=NORMS.keys())
def test_float32_parameters_with_a_16_bit_input_give_a_16_bit_result(
    call: Any, rule: str, one_dtype: Any
) -> None:
    x = torch.randn(3, 4).to(HALF).requires_grad_()
    weight, bias = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    exempt = {"layer_norm": ["weight", "bias"], "group_norm": ["weight", "bias"]}
    with pytest.raises(RuntimeError, match="expected scalar type"), one_dtype:
        call(x, weight, bias)
    with one_dtype, region(**{rule: {"layer_norm", "group_norm"}}, exempt_args=exempt):
        result = call(x, weight, bias)
        result.sum().backward()
    assert torch.equal(result, call(x.float(), weight, bias).to(HALF))
    assert (result.dtype, x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (
        HALF,
        HALF,
        FULL,
        FULL,
    )


def test_16_bit_parameters_are_not_computed_in_float32(one_dtype: Any) -> None:
    seen: list[torch.dtype] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.native_layer_norm.default:
                seen.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(3, 4, dtype=HALF), torch.ones(4, dtype=HALF)
    with (
        Spy(),
        one_dtype,
        region(promote={"layer_norm"}, exempt_args={"layer_norm": ["weight", "bias"]}),
    ):
        F.layer_norm(x, (4,), weight, weight)
    assert seen == [HALF]


def test_batch_norm_keeps_its_statistics_in_float32_at_o3() -> None:
    norm = nn.BatchNorm1d(3)
    with region(policy="O3"):
        assert norm(torch.randn(4, 3)).dtype is HALF
    assert norm.running_mean.dtype is FULL
    assert norm.running_mean.any()


def test_an_explicit_dtype_overrides_the_rule() -> None:
    x = torch.ones(2, 2, dtype=HALF)
    with region(full={"softmax", "sum"}):
        assert torch.softmax(x, -1, torch.float64).dtype is torch.float64
        assert F.softmax(x, -1, dtype=HALF).dtype is HALF
        assert torch.sum(x, dtype=HALF).dtype is HALF
        assert x.sum(0, dtype=torch.float64).dtype is torch.float64


def test_a_call_with_out_is_not_cast() -> None:
    out = torch.empty(2)
    with region(half={"add"}):
        assert torch.add(torch.ones(2), torch.ones(2), out=out) is out
    assert out.tolist() == [2.0, 2.0]


def test_in_place_calls_are_not_cast() -> None:
    x = torch.ones(2)
    with region(half={"add", "mul", "relu"}):
        x += 1
        x.add_(1)
        x.mul_(2)
        torch.relu_(x)
        assert F.relu(x, inplace=True) is x
        assert F.relu(x, True) is x
        assert nn.ReLU(inplace=True)(x) is x
        x[0] = 5.0
    assert x.dtype is FULL
    assert x.tolist() == [5.0, 6.0]


def test_promote_uses_the_widest_of_inputs_and_lists() -> None:
    half, full = torch.ones(2, dtype=HALF), torch.ones(2)
    with region(promote={"cat", "stack", "add", "addcmul", "where"}):
        assert torch.cat([half, full, half]).dtype is FULL
        assert torch.cat((half, half)).dtype is HALF
        assert torch.stack(tensors=[half, full]).dtype is FULL
        assert torch.addcmul(half, half, full).dtype is FULL
        assert torch.where(torch.tensor([True, False]), half, full).dtype is FULL
        assert (half + torch.ones((), dtype=FULL)).dtype is FULL


def test_promoting_the_two_half_types_gives_float32() -> None:
    with region(promote={"mul"}):
        assert (torch.ones(1, dtype=HALF) * torch.ones(1, dtype=torch.float16)).dtype is FULL


def test_keep_disables_torchs_cast() -> None:
    with region(keep={"mm", "linear"}):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is FULL
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is FULL
        assert (
            torch.mm(
                torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2, dtype=torch.float16)
            ).dtype
            is torch.float16
        )
        assert torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2)).dtype is HALF


def test_refuse_raises_with_the_ops_name_and_only_for_tensors_it_governs() -> None:
    with region(refuse={"exp"}):
        for call in (lambda: torch.exp(torch.ones(1)), lambda: torch.ones(1).exp_()):
            with pytest.raises(mezzo.RefusedOpError, match="exp"):
                call()
        assert torch.exp(torch.ones(1, dtype=torch.float64)).dtype is torch.float64
        with torch.autocast("cpu", enabled=False):
            assert torch.exp(torch.ones(1)).dtype is FULL


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize(
    "fields", [{"half": {"add"}}, {"full": {"add"}}, {"policy": "O3"}], ids=str
)
def test_float64_integer_and_complex_tensors_are_not_cast(
    dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    x = torch.ones(2, dtype=dtype)
    with region(**fields):
        assert (x + x).dtype is dtype


def test_tensors_on_another_device_are_not_cast() -> None:
    x = torch.ones(2, device="meta")
    with region(half={"add"}, full={"mul"}):
        assert (x + x).dtype is FULL
        assert (x.to(HALF) * x.to(HALF)).dtype is HALF


def test_lists_and_tuples_of_tensors_are_cast() -> None:
    with region(half={"cat", "einsum", "block_diag"}):
        assert torch.cat([torch.ones(1), torch.ones(1)]).dtype is HALF
        assert torch.cat((torch.ones(1), torch.ones(1))).dtype is HALF
        assert torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF
        assert torch.einsum("ij,jk->ik", [torch.ones(2, 2), torch.ones(2, 2)]).dtype is HALF
        assert torch.block_diag(torch.ones(1, 1), torch.ones(1, 1)).dtype is HALF


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.double(),
        lambda x: x.to(torch.float64),
        lambda x: x.float(),
        lambda x: x.type(torch.float64),
        lambda x: x.clone(),
        lambda x: x.detach(),
        lambda x: x.contiguous(),
        lambda x: x.cpu(),
        lambda x: torch.tensor(x.tolist()),
        lambda x: x.new_zeros(2),
        lambda x: torch.zeros_like(x),
        lambda x: x[0],
        lambda x: x.T,
        lambda x: x.view(-1),
    ],
)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_conversions_constructors_and_views_are_never_cast(call: Any, level: str) -> None:
    x = torch.ones(2, 2)
    expected = call(x).dtype
    with region(policy=level):
        assert call(x).dtype is expected


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_views_share_memory_at_every_level(level: str) -> None:
    views = (
        *(lambda x: x.view(4), lambda x: x.reshape(4), lambda x: x.t()),
        *(lambda x: x.permute(1, 0), lambda x: x.unsqueeze(0), lambda x: x.expand(1, 2, 2)),
        *(lambda x: x.select(0, 0), lambda x: x.narrow(0, 0, 1), lambda x: x.chunk(2)[0]),
        *(lambda x: x.split(1)[0], lambda x: x.unbind()[0], lambda x: x.diagonal()),
        *(lambda x: x.flatten(), lambda x: x.mT, lambda x: x.hsplit(2)[0]),
        *(lambda x: x.vsplit(2)[0], lambda x: torch.atleast_3d(x), lambda x: x.swapaxes(0, 1)),
        *(lambda x: x.unflatten(0, (1, 2)), lambda x: x.view_as(x)),
        *(lambda x: x.tensor_split(2)[0], lambda x: torch.squeeze(x), lambda x: x.unfold(0, 1, 1)),
    )
    x = torch.ones(2, 2)
    with region(policy=level):
        copies = [
            number
            for number, view in enumerate(views)
            if view(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        ]
    assert copies == []


def test_backward_inside_a_region_keeps_the_forward_precision() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 5), torch.randn(3, 5)
    layer(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]

    def backward(loss: Tensor) -> list[Tensor]:
        loss.backward()
        return [parameter.grad for parameter in layer.parameters()]

    ways = {
        "method": backward,
        "autograd.grad": lambda loss: list(torch.autograd.grad(loss, list(layer.parameters()))),
        "autograd.backward": lambda loss: (
            torch.autograd.backward(loss),
            [parameter.grad for parameter in layer.parameters()],
        )[1],
        "autograd.backward of a list": lambda loss: (
            torch.autograd.backward([loss]),
            [parameter.grad for parameter in layer.parameters()],
        )[1],
    }
    for name, way in ways.items():
        layer.zero_grad()
        with region(full={"linear"}):
            found = way(layer(x).square().sum())
        assert all(map(torch.equal, found, expected)), name


def test_autocast_is_enabled_again_after_a_backward_that_raises() -> None:
    x = torch.ones(1, requires_grad=True)
    with region(half={"add"}):
        loss = (x + 1).sum()
        loss.backward()
        with pytest.raises(RuntimeError):
            torch.ones(1).backward()
        assert torch.is_autocast_enabled("cpu")


def test_an_overridden_cast_emits_an_event() -> None:
    with region(half={"add"}, keep={"mm"}):
        with _events.listen() as events:
            torch.ones(1) + torch.ones(1)
            torch.mm(torch.ones(1, 1), torch.ones(1, 1))
            torch.sin(torch.ones(1))
        torch.ones(1) + torch.ones(1)
    assert events == [
        _events.OpCastOverridden("add", "half", "bfloat16", "listed half by the user"),
        _events.OpCastOverridden("mm", "keep", "as given", "listed keep by the user"),
    ]


def test_no_event_is_built_without_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a record was built")

    for record in ("OpCastOverridden", "Float32Fallback"):
        monkeypatch.setattr(_events, record, never)
    with region(half={"add"}):
        torch.ones(1) + torch.ones(1)
        torch.linalg.det(torch.eye(2, dtype=HALF))


def test_functional_transforms_run_inside() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(4, 3)
    parameters = dict(layer.named_parameters())
    for fields in ({"half": {"add"}}, {"cache": "versioned"}, {"full": {"linear"}}):
        with region(**fields):
            expected = layer(x)
            called = torch.func.functional_call(layer, parameters, (x,))
            mapped = torch.func.vmap(layer)(x)
            gradients = torch.func.grad(
                lambda given: torch.func.functional_call(layer, given, (x,)).float().sum()
            )(parameters)
            per_sample = torch.func.vmap(
                lambda one: torch.func.grad(lambda w: F.linear(one, w).float().sum())(
                    parameters["weight"]
                )
            )(x)
            jacobian = torch.func.jacrev(lambda one: layer(one))(x[0])
        assert called.dtype is mapped.dtype is expected.dtype
        assert torch.equal(called, expected)
        assert gradients["bias"].tolist() == [4.0] * 3
        assert per_sample.shape == (4, 3, 3)
        assert jacobian.shape == (3, 3)


def test_dispatch_modes_see_the_casts() -> None:
    seen: list[Any] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.append((func.overloadpacket.__name__, result.dtype))
            return result

    with region(half={"add"}), Log():
        torch.ones(1) + torch.ones(1)
    assert ("_to_copy", HALF) in seen
    assert ("add", HALF) in seen


def test_fake_tensors_get_the_same_dtypes() -> None:
    with FakeTensorMode(), region(half={"add"}, full={"softmax"}):
        layer, x = nn.Linear(3, 3), torch.ones(2, 3)
        assert layer(x).dtype is HALF
        assert (x + x).dtype is HALF
        assert torch.softmax(layer(x), -1).dtype is FULL
    with region(half={"add"}), FakeTensorMode() as mode:
        assert (mode.from_tensor(torch.ones(2)) + 1).dtype is HALF


def test_a_default_device_and_a_region_share_the_mode_stack() -> None:
    with region(half={"add"}):
        with torch.device("meta"):
            made = torch.ones(2)
            assert (made + made).dtype is FULL
        assert (torch.ones(2) + torch.ones(2)).dtype is HALF
    with torch.device("cpu"), region(half={"add"}):
        assert (torch.ones(2) + torch.ones(2)).dtype is HALF


def test_another_mode_inside_a_region_works() -> None:
    class PassThrough(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with PassThrough(), region(half={"add"}), PassThrough():
        assert (torch.ones(2) + torch.ones(2)).dtype is HALF
        with region(full={"add"}):
            assert (torch.ones(2, dtype=HALF) + torch.ones(2, dtype=HALF)).dtype is FULL
        assert (torch.ones(2) + torch.ones(2)).dtype is HALF


class Tagged(Tensor):
    """A subclass that counts calls."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_is_cast_and_keeps_its_class() -> None:
    x = torch.ones(2, 2).as_subclass(Tagged)
    with region(half={"add"}, full={"softmax"}):
        total, peaks, unit = x + x, F.softmax((x + x), -1), F.normalize(x)
    assert (type(total), total.dtype) == (Tagged, HALF)
    assert (type(peaks), peaks.dtype) == (Tagged, FULL)
    assert type(unit) is Tagged


def test_buffers_and_uninitialized_parameters_work() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Buffer(torch.ones(3))
            self.lazy = nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lazy(x) + self.offset

    with region(half={"add"}):
        assert Model()(torch.ones(2, 5)).dtype is HALF


def test_sparse_and_empty_tensors_work() -> None:
    with region(half={"add"}, full={"mul"}):
        assert (torch.eye(2).to_sparse() + torch.eye(2).to_sparse()).to_dense().dtype is HALF
        assert (torch.ones(0) + torch.ones(0)).dtype is HALF


def test_an_autograd_function_is_not_cast_from_outside() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient + gradient

    x = torch.ones(2, requires_grad=True)
    with region(half={"add"}):
        result = Twice.apply(x)
    result.float().sum().backward()
    assert result.dtype is HALF
    assert x.grad.tolist() == [2.0, 2.0]


# -- float32_inside --------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_float32_inside_returns_the_dtype_of_the_input_and_rounds_once(compiled: bool) -> None:
    torch._dynamo.reset()
    weight = torch.rand(64) + 0.5
    x = (torch.randn(8, 64) * 100 + 1000).to(HALF)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.softmax(x / 100, -1), F.layer_norm(x, (64,), weight), F.softmax(x.float(), 0)

    function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    with region(preset="torch-cuda", float32_inside={"softmax", "layer_norm"}):
        softmax, norm, of_float = function(x)
    assert (softmax.dtype, norm.dtype, of_float.dtype) == (HALF, HALF, FULL)
    eps = torch.finfo(HALF).eps
    expected = torch.softmax((x / 100).double(), -1)
    assert (softmax.double() - expected).abs().max() <= eps * expected.max()
    rounded = weight.to(HALF).double()
    expected = F.layer_norm(x.double(), (64,), rounded)
    assert (norm.double() - expected).abs().max() <= eps * expected.abs().max()
