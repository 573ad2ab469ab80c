"""Captured training of models of transformers and peft: what the eager step computes."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from support.training_models import (
    LEVELS,
    copies,
    is_tied,
    make_adapted,
    make_batch,
    make_model,
    make_step,
    train,
)
from torch import nn

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers"),
]

EVERY_LEVEL = pytest.mark.parametrize(("level", "dtype"), LEVELS)
STEPS = 10


def _close(one: list[float], other: list[float]) -> bool:
    return one == pytest.approx(other, rel=0.02)


def _check_captured(step: mezzo.TrainStep) -> None:
    assert step.captured, step.eager_reason


def _without_dropout(model: nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
@EVERY_LEVEL
def test_captured_steps_equal_eager_ones(name: str, level: str, dtype: str) -> None:
    losses = []
    for capture in (True, False):
        step = make_step(_without_dropout(make_model(name, "cuda")), level, dtype, capture=capture)
        losses.append(train(step, STEPS, "cuda"))
        assert step.captured == capture, step.eager_reason
    assert _close(*losses)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@EVERY_LEVEL
def test_gradient_checkpointing_in_a_captured_step_changes_nothing(
    name: str, reentrant: bool, level: str, dtype: str
) -> None:
    losses = []
    for checkpoints in (False, True):
        model = make_model(name, "cuda")  # gpt2 with dropout
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        step = make_step(model, level, dtype)
        losses.append(train(step, STEPS, "cuda"))
        _check_captured(step)
    assert _close(*losses)


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_adapters_train_in_a_captured_step(level: str, base: torch.dtype) -> None:
    pytest.importorskip("peft")
    model = make_adapted("llama", base, "cuda")
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    step = make_step(model, level, "bfloat16")
    batch = make_batch(device="cuda")
    losses = [float(step(batch)) for _ in range(STEPS)]
    _check_captured(step)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name].to(parameter.dtype)), name
    model.eval()
    with torch.no_grad():
        expected = float(model(**batch).loss)
        merged = model.merge_and_unload()
        assert float(merged(**batch).loss) == pytest.approx(expected, rel=0.01)


@EVERY_LEVEL
def test_tied_weights_stay_tied_and_are_averaged(level: str, dtype: str) -> None:
    averages = []
    for capture in (True, False):
        model = _without_dropout(make_model("gpt2", "cuda"))
        step = make_step(model, level, dtype, capture=capture)
        ema = mezzo.EMA(model, decay=0.9)
        for seed in range(STEPS):
            step(make_batch(seed, "cuda"))
            ema.update()
        assert step.captured == capture, step.eager_reason
        assert is_tied(model)
        with torch.no_grad(), ema.applied():
            averages.append([one.float() for one in copies(model)])
        assert is_tied(model)
    for one, other in zip(*averages, strict=True):
        assert torch.allclose(one, other, rtol=0.05, atol=0.02)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "float16")])
def test_compiled_submodules_are_captured(level: str, dtype: str) -> None:
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = make_model("llama", "cuda")
        if compiled:
            for layer in model.model.layers:
                layer.mlp = torch.compile(layer.mlp, backend="aot_eager")
        step = make_step(model, level, dtype)
        losses.append(train(step, STEPS, "cuda"))
        _check_captured(step)
    torch._dynamo.reset()
    assert _close(*losses)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@EVERY_LEVEL
def test_generating_between_captured_steps_does_not_change_the_training(
    name: str, level: str, dtype: str
) -> None:
    runs = []
    for generates in (False, True):
        model = _without_dropout(make_model(name, "cuda"))
        step = make_step(model, level, dtype)
        losses = train(step, STEPS, "cuda")
        _check_captured(step)
        if generates:
            model.eval()
            tokens = make_batch(device="cuda")["input_ids"][:2, :5]
            model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False
            )
            model.train()
        losses += train(step, STEPS, "cuda")
        _check_captured(step)
        runs.append(losses)
    assert _close(*runs)


def test_a_step_in_eval_mode_between_training_steps_is_that_of_the_mode() -> None:
    losses = []
    for capture in (True, False):
        model = make_model("gpt2", "cuda")
        step = make_step(model, "O1", "bfloat16", capture=capture)
        train(step, STEPS, "cuda")
        model.eval()
        batch = make_batch(device="cuda")
        losses.append([float(step(batch)) for _ in range(STEPS)])
        # Without dropout the loss falls at every step.
        assert losses[-1] == sorted(losses[-1], reverse=True)
        model.train()
        step(batch)
        assert step.captured == capture, step.eager_reason


def _repeat(step: mezzo.TrainStep, *args: torch.Tensor) -> None:
    for _ in range(STEPS):
        step(*args)


class LayerDrop(nn.Module):
    """Skips a layer by a random number of the host, as wav2vec2 does."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self._draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self._draw() < 0.5 else x + 0 * layer(x)
        return x


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.random, lambda: torch.rand([])],
    ids=["python", "numpy", "torch"],
)
def test_a_model_that_draws_random_numbers_on_the_host_is_not_captured(draw: Any) -> None:
    model = LayerDrop(draw).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step = mezzo.TrainStep(model, nn.functional.mse_loss, optimizer, "O1", dtype="bfloat16")
    x, y = torch.randn(8, 16, device="cuda"), torch.randn(8, 16, device="cuda")
    with pytest.warns(UserWarning, match="eagerly"):
        _repeat(step, x, y)
    assert not step.captured
    assert step.eager_reason is not None
    assert "random" in step.eager_reason


def test_wav2vec2_with_layer_drop_is_not_captured() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        layerdrop=0.5,
    )
    model = transformers.Wav2Vec2Model(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters())
    step = mezzo.TrainStep(
        model,
        lambda outputs: outputs.last_hidden_state.float().square().mean(),
        optimizer,
        "O1",
        dtype="bfloat16",
    )
    waves = torch.randn(2, 1600, device="cuda")
    with pytest.warns(UserWarning, match="eagerly"):
        _repeat(step, waves)
    assert not step.captured
