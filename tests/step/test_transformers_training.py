"""Training models of transformers and peft: checkpointing, LoRA, tied weights, EMA, generate."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.step_models import copied
from support.training_models import (
    LEVELS,
    copies,
    is_tied,
    make_adapted,
    make_batch,
    make_model,
    make_step,
    train,
    train_by_hand,
)

import mezzo
from mezzo.optim.binding import optimizer_binding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers"),
]
EVERY_LEVEL = pytest.mark.parametrize(("level", "dtype"), LEVELS)


# -- gradient checkpointing ------------------------------------------------------------------------


def _trained(checkpoints: bool | None, by_hand: bool, level: str, dtype: str) -> Any:
    model = make_model("gpt2")  # with dropout
    if checkpoints is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    if by_hand:
        losses = train_by_hand(model, level, dtype, 2)
    else:
        losses = train(make_step(model, level, dtype), 2)
    return losses, copies(model)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("by_hand", [False, True])
@EVERY_LEVEL
def test_gradient_checkpointing_changes_nothing(by_hand, level, dtype):
    losses, weights = _trained(None, by_hand, level, dtype)
    for reentrant in (False, True):
        other_losses, other_weights = _trained(reentrant, by_hand, level, dtype)
        assert losses == other_losses
        assert all(map(torch.equal, weights, other_weights))


# -- LoRA ------------------------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("base", ["float32", "half"])
@EVERY_LEVEL
def test_only_the_adapters_are_trained_and_have_masters(level, dtype, base):
    pytest.importorskip("peft")
    half = getattr(torch, dtype)
    model = make_adapted("llama", half if base == "half" else torch.float32)
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = copies(model)
    step = make_step(model, level, dtype)
    losses = [float(step(make_batch())) for _ in range(4)]
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name].to(parameter.dtype)), name
    weight = model.base_model.model.lm_head.weight
    assert weight.dtype is (half if base == "half" or level == "O2" else torch.float32)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert set(step.optimizer.state) == set(adapters)
    assert not all(map(torch.equal, before, copies(model)))
    binding = optimizer_binding(step.optimizer)
    assert (binding is None) == (level == "O1")
    if binding is not None:
        assert set(binding.masters) == set(adapters)


@pytest.mark.parametrize(
    ("level", "options", "saved"),
    [
        ("O1", {}, torch.float32),
        ("O2", {}, torch.bfloat16),
        ("O2", {"save_dtype": "float32"}, torch.float32),
    ],
)
def test_saved_adapters_have_the_dtype_of_the_policy(level, options, saved, tmp_path: Path):
    peft = pytest.importorskip("peft")
    model = make_adapted("llama", torch.bfloat16)
    step = make_step(model, level, "bfloat16", **options)
    train(step)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make_model("llama").to(torch.bfloat16), tmp_path)
    masters = mezzo.master_params(model)
    for name, value in peft.get_peft_model_state_dict(loaded).items():
        exact = masters[name.replace(".weight", ".default.weight")]
        assert torch.equal(value, exact.to(saved).float()), name
    files = peft.get_peft_model_state_dict(model)
    assert {value.dtype for value in files.values()} == {saved}


def test_adapters_loaded_into_a_decorated_model_are_exact():
    peft = pytest.importorskip("peft")
    steps = [
        make_step(make_adapted("llama", torch.bfloat16), "O2", "bfloat16", save_dtype="float32")
        for _ in range(2)
    ]
    for step in steps:
        train(step, 2)
    train(steps[0], 2)
    adapters = peft.get_peft_model_state_dict(steps[0].model)
    peft.set_peft_model_state_dict(steps[1].model, adapters)
    for name, value in peft.get_peft_model_state_dict(steps[1].model).items():
        assert torch.equal(value, adapters[name]), name


@pytest.mark.parametrize("undecorates", [False, True])
def test_adapters_are_merged_after_training_at_o2(undecorates):
    pytest.importorskip("peft")
    model = make_adapted("llama")
    step = make_step(model, "O2", "bfloat16")
    train(step)
    model.eval()
    batch = make_batch()
    with torch.no_grad():
        expected = model(**batch).loss
    if undecorates:
        mezzo.undecorate(model)
    merged = model.merge_and_unload()
    with torch.no_grad():
        assert torch.allclose(merged(**batch).loss.float(), expected, rtol=5e-3)
    dtype = torch.float32 if undecorates else torch.bfloat16
    assert merged.model.layers[0].self_attn.q_proj.weight.dtype is dtype


@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_train_with_gradient_checkpointing(reentrant):
    pytest.importorskip("peft")
    losses = []
    for checkpoints in (False, True):
        model = make_adapted("llama", torch.bfloat16)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        losses.append(train(make_step(model, "O2", "bfloat16")))
    assert losses[0] == losses[1]


# -- tied weights ----------------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
@EVERY_LEVEL
def test_a_tied_weight_has_one_master_and_stays_tied(name, level, dtype, tmp_path: Path):
    model = make_model(name)
    count = len(list(model.parameters()))
    step = make_step(model, level, dtype)
    train(step, 2)
    assert is_tied(model)
    assert len(list(model.parameters())) == len(step.optimizer.state) == count
    binding = optimizer_binding(step.optimizer)
    if level == "O2":
        assert sum(one is model.get_input_embeddings().weight for one in binding.masters) == 1

    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path)
    assert is_tied(saved)
    assert all(
        torch.equal(one, other.to(one.dtype))
        for one, other in zip(saved.parameters(), model.parameters(), strict=True)
    )

    again = make_step(make_model(name), level, dtype)
    again.load_state_dict(copied(step.state_dict()))
    assert is_tied(again.model)
    assert train(again, 2) == train(step, 2)

    mezzo.undecorate(model)
    assert is_tied(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# -- compiled submodules ---------------------------------------------------------------------------


# torch reads .grad of what a compiled module gets.
@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "float16")])
def test_compiled_submodules_train_as_the_model_without(level, dtype):
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = make_model("llama")
        if compiled:
            for layer in model.model.layers:
                layer.mlp = torch.compile(layer.mlp, backend="aot_eager")
            model.model.norm.compile(backend="aot_eager")
        losses.append(train(make_step(model, level, dtype), 2))
    torch._dynamo.reset()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# -- averages, generation and modes between steps --------------------------------------------------


@pytest.mark.thinned(3)
@EVERY_LEVEL
def test_ema_averages_the_exact_weights_of_a_tied_model(level, dtype):
    model = make_model("gpt2")
    step = make_step(model, level, dtype)
    ema = mezzo.EMA(model, decay=0.5)
    expected = {name: value.clone() for name, value in mezzo.master_params(model).items()}
    for seed in range(2):
        step(make_batch(seed))
        ema.update()
        for name, value in mezzo.master_params(model).items():
            expected[name].lerp_(value, 0.5)
    with torch.no_grad(), ema.applied():
        assert is_tied(model)
        for name, parameter in model.named_parameters():
            close = torch.allclose(parameter.float(), expected[name], rtol=1e-2, atol=1e-6)
            assert close, name
    assert is_tied(model)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
@EVERY_LEVEL
def test_generating_and_evaluating_between_steps_does_not_change_the_training(name, level, dtype):
    runs = []
    for generates in (False, True):
        model = make_model(name)
        step = make_step(model, level, dtype)
        losses = train(step, 1)
        if generates:
            model.eval()
            tokens = make_batch()["input_ids"][:2, :5]
            generated = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False
            )
            assert generated.shape[0] == 2
            with torch.no_grad():
                model(**make_batch())
            model.train()
        runs.append((losses + train(step, 2), copies(model)))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
