"""`trace_overflow` of plain models: which op loses precision, where, and the policy against it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo


class Standardize(nn.Module):
    def forward(self, h):
        mean = h.mean(0)
        variance = (h * h).mean(0) - mean**2
        return (h - mean) / (variance.clamp(min=0.0) + 1e-3).sqrt()


LINE = Standardize.forward.__code__.co_firstlineno + 2


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + 30000 * layer(norm(x))
            x = x + x
        return self.norms[2](x)


def offset(layer, value, std=3.0):
    nn.init.constant_(layer.bias, value)
    nn.init.normal_(layer.weight, std=std)
    return layer


def by_hand():
    torch.manual_seed(0)
    return nn.Sequential(offset(nn.Linear(16, 32), 1000.0), Standardize(), nn.Linear(32, 4))


def batch():
    torch.manual_seed(1)
    return torch.randn(32, 16), torch.randint(4, (32,))


def find(model, *args, **kwargs):
    return mezzo.trace_overflow(model, batch(), F.cross_entropy, *args, **kwargs)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_variance_that_overflows_is_named_with_its_line_and_its_policy(level):
    found = find(by_hand(), level, dtype="float16")
    assert (found.op, found.module) == ("mul", "1")
    assert found.line == f"test_precision_loss.py:{LINE}"
    assert found.policy == mezzo.Policy(level, "float16", full={"mul", "pow", "mean"})
    assert found.cure == "full={'mean', 'mul', 'pow'}"
    assert str(found).startswith(
        f"mul (test_precision_loss.py:{LINE}, in 1) left the range of float16: 1.1e+06."
    )
    assert "Pass full={'mean', 'mul', 'pow'} (verified" in str(found)


def test_a_difference_of_rounded_means_is_named_in_bfloat16():
    found = find(by_hand(), dtype="bfloat16")
    assert (found.op, found.line) == ("sub", f"test_precision_loss.py:{LINE}")
    assert found.reason.startswith("lost its digits: the relative error is ")
    assert found.reason.endswith("because mean, pow, sub rounded to 16 bits")
    assert {"mean", "mul", "pow", "sub"} == found.policy.full


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_suggested_policy_gives_the_loss_of_float32(level, dtype):
    x, y = batch()
    expected = F.cross_entropy(by_hand()(x), y)
    found = find(by_hand(), level, dtype=dtype)

    def loss(policy):
        model = mezzo.decorate(by_hand().eval(), None, policy)
        with mezzo.autocast(policy):
            return F.cross_entropy(model(x).float(), y)

    before = loss(mezzo.Policy(level, dtype))
    assert not before.isfinite() or abs(before - expected) > 1.0
    torch.testing.assert_close(loss(found.policy), expected, rtol=0.02, atol=0.0)


def test_an_overflowing_residual_stream_is_named():
    found = find(Stream(), dtype="float16")
    assert found.op in {"mul", "add"}
    assert "float16" in found.reason
    assert found.policy is not None
    assert not find(Stream(), found.policy)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "middle", [nn.LayerNorm(32), nn.BatchNorm1d(32), nn.GELU()], ids=["layer", "batch", "none"]
)
def test_a_model_without_loss_of_precision_has_no_finding(level, dtype, middle):
    model = nn.Sequential(nn.Linear(16, 32), middle, nn.Dropout(0.5), nn.Linear(32, 4))
    assert not find(model, level, dtype=dtype)


def test_products_are_run_in_float32_by_module():
    model = nn.Sequential(offset(nn.Linear(16, 4), 0.0, std=1e4))
    found = find(model, dtype="float16")
    assert (found.op, found.module) == ("linear", "0")
    assert found.cure == "modules={'0': 'full'}"


def test_a_cast_that_overflows_belongs_to_the_op_that_needs_it():
    model = nn.Sequential(nn.Linear(16, 4))
    found = mezzo.trace_overflow(
        model, torch.full((8, 16), 1e5), lambda y: y.float().mean(), dtype="float16"
    )
    assert (found.op, found.module) == ("linear", "0")


def test_a_masked_softmax_is_no_loss():
    def loss(scores):
        hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
        lowest = torch.full((), torch.finfo(torch.float32).min)
        return (torch.where(hidden, lowest, scores).half() + 0.5).softmax(-1).square().mean()

    model, x = nn.Linear(16, 4), torch.randn(4, 16)
    assert not mezzo.trace_overflow(model, x, loss, dtype="float16")


def test_a_gradient_that_overflows_is_named_by_its_forward_op():
    def loss(outputs):
        return (outputs.exp() * 1e30).sum() * 1e-10

    found = mezzo.trace_overflow(
        nn.Linear(16, 4), torch.randn(8, 16), loss, dtype="float16", full={"exp"}
    )
    assert found.direction == "backward"
    assert found.line.startswith("test_precision_loss.py:")
    assert str(found).startswith("The gradient of ")


def test_model_gradients_buffers_and_random_numbers_are_left_alone():
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    mezzo.trace_overflow(model, (torch.randn(8, 16), torch.randn(8, 4)), F.mse_loss)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model[0]._forward_hooks


def test_float32_that_fails_by_itself_has_no_policy():
    found = mezzo.trace_overflow(
        nn.Linear(16, 4),
        torch.randn(8, 16),
        lambda y: (y.float() * 1e30 * 1e30).sum(),
        dtype="bfloat16",
    )
    assert found.policy is None
    assert "float32 fails too: precision is not the cause." in str(found)


def test_an_op_without_a_float64_kernel_is_taken_as_it_is():
    @torch.library.custom_op("mezzo_test::narrow_only", mutates_args=())
    def narrow_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise TypeError("no float64")
        return x * 2

    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    loss = lambda outputs: narrow_only(outputs.detach()).sum() + outputs.sum()  # noqa: E731
    assert not mezzo.trace_overflow(model, x, loss, dtype="float16")


def test_inputs_may_be_tuples_and_dicts():
    class Sum(nn.Linear):
        def forward(self, left, right):
            return super().forward(left + right)

    x = torch.randn(8, 16)
    for inputs in ((x, x), {"left": x, "right": x}):
        assert not mezzo.trace_overflow(Sum(16, 4), (inputs,), torch.sum, dtype="float16")
