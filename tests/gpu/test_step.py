"""Captured steps on a CUDA device: they equal eager steps and do not synchronize."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support.step_models import INF, Made, batches, boosted, copied, in_steps, same, weights
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import mezzo
from mezzo import _events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LEVELS = [("O1", "bfloat16"), ("O1", "float16"), ("O2", "bfloat16"), ("O2", "float16")]
OVERFLOWS = (0, 7, 8)
STEPS = 60
SCHEDULES = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 100),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=300),
}


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with torch.backends.cudnn.flags(deterministic=True):
        yield


@contextmanager
def no_host_reads() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def both(
    name: str, level: str, dtype: str, count: int = STEPS, optimizer: str = "SGD", **options: Any
) -> tuple[Any, Any]:
    """Return losses, weights and step of the same run, captured and eager."""
    runs = []
    overflows = OVERFLOWS if dtype == "float16" else ()
    for capture in (True, False):
        made = Made(name, optimizer, "cuda")
        losses, step = in_steps(
            made, batches(name, count, overflows, "cuda"), level, dtype, capture=capture, **options
        )
        runs.append((losses, weights(made.model), step))
    return tuple(runs)


def assert_alike(one: list[float], other: list[float], tolerance: float = 0.0) -> None:
    first, second = torch.tensor(one), torch.tensor(other)
    assert torch.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True), (
        (first - second).abs().nan_to_num(0.0).max()
    )


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_captured_steps_equal_eager_ones(name: str, level: str, dtype: str) -> None:
    (captured, weights_captured, step), (eager, weights_eager, _) = both(name, level, dtype, 200)
    assert step.captured
    # The backward passes of embeddings and attention sum with atomics.
    assert_alike(captured, eager, 0.0 if name == "mlp" else 2e-2)
    if name == "mlp":
        assert same(weights_captured, weights_eager)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_schedules_advance_with_successful_steps_only(
    level: str, dtype: str, schedule: str, optimizer: str
) -> None:
    (captured, weights_captured, step), (eager, weights_eager, _) = both(
        "mlp", level, dtype, 200, optimizer, schedule=SCHEDULES[schedule]
    )
    assert step.captured
    assert_alike(captured, eager)
    assert same(weights_captured, weights_eager)


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_three_calls_make_one_captured_update(level: str, dtype: str) -> None:
    (captured, weights_captured, step), (eager, weights_eager, _) = both(
        "mlp", level, dtype, 201, accumulate=3, clip_norm=1.0
    )
    assert step.captured
    assert_alike(captured, eager)
    assert same(weights_captured, weights_eager)


def test_flush_after_captured_calls_updates_with_the_accumulated_gradients() -> None:
    runs = []
    for capture in (True, False):
        made = Made("mlp", device="cuda")
        _, step = in_steps(
            made, batches("mlp", 31, device="cuda"), "O2", "bfloat16", capture=capture, accumulate=3
        )
        step.flush()
        for x, y in batches("mlp", 6, device="cuda"):
            step(x, y)
        runs.append(weights(made.model))
    assert same(*runs)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_replays_do_not_synchronize(clip_norm: float | None) -> None:
    made = Made("cnn", device="cuda")
    _, step = in_steps(
        made,
        batches("cnn", 8, device="cuda"),
        "O2",
        "float16",
        clip_norm=clip_norm,
        schedule=SCHEDULES["cosine"],
    )
    assert step.captured
    data = [(x, (y[0], y[1])) for x, y in batches("cnn", 40, device="cuda")]
    pinned = [(x.cpu().pin_memory(), tuple(one.cpu().pin_memory() for one in y)) for x, y in data]
    for x, y in pinned[:4]:
        step(x, y)
    with no_host_reads():
        for x, y in data + pinned:
            step(x, y)
            step.loss, step.skipped, step.scale  # noqa: B018 - reading is what is tested


def test_skipped_steps_change_nothing_and_are_reported() -> None:
    made = Made("cnn", device="cuda")
    _, step = in_steps(made, batches("cnn", 8, device="cuda"), "O1", "float16")
    before, state = weights(made.model), copied(made.optimizer.state_dict())
    (x, (target, boost)), *_ = batches("cnn", 1, device="cuda")
    step(torch.full_like(x, INF), (target, boost))
    torch.cuda.synchronize()
    assert step.skipped
    assert step.metrics.skipped_steps == 1
    assert step.scale == 2.0**15
    assert same(weights(made.model), before)
    assert same(made.optimizer.state_dict(), state)
    step(x, (target, boost))
    torch.cuda.synchronize()
    assert not step.skipped
    assert step.scaler is not None
    assert step.scaler.state().good_steps == 9


@pytest.mark.parametrize("kind", ["float32", "split", "kahan"])
def test_a_captured_step_starts_from_a_weight_that_was_filled_through_data(
    kind: str,
) -> None:
    model = nn.Linear(64, 64, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    step = mezzo.TrainStep(
        model,
        lambda output, _: output.float().mean(),
        optimizer,
        "O2",
        dtype="bfloat16",
        master=kind,
    )
    x, y = torch.ones(8, 64, device="cuda"), torch.zeros(8, device="cuda")
    for _ in range(8):
        step(x, y)
    assert step.captured
    model.weight.data.fill_(2.0)
    step(x, y)
    value = mezzo.undecorate(model).weight
    # The gradient is one over the 64 outputs.
    torch.testing.assert_close(
        value,
        torch.full_like(value, 2.0 - 0.001 / 64),
        rtol=2.0**-23 if kind != "kahan" else 2.0**-15,
        atol=0.0,
    )


def test_batch_norm_statistics_advance_and_dropout_draws_new_numbers() -> None:
    made = Made("cnn", device="cuda")
    _, step = in_steps(made, batches("cnn", 8, device="cuda"), "O1", "bfloat16")
    for group in made.optimizer.param_groups:
        group["lr"] = 0.0
    (x, y), *_ = batches("cnn", 1, device="cuda")
    losses = {float(step(x, y)) for _ in range(8)}
    assert len(losses) > 1
    assert int(made.model.norm.num_batches_tracked) == 16


def test_changed_hyper_parameters_take_effect_at_the_next_step() -> None:
    runs = []
    for capture in (True, False):
        made = Made("mlp", device="cuda")
        _, step = in_steps(made, batches("mlp", 8, device="cuda"), "O2", "float16", capture=capture)
        for change in (
            {"lr": 0.5},
            {"momentum": 0.1},
            {"weight_decay": 0.3},
            {"lr": 0.0},
            {"nesterov": True, "lr": 0.1},
        ):
            made.optimizer.param_groups[0].update(change)
            for x, y in batches("mlp", 2, device="cuda"):
                step(x, y)
        runs.append(weights(made.model))
    assert same(*runs)


def test_train_eval_and_frozen_parameters_take_effect_at_the_next_step() -> None:
    runs = []
    for capture in (True, False):
        made = Made("cnn", device="cuda")
        made.model.drop.p = 0.0
        _, step = in_steps(
            made, batches("cnn", 8, device="cuda"), "O1", "bfloat16", capture=capture
        )
        losses = []
        for change in (
            nn.Module.eval,
            nn.Module.train,
            lambda model: model.conv.requires_grad_(requires_grad=False),
        ):
            change(made.model)
            losses += [float(step(x, y)) for x, y in batches("cnn", 6, device="cuda")]
        runs.append((losses, made.model.conv.weight.detach().clone()))
    assert_alike(runs[0][0], runs[1][0], 2e-2)


def test_new_shapes_are_captured_when_they_come_again() -> None:
    made = Made("mlp", device="cuda")
    _, step = in_steps(made, batches("mlp", 5, device="cuda"), "O1", "bfloat16")
    sizes = list(range(2, 8))
    with _events.listen() as caught:
        for size in sizes:
            for x, y in batches("mlp", 3, device="cuda", size=size):
                step(x, y)
    assert sum(isinstance(event, _events.StepCaptured) for event in caught) == len(sizes)


def test_graphs_of_many_shapes_share_memory() -> None:
    def peak(sizes: list[int]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        step = mezzo.TrainStep(model, lambda outputs: outputs.square().mean(), optimizer, "O2")
        for size in sizes:
            step(torch.randn(size, 512, device="cuda"))
        assert step.captured, step.eager_reason
        return torch.cuda.max_memory_reserved() - before

    lengths = [64 * (index * 7 % 40 + 1) * 8 for index in range(40)]
    alone = peak([max(lengths)] * 8)
    # Eager calls run beside the graphs. In memory of their own 40 graphs would take 20 times.
    assert peak(lengths * 3) <= 3 * alone


def test_results_are_the_same_over_changing_shapes() -> None:
    runs = []
    for capture in (True, False):
        made = Made("mlp", "AdamW", "cuda")
        _, step = in_steps(made, batches("mlp", 6, device="cuda"), "O2", "float16", capture=capture)
        for _ in range(3):
            for size in (4, 8, 6):
                for x, y in batches("mlp", 3, device="cuda", size=size):
                    step(x, y)
        runs.append(weights(made.model))
    assert same(*runs)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.out(x)
        if outputs.abs().sum().item() < 0:
            outputs = -outputs
        return outputs


def test_a_synchronizing_line_is_named_and_the_step_runs_eagerly() -> None:
    model = Reads().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mezzo.TrainStep(model, boosted, optimizer, dtype="float16")
    with (
        pytest.warns(UserWarning, match=r"outputs\.abs\(\)\.sum\(\)\.item\(\) < 0"),
        _events.listen() as caught,
    ):
        losses = [float(step(x, y)) for x, y in batches("mlp", 40, device="cuda")]
    assert not step.captured
    assert "test_step.py" in (step.eager_reason or "")
    assert sum(isinstance(event, _events.StepNotCaptured) for event in caught) == 1
    assert losses[-1] == losses[-1]


def test_a_failed_capture_leaves_the_random_numbers_and_the_run_intact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    for fails in (True, False):
        made = Made("mlp", device="cuda")
        model = nn.Sequential(made.model, nn.Dropout(0.3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def loss(
            outputs: torch.Tensor, target: torch.Tensor, boost: torch.Tensor, fails: bool = fails
        ) -> torch.Tensor:
            if fails and torch._C._cuda_isCurrentStreamCapturing():
                raise RuntimeError("not this one")
            return boosted(outputs, target, boost)

        step = mezzo.TrainStep(
            model, loss, optimizer, dtype="float16", capture="auto" if fails else False
        )
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = [float(step(x, y)) for x, y in batches("mlp", 12, device="cuda")]
        assert any("not this one" in str(one.message) for one in caught) is fails
        runs.append(losses)
    assert_alike(*runs)


class Signs(torch.optim.Optimizer):
    """An optimizer of a user, with a state and a host number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    rate = group["lr"] / state["count"]
                    parameter.sub_(parameter.grad.sign(), alpha=rate)


@pytest.mark.parametrize(
    ("level", "dtype"), [("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")]
)
def test_any_optimizer_steps_behind_a_captured_forward_and_backward_pass(
    level: str, dtype: str
) -> None:
    runs = []
    for capture in (True, False):
        made = Made("mlp", device="cuda")
        step = mezzo.TrainStep(
            made.model,
            boosted,
            Signs(made.model.parameters()),
            level,
            dtype=dtype,
            capture=capture,
        )
        losses = []
        for index, (x, (target, boost)) in enumerate(batches("mlp", 30, device="cuda")):
            factor = float("inf") if dtype == "float16" and index == 20 else 1.0
            losses.append(float(step(x, (target, boost * factor))))
        assert step.captured is capture
        runs.append((losses, weights(made.model)))
    assert runs[0][0][:20] == runs[1][0][:20]
    assert same(runs[0][1], runs[1][1])


class LayerDrop(nn.Module):
    """Drops a layer by a random number of the host, as wav2vec2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.first(x) * float(torch.rand([]) < 0.5))


def test_random_numbers_of_the_host_are_not_captured() -> None:
    runs = []
    for capture in ("auto", False):
        torch.manual_seed(0)
        model = LayerDrop().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mezzo.TrainStep(model, boosted, optimizer, dtype="bfloat16", capture=capture)
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.append([float(step(x, y)) for x, y in batches("mlp", 20, device="cuda")])
        assert any("random numbers on the host" in str(one.message) for one in caught) == (
            capture == "auto"
        )
        assert not step.captured
    assert_alike(*runs)


class NeverDrops(nn.Module):
    """Draws a number on the host for a layer that is never dropped, as BART does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) < 0.0:
            return self.out(x)
        return self.out(F.dropout(self.first(x), 0.2))


def test_random_numbers_of_the_host_without_an_effect_are_captured_and_drawn_again() -> None:
    runs = []
    for capture in (True, False):
        torch.manual_seed(0)
        model = NeverDrops().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mezzo.TrainStep(model, boosted, optimizer, dtype="float16", capture=capture)
        data = batches("mlp", 12, device="cuda")
        torch.manual_seed(1)
        losses = [float(step(x, y)) for x, y in data]
        assert step.captured is capture
        runs.append([*losses, float(torch.rand(1))])
    assert_alike(*runs)


class ReadsUnlessCaptured(nn.Module):
    """Reads from the device unless it is captured, as transformers' masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing() and x.isnan().any():
            return self.out(x) * 0
        return self.out(x)


def test_a_model_that_reads_only_when_it_is_not_captured_is_captured() -> None:
    runs = []
    for capture in (True, False):
        torch.manual_seed(0)
        model = ReadsUnlessCaptured().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mezzo.TrainStep(model, boosted, optimizer, dtype="float16", capture=capture)
        runs.append([float(step(x, y)) for x, y in batches("mlp", 12, device="cuda")])
        assert step.captured is capture
    assert_alike(*runs)


def test_a_failed_capture_leaves_graphs_of_other_steps_and_their_random_numbers_intact() -> None:
    def make(module: Callable[[], nn.Module], capture: bool) -> mezzo.TrainStep:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.3), module()).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return mezzo.TrainStep(model, boosted, optimizer, dtype="float16", capture=capture)

    runs = []
    for capture in (True, False):
        one, other = (
            make(each, capture) for each in (partial(nn.Linear, 8, 4), ReadsUnlessCaptured)
        )
        torch.manual_seed(1)
        losses = [float(one(x, y)) for x, y in batches("mlp", 8, device="cuda")]
        losses += [float(other(x, y)) for x, y in batches("mlp", 8, device="cuda")]
        losses += [float(one(x, y)) for x, y in batches("mlp", 4, device="cuda")]
        assert one.captured is other.captured is capture
        runs.append(losses)
    assert_alike(*runs)


def test_an_eager_step_with_a_captured_update_trains_as_an_eager_one() -> None:
    runs = []
    for capture in ("auto", False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Reads()).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        step = mezzo.TrainStep(
            model,
            boosted,
            optimizer,
            "O2",
            dtype="float16",
            capture=capture,
            scheduler=scheduler,
            clip_norm=1.0,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for index, (x, (target, boost)) in enumerate(batches("mlp", 30, device="cuda")):
                step(x, (target, boost * (float("inf") if index in (18, 19) else 1.0)))
        assert not step.captured
        runs.append((weights(model), step.metrics.skipped_steps, scheduler.get_last_lr()))
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


def test_a_captured_run_resumes_from_a_saved_state() -> None:
    data = list(batches("cnn", 24, OVERFLOWS, "cuda"))
    schedule = SCHEDULES["cosine"]
    made, made_again = Made("cnn", "AdamW", "cuda"), Made("cnn", "AdamW", "cuda")
    _, step = in_steps(made, iter(data[:13]), "O2", "float16", accumulate=2, schedule=schedule)
    state = copied(step.state_dict())
    expected = [float(step(x, y)) for x, y in data[13:]]
    _, resumed = in_steps(
        made_again, iter(data[:5]), "O2", "float16", accumulate=2, schedule=schedule
    )
    resumed.load_state_dict(state)
    assert_alike([float(resumed(x, y)) for x, y in data[13:]], expected, 1e-3)


def test_a_loaded_optimizer_state_is_captured_again() -> None:
    runs = []
    for capture in (True, False):
        made = Made("mlp", "AdamW", "cuda")
        _, step = in_steps(
            made, batches("mlp", 8, device="cuda"), "O2", "bfloat16", capture=capture
        )
        state = copied((made.model.state_dict(), made.optimizer.state_dict()))
        for x, y in batches("mlp", 8, device="cuda"):
            step(x, y)
        made.model.load_state_dict(state[0])
        made.optimizer.load_state_dict(state[1])
        for x, y in batches("mlp", 8, device="cuda"):
            step(x, y)
        runs.append(weights(made.model))
    assert same(*runs)


def test_weights_written_by_other_code_are_used() -> None:
    runs = []
    for capture in (True, False):
        made = Made("mlp", device="cuda")
        _, step = in_steps(
            made, batches("mlp", 8, device="cuda"), "O2", "bfloat16", capture=capture
        )
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.clamp_(-0.05, 0.05)
        for x, y in batches("mlp", 4, device="cuda"):
            step(x, y)
        runs.append(weights(made.model))
    assert same(*runs)


def test_a_gan_is_captured() -> None:
    runs = []
    for capture in (True, False):
        torch.manual_seed(0)
        generator, critic = (
            nn.Linear(4, 8).cuda(),
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda(),
        )
        generator_optimizer, critic_optimizer = (
            torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)
        )

        @mezzo.train_step(
            models=[generator, critic],
            optimizers=[generator_optimizer, critic_optimizer],
            policy="O1",
            dtype="float16",
            capture=capture,
        )
        def step(
            update,
            real,
            noise,
            generator=generator,
            critic=critic,
            generator_optimizer=generator_optimizer,
            critic_optimizer=critic_optimizer,
        ):
            fake = generator(noise)
            loss_critic = (
                F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
            )
            update(loss_critic, critic_optimizer)
            loss = F.softplus(-critic(fake)).mean()
            update(loss, generator_optimizer)
            return loss, {"critic": loss_critic}

        torch.manual_seed(1)
        runs.append(
            [
                [float(loss), float(more["critic"])]
                for loss, more in (
                    step(torch.randn(16, 8, device="cuda"), torch.randn(16, 4, device="cuda"))
                    for _ in range(30)
                )
            ]
        )
        assert step.captured is capture
    assert_alike(*runs)


def test_evaluation_is_captured_and_uses_new_weights() -> None:
    made = Made("cnn", device="cuda")
    _, step = in_steps(made, batches("cnn", 6, device="cuda"), "O2", "bfloat16")
    evaluate = mezzo.EvalStep(made.model)
    (x, y), *_ = batches("cnn", 1, device="cuda")
    for _ in range(5):
        outputs = evaluate(x)
    copied_outputs = outputs.clone()
    assert evaluate.captured
    for _ in range(3):
        step(x, y)
    after = evaluate(x)
    assert torch.equal(outputs, copied_outputs)
    assert not torch.equal(after, copied_outputs)
    assert made.model.training
    made.model.eval()
    with torch.no_grad():
        assert torch.equal(made.model(x), after)


def test_channels_last_is_measured_and_reported() -> None:
    made = Made("cnn", device="cuda")
    step = mezzo.TrainStep(made.model, boosted, made.optimizer, "O2", dtype="float16")
    with _events.listen() as caught:
        for x, y in batches("cnn", 8, device="cuda"):
            step(x, y)
    events = [event for event in caught if isinstance(event, _events.LayoutChosen)]
    assert len(events) == 1
    assert events[0].reason == step.channels_last_reason
    assert "ms with channels_last" in step.channels_last_reason
    assert step.captured


def test_channels_last_on_request_gives_the_same_training() -> None:
    losses = [
        in_steps(
            Made("cnn", device="cuda"),
            batches("cnn", 12, device="cuda"),
            "O2",
            "float16",
            channels_last=last,
        )[0]
        for last in (True, False)
    ]
    assert_alike(*losses, 2e-2)


@pytest.mark.filterwarnings(
    "ignore"
)  # torch warns about its own modules while Inductor imports them
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_convolutional_model_is_captured_and_trains_as_an_eager_one(level: str) -> None:
    """All compilation is in the warm-up: inputs of another dtype would compile in the capture."""
    torch._dynamo.reset()
    runs = []
    for compiled in (True, False):
        made = Made("cnn", device="cuda")
        made.model.drop.p = 0.0  # compiled code draws other random numbers
        losses, step = in_steps(
            made,
            batches("cnn", 12, device="cuda"),
            level,
            "float16",
            compile=compiled,
            channels_last=True,
        )
        assert step.captured, step.eager_reason
        runs.append(losses)
    assert_alike(*runs, 2e-2)


def test_another_captured_graph_is_not_affected() -> None:
    source = torch.arange(1024.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2
    _, step = in_steps(
        Made("mlp", device="cuda"), batches("mlp", 8, device="cuda"), "O1", "bfloat16"
    )
    graph.replay()
    for x, y in batches("mlp", 4, device="cuda"):
        step(x, y)
    assert step.captured
    assert torch.equal(doubled, source * 2)


def test_a_captured_step_does_not_use_workspaces_that_other_code_frees() -> None:
    """cuBLAS sums in a workspace, which torch.compile frees: a replay must not write to it."""
    torch.manual_seed(0)
    model = nn.Linear(16384, 64, device="cuda")
    step = mezzo.TrainStep(
        model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0), "O2", dtype="bfloat16"
    )
    x, y = torch.randn(64, 16384, device="cuda"), torch.randn(64, 64, device="cuda")
    losses = [step(x, y) for _ in range(6)]
    assert step.captured
    torch._C._cuda_clearCublasWorkspaces()
    buffers = []
    for stream in (torch.cuda.current_stream(), step._runner._graphs.capturer.stream):
        with torch.cuda.stream(stream):
            buffers += [
                torch.full((size << 20,), 7, dtype=torch.uint8, device="cuda")
                for size in (32, 32, 8, 8, 1)
            ]
    torch.cuda.synchronize()
    losses += [step(x, y) for _ in range(3)]
    torch.cuda.synchronize()
    assert all(bool((one == 7).all()) for one in buffers)
    assert len({float(loss) for loss in losses}) == 1


def test_a_captured_graph_that_skips_wrongly_is_detected_and_training_continues_eagerly() -> None:
    """Only the captured loss has an infinite factor, so that replays skip without an overflow."""
    made = Made("cnn", "SGD", "cuda")

    def broken_in_a_capture(
        outputs: torch.Tensor, target: torch.Tensor, boost: torch.Tensor
    ) -> torch.Tensor:
        capturing = torch._C._cuda_isCurrentStreamCapturing()
        return boosted(outputs, target, boost) * (INF if capturing else 1.0)

    step = mezzo.TrainStep(
        made.model, broken_in_a_capture, made.optimizer, "O2", dtype="float16", channels_last=False
    )

    def train(count: int) -> None:
        for x, y in batches("cnn", count, (), "cuda"):
            step(x, y)

    with pytest.warns(UserWarning, match="error in mezzo"):
        train(40)
    assert not step.captured
    before = weights(made.model)
    train(3)
    torch.cuda.synchronize()
    assert not step.skipped
    assert not same(before, weights(made.model))


def test_a_stall_by_an_overflow_names_the_parameter_and_changes_nothing() -> None:
    overflows = range(20, 30)
    runs = []
    for capture in (True, False):
        made = Made("cnn", "SGD", "cuda")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses, step = in_steps(
                made, batches("cnn", STEPS, overflows, "cuda"), "O2", "float16", capture=capture
            )
        runs.append(
            (
                losses,
                weights(made.model),
                step,
                [str(one.message) for one in caught if "updates in a row" in str(one.message)],
            )
        )
    (losses, found, step, messages), (expected_losses, expected, plain, no_messages) = runs
    assert_alike(losses, expected_losses)
    assert same(found, expected)
    assert step.captured
    assert step.scaler.get_scale() == plain.scaler.get_scale()
    assert len(messages) == 1
    assert "the gradient of 'conv.weight' is not finite" in messages[0]
    assert no_messages == []
