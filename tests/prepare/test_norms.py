"""Normalisation layers at O2: float32 inside, the dtype of the input outside."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mezzo
from mezzo.prepare.norms import is_rms_norm


class WrittenOut(nn.Module):
    """An RMS norm as language models of transformers have it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype, x = hidden_states.dtype, hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class WrittenOutNorm(WrittenOut):
    """The name says that it is a norm."""


HALVES = [torch.float16, torch.bfloat16]
NORMS = {
    "layer": lambda: nn.LayerNorm(16),
    "layer without weights": lambda: nn.LayerNorm(16, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(4, 16),
    "rms": lambda: nn.RMSNorm(16),
    "rms, written out": lambda: WrittenOutNorm(16),
}


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def decorated(norm: nn.Module, dtype: torch.dtype = torch.bfloat16, **options) -> Net:
    return mezzo.decorate(Net(norm).eval(), None, "O2", dtype=dtype, **options)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_a_norm_returns_the_dtype_of_its_input(make, dtype):
    net = decorated(make(), dtype)
    assert net(torch.randn(3, 16)).dtype is dtype
    assert net.norm(torch.randn(3, 16)).dtype is torch.float32
    with mezzo.autocast("O2", device_type="cpu", dtype=dtype):
        # A float32 input that the user made stays float32.
        assert net.norm(net.linear(torch.randn(3, 16)).float()).dtype is torch.float32


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_the_result_is_that_of_float32_rounded_once(make, dtype):
    torch.manual_seed(0)
    norm = make()
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.data = parameter.data.to(dtype).float()
    # Sums of squares of such values exceed 65504.
    x = (torch.randn(32, 16) * 100 + 1000).to(dtype)
    expected = copy.deepcopy(norm).double()(x.double())
    found = decorated(norm, dtype).norm(x)
    assert found.dtype is dtype
    error = (found.double() - expected).abs().max()
    assert error <= torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_gradients_are_those_of_statistics_in_float32(make, dtype):
    torch.manual_seed(0)
    norm = make()
    if hasattr(norm, "eps"):
        # 1 / sqrt(eps), which a constant row is multiplied by, is beyond the range of float16.
        norm.eps = 1e-12
    x = torch.randn(4, 16).to(dtype)
    x[0] = 0.25
    weights = 1e-4 * torch.randn(4, 16)
    exact, found = x.double().requires_grad_(), x.clone().requires_grad_()
    (copy.deepcopy(norm).double()(exact) * weights).sum().backward()
    (decorated(norm, dtype).norm(found) * weights).sum().backward()
    for got, expected in zip(found.grad.double(), exact.grad, strict=True):
        assert (got - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_parameters_of_norms_stay_float32_and_get_float32_gradients():
    net = Net(nn.LayerNorm(16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mezzo.decorate(net, optimizer, "O2", dtype="bfloat16")
    net(torch.randn(3, 16)).square().mean().backward()
    assert net.norm.weight.dtype is net.norm.weight.grad.dtype is torch.float32
    before = net.norm.weight.clone()
    optimizer.step()
    assert not torch.equal(before, net.norm.weight)


def test_a_policy_that_lists_the_op_decides():
    net = decorated(nn.LayerNorm(16), full={"layer_norm"})
    assert net(torch.randn(3, 16)).dtype is torch.float32


class Doubled(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_subclass_with_its_own_forward_runs_it():
    torch.manual_seed(0)
    net, x = Net(Doubled(16)), torch.randn(3, 16)
    expected = net(x)
    mezzo.decorate(net.eval(), None, "O2", dtype="bfloat16")
    torch.testing.assert_close(net(x).float(), expected, rtol=0.05, atol=0.05)


def test_other_levels_and_presets_of_other_systems_keep_torchs_forward():
    for policy in ({"policy": "O1"}, {"policy": "O3"}, {"policy": "O2", "preset": "paddle"}):
        net = mezzo.decorate(Net(nn.LayerNorm(16)).eval(), None, dtype="bfloat16", **policy)
        assert "forward" not in net.norm.__dict__


def test_undecorate_restores_the_forward():
    net = decorated(nn.LayerNorm(16))
    mezzo.undecorate(net)
    assert "forward" not in net.norm.__dict__


def test_copies_and_pickles_normalise_with_their_own_parameters():
    net, x = decorated(nn.LayerNorm(16)), torch.randn(3, 16)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for copied in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert torch.equal(copied(x), net(x))
        assert copied(x).dtype is torch.bfloat16
        with torch.no_grad():
            copied.norm.bias += 1
        assert not torch.equal(copied(x), net(x))


@pytest.mark.parametrize("name", ["layer", "group", "rms"])
def test_compiled_and_exported_models_normalise_as_in_eager(name):
    torch._dynamo.reset()
    net, x = decorated(NORMS[name]()), torch.randn(3, 16)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(net, (x,)).module()
    assert torch.equal(compiled(x), net(x))
    assert torch.equal(exported(x), net(x))
    assert compiled(x).dtype is exported(x).dtype is torch.bfloat16


class Functions(nn.Module):
    """Calls a norm and a softmax as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return F.layer_norm(h, (16,)), h.softmax(-1)


def run_eager(model: nn.Module, x: torch.Tensor):
    return model(x)


def run_compiled(model: nn.Module, x: torch.Tensor):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def run_exported(model: nn.Module, x: torch.Tensor):
    return torch.export.export(model, (x,)).module()(x)


@pytest.mark.parametrize(
    ("level", "run"),
    [("O1", run_eager), ("O2", run_eager), ("O2", run_compiled), ("O2", run_exported)],
)
def test_a_norm_and_a_softmax_called_directly_return_float32_unless_listed(level, run):
    x, options = torch.randn(3, 16), {"dtype": "bfloat16", "preset": "torch-cuda"}
    plain = mezzo.decorate(Functions().eval(), None, level, **options)
    assert [one.dtype for one in run(plain, x)] == [torch.float32, torch.float32]
    inside = {"layer_norm", "softmax"}
    listed = mezzo.decorate(Functions().eval(), None, level, float32_inside=inside, **options)
    norm, softmax = run(listed, x)
    assert norm.dtype is softmax.dtype is torch.bfloat16
    h = listed.linear(x.bfloat16() if level == "O2" else x).double()
    assert (softmax - h.softmax(-1)).abs().max() <= 2.0**-7
    assert (norm - F.layer_norm(h, (16,))).abs().max() <= 2.0**-5


class OneMoreNorm(WrittenOut):
    """Gemma's norm: the weight counts from one."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + super().forward(hidden_states) / self.weight


class OtherEpsNorm(WrittenOut):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class GatedNorm(WrittenOut):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None):
        x = super().forward(hidden_states)
        return x if gate is None else x * gate


class SquaredWeightNorm(WrittenOut):
    """Equal to an RMS norm as long as the weight is one."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * super().forward(hidden_states)


class RaisingNorm(WrittenOut):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    "cls", [OneMoreNorm, OtherEpsNorm, GatedNorm, SquaredWeightNorm, RaisingNorm, WrittenOut]
)
def test_a_written_out_norm_that_computes_something_else_is_left_alone(cls):
    net = Net(cls(16)).eval()
    state = torch.get_rng_state()
    mezzo.decorate(net, None, "O2", dtype="bfloat16")
    assert "forward" not in net.norm.__dict__
    assert torch.equal(torch.get_rng_state(), state)


def test_a_written_out_norm_is_restored():
    net = Net(WrittenOutNorm(16)).eval()
    mezzo.decorate(net, None, "O2", dtype="bfloat16")
    assert "forward" in net.norm.__dict__
    mezzo.undecorate(net)
    assert "forward" not in net.norm.__dict__
    assert isinstance(net.norm.weight, nn.Parameter)


def test_a_policy_that_lists_rms_norm_leaves_written_out_norms_alone():
    assert "forward" not in decorated(WrittenOutNorm(16), full={"rms_norm"}).norm.__dict__


def test_norms_of_transformers_are_found():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    assert is_rms_norm(llama.LlamaRMSNorm(16))
    assert is_rms_norm(t5.T5LayerNorm(16))
    assert not is_rms_norm(gemma.GemmaRMSNorm(16))
