"""Captured steps: containers of inputs, outputs beside the loss, means, padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.containers import CONTAINERS
from torch import nn
from torch.nn import functional as F

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CALLS = 12


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return self.linear(one - two)


def with_accuracy(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    accuracy = (logits.argmax(-1) == labels).float().mean()
    return F.cross_entropy(logits, labels), {"accuracy": accuracy, "logits": logits}


def make_step(loss_fn: Callable[..., Any] = with_accuracy, **options: Any) -> mezzo.TrainStep:
    torch.manual_seed(0)
    model = Two().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mezzo.TrainStep(model, loss_fn, optimizer, **{"dtype": "bfloat16"} | options)


def inputs(seed: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    one, two = torch.randn(2, 4, 16, generator=generator).to(device)
    return one, two, torch.randint(0, 8, (4,), generator=generator).to(device)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_captured_step_reads_every_container_anew(kind: str, device: str) -> None:
    captured, eager = make_step(capture=True), make_step(capture=False)
    for seed in range(CALLS):
        one, two, labels = inputs(seed, device)
        losses = [
            float(step(CONTAINERS[kind](one=one, two=two), labels)) for step in (captured, eager)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert captured.captured
    assert "captured: 1 shape\n" in repr(captured)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_captured_bodies_and_evaluations_read_every_container_anew(kind: str) -> None:
    torch.manual_seed(0)
    model = Two().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @mezzo.train_step(models=model, optimizers=optimizer, dtype="bfloat16", capture=True)
    def step(batch: Any, labels: torch.Tensor) -> Any:
        values = (
            batch
            if isinstance(batch, tuple)
            else (batch["one"], batch["two"])
            if hasattr(batch, "keys")
            else (batch.one, batch.two)
        )
        return with_accuracy(model(*values), labels)

    eager = make_step(capture=False)
    for seed in range(CALLS):
        one, two, labels = inputs(seed)
        loss, aux = step(CONTAINERS[kind](one=one, two=two), labels)
        assert float(loss) == pytest.approx(float(eager((one, two), labels)), rel=1e-3)
        assert step.outputs is aux
    assert step.captured
    evaluate = mezzo.EvalStep(model)
    for seed in range(5):
        one, two, _ = inputs(seed)
        found = evaluate(CONTAINERS[kind](one=one, two=two))
        with torch.no_grad():
            assert torch.equal(found, model(one, two))
    assert evaluate.captured


def test_outputs_that_were_read_are_not_overwritten_by_later_replays() -> None:
    captured, eager = make_step(capture=True), make_step(capture=False)
    outputs: list[list[torch.Tensor]] = [[], []]
    for seed in range(CALLS):
        one, two, labels = inputs(seed)
        for step, found in zip((captured, eager), outputs, strict=True):
            step((one, two), labels)
            found.append(step.outputs["logits"])
    assert captured.captured
    assert len({logits.data_ptr() for logits in outputs[0]}) == CALLS
    for one, other in zip(*outputs, strict=True):
        assert not one.requires_grad
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-2)


def test_calls_outputs_host_copies_means_and_the_repr_do_not_synchronize(
    request: pytest.FixtureRequest,
) -> None:
    step = make_step(capture=True, mean_over=4)
    batch = inputs(0)
    for _ in range(6):
        step(batch[:2], batch[2])
    assert step.captured
    request.getfixturevalue("no_host_reads")
    pending = []
    for _ in range(20):
        step(batch[:2], batch[2])
        pending.append(step.outputs_on_host())
        pending[-1].ready()
        outputs = step.outputs
        assert step.means.keys() <= {"loss", "accuracy"}
        assert "captured: 1 shape" in repr(step)
    torch.cuda.set_sync_debug_mode("default")
    copies = [one.get() for one in pending]
    assert all(one.ready() for one in pending)
    assert all(one["logits"].device.type == "cpu" for one in copies)
    assert torch.equal(copies[-1]["logits"], outputs["logits"].cpu())
    assert not torch.equal(copies[0]["logits"], copies[-1]["logits"])


def test_means_of_replays_are_those_of_their_losses_and_outputs() -> None:
    step = make_step(capture=True, mean_over=5)
    losses, accuracies = [], []
    for seed in range(15):
        one, two, labels = inputs(seed)
        losses.append(step((one, two), labels))
        accuracies.append(step.outputs["accuracy"])
    torch.cuda.synchronize()
    expected = {
        "loss": float(torch.stack(losses[-5:]).float().mean()),
        "accuracy": float(torch.stack(accuracies[-5:]).mean()),
    }
    assert step.means == pytest.approx(expected, rel=1e-4)


def test_outputs_that_are_not_read_cost_no_memory_per_call() -> None:
    step = make_step(capture=True)
    batch = inputs(0)
    for _ in range(6):
        step(batch[:2], batch[2])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        loss = step(batch[:2], batch[2])
    assert torch.cuda.memory_allocated() - before <= 2 * 512
    assert loss.shape == ()


# transformers reads from the device where it makes masks: such a model may run eagerly.
@pytest.mark.filterwarnings("ignore:The step cannot be captured")
def test_padding_leaves_few_captured_shapes() -> None:
    transformers = pytest.importorskip("transformers")
    losses = []
    for pad_to in (None, 16):
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=32,
                vocab_size=32,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = mezzo.TrainStep(
            model,
            optimizer=optimizer,
            dtype="bfloat16",
            pad_to=pad_to,
            capture=False if pad_to is None else "auto",
        )
        generator = torch.Generator().manual_seed(0)
        found = []
        for length in [*range(9, 17)] * 2:
            tokens = torch.randint(1, 32, (4, length), generator=generator)
            batch = transformers.BatchEncoding(
                {
                    "input_ids": tokens,
                    "attention_mask": torch.ones_like(tokens),
                    "labels": tokens[:, 0] % 2,
                }
            )
            found.append(float(step(batch)))
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert step.eager_reason is not None or "captured: 1 shape\n" in repr(step)
