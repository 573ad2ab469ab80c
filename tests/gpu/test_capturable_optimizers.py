"""Optimizers without a kernel on a CUDA device: captured steps equal eager ones, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.step_models import MODELS, batches, boosted, same, weights
from torch import nn
from torch.optim import lr_scheduler

import mezzo
from mezzo.optim.bind_optimizer import bind_optimizer
from mezzo.optim.capturable_step import CapturableBinding
from mezzo.optim.master_weights import MasterWeights
from mezzo.optim.muon_step import orthogonalize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS, OVERFLOW, CHANGE = 14, 9, 11
LEVELS = [("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")]


def muon_and_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.dim() == 2 else others).append(parameter)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "RMSprop": lambda p: [torch.optim.RMSprop(p, lr=0.01)],
    "RMSprop momentum": lambda p: [
        torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, weight_decay=0.1)
    ],
    "NAdam": lambda p: [torch.optim.NAdam(p, lr=0.01)],
    "NAdamW": lambda p: [
        torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)
    ],
    "RAdam": lambda p: [torch.optim.RAdam(p, lr=0.01, weight_decay=0.1)],
    "Adamax": lambda p: [torch.optim.Adamax(p, lr=0.01)],
    "Adadelta": lambda p: [torch.optim.Adadelta(p, lr=0.5)],
    "ASGD": lambda p: [torch.optim.ASGD(p, lr=0.01)],
    "Rprop": lambda p: [torch.optim.Rprop(p, lr=0.01)],
    "Muon and AdamW": muon_and_adamw,
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_level = pytest.mark.parametrize(("level", "dtype"), LEVELS)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with torch.backends.cudnn.flags(deterministic=True):
        yield


class Run:
    """A training step over an MLP, with an overflow and changes of the learning rate."""

    def __init__(self, name: str, level: str, dtype: str, *, capture: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = MODELS["mlp"]().cuda()
        self.optimizers = OPTIMIZERS[name](self.model.parameters())
        schedule = options.pop("schedule", None)
        if schedule is not None:
            options["scheduler"] = [schedule(one) for one in self.optimizers]
        self.step = mezzo.TrainStep(
            self.model,
            boosted,
            self.optimizers,
            level,
            dtype=dtype,
            capture=capture,
            channels_last=False,
            **options,
        )
        self.skips: list[int] = []

    def train(self, count: int = STEPS, *, change: bool = True) -> list[float]:
        losses = []
        overflows = (OVERFLOW,) if self.step.scaler is not None else ()
        for place, batch in enumerate(batches("mlp", count, overflows, "cuda")):
            if change and place == CHANGE:
                for optimizer in self.optimizers:
                    optimizer.param_groups[0]["lr"] *= 0.25
            before = weights(self.model)
            losses.append(self.step(*batch))
            if same(before, weights(self.model)):
                self.skips.append(place)
        return [float(loss) for loss in losses]

    def state(self) -> Any:
        return copy.deepcopy(
            [weights(self.model), *[one.state_dict()["state"] for one in self.optimizers]]
        )


@every_optimizer
@every_level
def test_captured_steps_equal_eager_ones(name: str, level: str, dtype: str) -> None:
    runs = [Run(name, level, dtype, capture=capture) for capture in (True, False)]
    losses = [run.train() for run in runs]
    assert runs[0].step.captured
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), 0, 0, equal_nan=True)
    assert same(runs[0].state(), runs[1].state())
    if dtype == "float16":
        assert runs[0].skips == runs[1].skips == [OVERFLOW]


@every_optimizer
@every_level
def test_captured_steps_follow_a_scheduler(name: str, level: str, dtype: str) -> None:
    runs = [
        Run(
            name,
            level,
            dtype,
            capture=capture,
            schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
        )
        for capture in (True, False)
    ]
    losses = [run.train(change=False) for run in runs]
    assert runs[0].step.captured
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), 0, 0, equal_nan=True)
    assert same(runs[0].state(), runs[1].state())
    successful = STEPS - (dtype == "float16")
    for run in runs:
        for optimizer in run.optimizers:
            (group,) = optimizer.param_groups
            assert group["lr"] == pytest.approx(group["initial_lr"] * 0.7 ** (successful // 2))


@pytest.mark.parametrize("name", ["RMSprop momentum", "NAdam", "Muon and AdamW"])
def test_replays_do_not_read_on_the_host(name: str) -> None:
    run = Run(name, "O2", "float16", capture=True, clip_norm=1.0)
    run.train(6, change=False)
    assert run.step.captured
    data = list(batches("mlp", 3, (1,), "cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data:
            run.step(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"])
def test_undecorating_returns_step_counts_to_the_cpu(name: str) -> None:
    run = Run(name, "O2", "float16", capture=True)
    run.train(6, change=False)
    (optimizer,) = run.optimizers
    states = [optimizer.state[parameter] for parameter in run.model.parameters()]
    assert {state["step"].device.type for state in states} == {"cuda"}
    assert optimizer.state_dict()["param_groups"][0]["capturable"] is False
    mezzo.undecorate(run.model)
    states = [optimizer.state[parameter] for parameter in run.model.parameters()]
    hosted = ("step", "mu_product") if name == "NAdam" else ("step",)
    assert {state[key].device.type for state in states for key in hosted} == {"cpu"}
    assert optimizer.param_groups[0]["capturable"] is False
    x, target = next(batches("mlp", 1, device="cuda"))
    boosted(run.model(x), *target).backward()
    optimizer.step()
    assert all(torch.isfinite(one).all() for one in run.model.parameters())


@pytest.mark.parametrize("name", ["NAdam", "RMSprop momentum", "Muon and AdamW"])
def test_a_state_dict_of_a_captured_run_continues_in_plain_torch(name: str) -> None:
    run = Run(name, "O1", "bfloat16", capture=True)
    run.train(6, change=False)
    plain = MODELS["mlp"]().cuda()
    plain.load_state_dict(run.model.state_dict())
    optimizers = OPTIMIZERS[name](plain.parameters())
    for one, other in zip(optimizers, run.optimizers, strict=True):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    x, target = next(batches("mlp", 1, device="cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        loss = boosted(plain(x), *target)
    loss.backward()
    for one in optimizers:
        one.step()
    run.step(x, target)
    pairs = zip(plain.parameters(), run.model.parameters(), strict=True)
    assert all(torch.allclose(*pair, 1e-2, 1e-3) for pair in pairs)


@pytest.mark.parametrize("number", ["betas", "load"])
def test_a_changed_number_or_state_captures_again(number: str) -> None:
    runs = [Run("NAdam", "O2", "bfloat16", capture=capture) for capture in (True, False)]
    for run in runs:
        run.train(6, change=False)
        (optimizer,) = run.optimizers
        if number == "betas":
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        else:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run.train(6, change=False)
    assert runs[0].step.captured
    assert same(runs[0].state(), runs[1].state())


@pytest.mark.parametrize("name", ["NAdam", "RMSprop"])
def test_cycled_momentum_reads_the_flag_on_the_host_and_trains(name: str) -> None:
    run = Run(
        name,
        "O2",
        "float16",
        capture=False,
        schedule=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=50),
    )
    losses = run.train(10, change=False)
    assert OVERFLOW in run.skips
    assert torch.isfinite(torch.tensor(losses[:OVERFLOW])).all()


@pytest.mark.filterwarnings("ignore:This loss was computed in bfloat16")
@pytest.mark.parametrize("name", ["NAdam", "Muon and AdamW"])
def test_bfloat16_gradients_may_be_scaled(name: str) -> None:
    runs = [
        Run(name, "O2", "bfloat16", capture=capture, scaler=mezzo.GradScaler("cuda"))
        for capture in (True, False)
    ]
    for run in runs:
        run.train()
        assert run.skips == [OVERFLOW]
    assert runs[0].step.captured
    assert same(runs[0].state(), runs[1].state())


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_tracked_norm_is_that_of_the_replayed_gradients(clip_norm: float | None) -> None:
    norms = []
    for capture in (True, False):
        run = Run("NAdam", "O2", "float16", capture=capture, clip_norm=clip_norm)
        for optimizer in run.optimizers:
            optimizer._bound.track_norm()
        run.train(8, change=False)
        norms.append(mezzo.grad_norm(run.optimizers[0]))
    assert float(norms[0]) > 0
    assert torch.equal(*norms)


def test_a_fused_step_tracks_the_norm_without_clipping() -> None:
    model = nn.Linear(300, 20, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    optimizer._bound.track_norm()
    for _ in range(2):
        model(torch.randn(8, 300, device="cuda")).float().square().mean().backward()
        wanted = nn.utils.get_total_norm([one.grad.float() for one in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(mezzo.grad_norm(optimizer), wanted)


def test_unguarded_and_guarded_steps_are_equal() -> None:
    results = []
    for found_inf in (None, torch.zeros((), device="cuda")):
        torch.manual_seed(1)
        parameters = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((400, 200), 7)]
        masters = MasterWeights("split")
        for parameter in parameters:
            masters.adopt(parameter, torch.bfloat16)
        optimizer = torch.optim.NAdam(parameters, lr=0.01)
        assert isinstance(bind_optimizer(optimizer, masters), CapturableBinding)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.found_inf, optimizer.grad_scale = found_inf, None
            optimizer.step()
        results.append([masters.read(parameter) for parameter in parameters])
    assert same(*results)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("master", ["split", "kahan"])
@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.Muon])
def test_a_step_notices_a_write_through_data(make: Any, master: str, capture: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False).cuda()
    optimizer = make(model.parameters(), lr=0.01)
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        optimizer,
        policy="O2",
        dtype="bfloat16",
        master=master,
        capture=capture,
    )
    x = torch.randn(8, 32, device="cuda")
    for _ in range(6):
        step(x, x)
    assert step.captured is capture
    model.weight.data.fill_(1.0)
    optimizer.param_groups[0]["lr"] = 0.0
    step(x, x)
    assert (mezzo.master_params(model)["weight"] == 1.0).all()


@pytest.mark.parametrize("shape", [(768, 2304), (3072, 768), (768, 768)])
def test_stacked_matrices_are_orthogonalized_as_torchs_muon_does(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(4, *shape, device="cuda")
    parameters = [nn.Parameter(torch.zeros(shape, device="cuda")) for _ in matrices]
    muon = torch.optim.Muon(parameters, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    for parameter, matrix in zip(parameters, matrices, strict=True):
        parameter.grad = matrix.clone()
    muon.step()
    ratio = max(1.0, shape[0] / shape[1]) ** 0.5
    results = orthogonalize(matrices, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
    for parameter, result in zip(parameters, results, strict=True):
        difference = (parameter.detach() / ratio + result).norm() / result.norm()
        assert difference < 0.02
