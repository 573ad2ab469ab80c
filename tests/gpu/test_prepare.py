"""Decorated models on a CUDA device: masters, recurrent layers, and bit-exact resumption."""

from __future__ import annotations

import copy

import pytest
import torch
from support.states import assert_equal
from torch import nn
from torch.nn import functional as F

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}
CASES = [("bfloat16", kind) for kind in ("float32", "split", "kahan", "stochastic", "none")] + [
    ("float16", kind) for kind in ("float32", "kahan", "stochastic")
]


@pytest.fixture(autouse=True)
def _deterministic():
    with torch.backends.cudnn.flags(deterministic=True):
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.batch = nn.BatchNorm1d(16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        hidden, _ = self.rnn(self.batch(self.conv(x)).transpose(1, 2))
        return self.out(self.drop(hidden[:, -1]))


class Run:
    def __init__(self, optimizer, dtype, kind, seed=0, **options):
        torch.manual_seed(seed)
        self.model = Net().to(DEVICE)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = mezzo.GradScaler(DEVICE, init_scale=2.0**8, enabled=dtype == "float16")
        mezzo.decorate(self.model, self.optimizer, dtype=dtype, master=kind, **options)

    @property
    def parts(self):
        return self.model, self.optimizer, self.scaler

    def train(self, steps):
        for _ in range(steps):
            loss = self.model(torch.randn(32, 8, 12, device=DEVICE)).float().square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def state(self):
        return copy.deepcopy([one.state_dict() for one in self.parts])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "kind"), CASES)
def test_a_run_resumes_bit_exactly(tmp_path, optimizer, dtype, kind):
    run = Run(optimizer, dtype, kind)
    run.train(4)
    mezzo.save_checkpoint(tmp_path / "run.pt", *run.parts)
    run.train(4)
    resumed = Run(optimizer, dtype, kind, seed=7)
    resumed.train(1)
    mezzo.load_checkpoint(tmp_path / "run.pt", *resumed.parts)
    resumed.train(4)
    assert_equal(run.state(), resumed.state())


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["float32", "split", "kahan", "stochastic"])
def test_plain_state_dicts_resume_bit_exactly_in_either_order(kind, optimizer, model_first):
    run = Run(optimizer, "bfloat16", kind)
    run.train(3)
    weights, state = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    torch.manual_seed(1)
    run.train(3)
    resumed = Run(optimizer, "bfloat16", kind, seed=7)
    if model_first:
        resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    if not model_first:
        resumed.model.load_state_dict(weights)
    torch.manual_seed(1)
    resumed.train(3)
    assert_equal(run.state(), resumed.state())


@pytest.mark.parametrize("kind", ["float32", "split"])
def test_undecorating_an_untrained_model_restores_every_bit(kind):
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    mezzo.decorate(model, optimizer, dtype="bfloat16", master=kind)
    assert model.rnn.weight_ih_l0.dtype is torch.bfloat16
    mezzo.undecorate(model)
    assert_equal(dict(before), dict(model.state_dict()))
    model(torch.randn(2, 8, 12, device=DEVICE)).sum().backward()
    optimizer.step()


def test_moving_a_decorated_model_to_another_device_is_refused():
    model = Run("SGD", "bfloat16", "float32").model
    with pytest.raises(mezzo.UnsupportedError, match="First move, then decorate"):
        model.to("meta")


@pytest.mark.parametrize("kind", ["float32", "split"])
def test_a_captured_step_trains_a_parameter_that_joins_a_group_in_place(kind):
    weights = []
    for capture in ("auto", False):
        torch.manual_seed(0)
        model = nn.Linear(16, 16).to(DEVICE)
        optimizer = torch.optim.SGD([model.bias], lr=1e-4)
        step = mezzo.TrainStep(
            model,
            nn.functional.mse_loss,
            optimizer,
            "O2",
            dtype="bfloat16",
            master=kind,
            capture=capture,
        )
        x = torch.randn(8, 16, device=DEVICE)
        for count in range(40):
            if count == 20:
                optimizer.param_groups[0]["params"].extend([model.weight])
            step(x, x)
        mezzo.undecorate(model)
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
    torch.manual_seed(0)
    assert not torch.equal(weights[0], nn.Linear(16, 16).to(DEVICE).weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("kernel", "outputs"), [(16, 256), (4, 96), (14, 64)])
def test_errors_of_convolved_patches_are_at_most_those_of_torch(
    dtype, memory_format, kernel, outputs
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, outputs, kernel, stride=kernel)).cuda()
    plain = copy.deepcopy(model).to(dtype).to(memory_format=memory_format)
    exact = copy.deepcopy(plain).double()
    mezzo.decorate(model, torch.optim.SGD(model.parameters(), 0.1), "O2", dtype=dtype)
    model.to(memory_format=memory_format)
    assert "matrix product" in str(mezzo.plan(copy.deepcopy(plain).float(), policy="O2"))
    x = torch.randn(8, 3, 112, 112, device="cuda", dtype=dtype).to(memory_format=memory_format)
    results = []
    for one in (model, plain, exact):
        images = x.to(torch.float64 if one is exact else dtype, copy=True).requires_grad_()
        out = one(images)
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape, device="cuda").to(dtype).to(out.dtype))
        results.append([out, images.grad, *(value.grad for value in one.parameters())])
    for ours, torchs, reference in zip(*results, strict=True):
        errors = [
            float(((value.double() - reference).norm() / reference.norm()).detach())
            for value in (ours, torchs)
        ]
        assert errors[0] <= 1.05 * errors[1] + 1e-6, errors


def test_a_captured_step_with_patches_equals_the_eager_one():
    losses = []
    for capture in (False, True):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 64, 8, stride=8), nn.Flatten(), nn.Linear(64 * 16, 10)
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        step = mezzo.TrainStep(model, F.cross_entropy, optimizer, "O2", capture=capture)
        batches = torch.randn(12, 16, 3, 32, 32).cuda()
        target = torch.arange(16).cuda() % 10
        losses.append([float(step(batch, target)) for batch in batches])
        assert step.captured is capture
    assert losses[0] == losses[1]


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("dropout", [0.1, 0.3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_feed_forward_block_equals_that_of_torch_to_the_bit(dtype, dropout, overflows):
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(256, 4, 1024, dropout, batch_first=True).cuda()
    model = copy.deepcopy(plain)
    mezzo.decorate(model, torch.optim.SGD(model.parameters(), 0.1), "O2", dtype=dtype)
    assert "_ff_block" in vars(model)
    plain.to(dtype)
    x = torch.randn(8, 64, 256, device="cuda", dtype=dtype)
    results = []
    for layer in (plain, model):
        inputs = x.clone().requires_grad_()
        torch.manual_seed(1)
        out = layer._ff_block(inputs)
        out.backward(torch.randn_like(out) * (torch.finfo(dtype).max / 2 if overflows else 1))
        linears = (layer.linear1, layer.linear2)
        results.append([out, inputs.grad, *(one.weight.grad for one in linears)])
    assert inputs.grad.isfinite().all() != overflows
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("before", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_captured_step_trains_a_16_bit_model_as_its_float32_copy(before, dtype):
    def losses(loaded: torch.dtype) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
        for one in model.parameters():
            one.data = one.data.bfloat16().half().to(loaded)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = mezzo.TrainStep(
            model, nn.functional.mse_loss, optimizer, "O2", dtype=dtype, capture=True
        )
        x, y = torch.randn(32, 16, device="cuda"), torch.zeros(32, 4, device="cuda")
        found = [step(x, y).item() for _ in range(12)]
        assert step.captured
        return found

    assert losses(before) == losses(torch.float32)
