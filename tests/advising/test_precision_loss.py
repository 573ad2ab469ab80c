"""`find_precision_loss`: which op loses precision, where, and the policy that avoids it."""

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
    return mezzo.find_precision_loss(model, F.cross_entropy, *batch(), *args, **kwargs)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_variance_that_overflows_is_named_with_its_line_and_its_policy(level):
    found = find(by_hand(), level, dtype="float16")
    assert (found.op, found.module) == ("mul", "1")
    assert found.source == f"test_precision_loss.py:{LINE}"
    assert found.policy == mezzo.Policy(level, "float16", full={"mul", "pow", "mean"})
    assert found.entry == "full={'mean', 'mul', 'pow'}"
    assert str(found) == (
        "mul left the range of float16: 1.1e+06 (test_precision_loss.py:14 in 1)."
        " Pass full={'mean', 'mul', 'pow'}: then no op of this step loses precision."
    )


def test_a_difference_of_rounded_means_is_named_in_bfloat16():
    found = find(by_hand(), dtype="bfloat16")
    assert (found.op, found.source) == ("sub", f"test_precision_loss.py:{LINE}")
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
    assert find(Stream(), found.policy) is None


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "middle", [nn.LayerNorm(32), nn.BatchNorm1d(32), nn.GELU()], ids=["layer", "batch", "none"]
)
def test_a_model_without_loss_of_precision_gives_none(level, dtype, middle):
    model = nn.Sequential(nn.Linear(16, 32), middle, nn.Dropout(0.5), nn.Linear(32, 4))
    assert find(model, level, dtype=dtype) is None


def test_products_are_run_in_float32_by_module():
    model = nn.Sequential(offset(nn.Linear(16, 4), 0.0, std=3e4))
    found = find(model, dtype="float16")
    assert (found.op, found.module) == ("linear", "0")
    assert found.entry == "modules={'0': 'full'}"


def test_a_cast_that_overflows_belongs_to_the_op_that_needs_it():
    model = nn.Sequential(nn.Linear(16, 4))
    found = mezzo.find_precision_loss(
        model, lambda y: y.float().mean(), torch.full((8, 16), 1e5), dtype="float16"
    )
    assert (found.op, found.module) == ("linear", "0")


def test_a_masked_softmax_is_no_loss():
    def loss(scores):
        hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
        lowest = torch.full((), torch.finfo(torch.float32).min)
        return (torch.where(hidden, lowest, scores).half() + 0.5).softmax(-1).square().mean()

    model, x = nn.Linear(16, 4), torch.randn(4, 16)
    assert mezzo.find_precision_loss(model, loss, x, dtype="float16") is None


def test_a_gradient_that_overflows_is_named_by_its_forward_op():
    def loss(outputs):
        return (outputs.exp() * 1e30).sum() * 1e-10

    found = mezzo.find_precision_loss(
        nn.Linear(16, 4), loss, torch.randn(8, 16), dtype="float16", full={"exp"}
    )
    assert found.backward
    assert found.source.startswith("test_precision_loss.py:")
    assert str(found).startswith("The gradient of ")


def test_model_gradients_buffers_and_random_numbers_are_left_alone():
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    mezzo.find_precision_loss(model, F.mse_loss, torch.randn(8, 16), torch.randn(8, 4))
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model[0]._forward_hooks


def test_float32_that_fails_by_itself_has_no_policy():
    found = mezzo.find_precision_loss(
        nn.Linear(16, 4), lambda y: (y.float() * 1e30 * 1e30).sum(), torch.randn(8, 16),
        dtype="bfloat16",
    )  # fmt: skip
    assert found.policy is None
    assert "No policy was found that avoids this" in str(found)


def test_an_op_without_a_float64_kernel_is_taken_as_it_is():
    @torch.library.custom_op("mezzo_test::narrow_only", mutates_args=())
    def narrow_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise TypeError("no float64")
        return x * 2

    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    loss = lambda outputs: narrow_only(outputs.detach()).sum() + outputs.sum()  # noqa: E731
    assert mezzo.find_precision_loss(model, loss, x, dtype="float16") is None


def test_a_decorated_model_raises():
    model = mezzo.decorate(nn.Linear(16, 4).eval(), dtype="bfloat16")
    with pytest.raises(mezzo.PolicyError, match="undecorate"):
        find(model)


def test_inputs_may_be_tuples_and_dicts():
    class Sum(nn.Linear):
        def forward(self, left, right):
            return super().forward(left + right)

    x = torch.randn(8, 16)
    for inputs in ((x, x), {"left": x, "right": x}):
        assert mezzo.find_precision_loss(Sum(16, 4), torch.sum, inputs, dtype="float16") is None
