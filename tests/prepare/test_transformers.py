"""Decorated models of Hugging Face's transformers: outputs, Trainer, generation and saved files."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

import mezzo

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.arange(3, 19).reshape(2, 8)


def make_model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def decorated(**options):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mezzo.decorate(model, optimizer, "O2", **{"dtype": "bfloat16", **options})


@pytest.mark.parametrize("output", ["float32", "float16"])
def test_an_output_comes_back_as_its_class_with_the_output_dtype(output):
    model, _ = decorated(output_dtype=output)
    result = model(input_ids=IDS, labels=IDS)
    assert type(result) is type(make_model()(input_ids=IDS, labels=IDS))
    assert result.logits is result["logits"] is result[1]
    assert result.loss.dtype is result.logits.dtype is getattr(torch, output)
    assert model(input_ids=IDS, return_dict=False)[0].dtype is getattr(torch, output)


def test_an_exported_model_returns_its_class_with_the_output_dtype():
    model, _ = decorated(output_dtype="float32")
    program = torch.export.export(model.eval(), (), {"input_ids": IDS, "use_cache": False})
    result = program.module()(input_ids=IDS, use_cache=False)
    assert type(result) is type(model(input_ids=IDS))
    assert result.logits.dtype is torch.float32


def test_a_loss_divided_by_the_number_of_tokens_is_finite_in_float16():
    model, _ = decorated(dtype="float16")
    ids = IDS.repeat(2500, 1)
    # Trainer passes the number of tokens; the sum of the losses is far above 65504.
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel()).loss
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, model(input_ids=IDS, labels=IDS).loss, rtol=0.2, atol=0)


def test_trainer_keeps_the_columns_of_the_models_signature_and_trains(tmp_path):
    model, optimizer = decorated(output_dtype="float32")
    assert inspect.signature(model.forward) == inspect.signature(make_model().forward)
    row = {"input_ids": IDS[0].tolist(), "labels": IDS[0].tolist(), "unused": 1}
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path,
        max_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=[row] * 12, optimizers=(optimizer, None)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    assert model.lm_head.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("beams", [1, 2])
def test_generation_gives_the_tokens_of_the_same_weights_under_autocast(beams):
    model, _ = decorated()
    plain = make_model().eval()
    # The same rounded weights: masters differ from them, and so would the tokens.
    plain.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams}
    mask = torch.ones_like(IDS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(model.eval().generate(IDS, attention_mask=mask, **options), expected)


def test_save_pretrained_writes_the_16_bit_weights(tmp_path):
    model, _ = decorated()
    model.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    reloaded = type(model).from_pretrained(tmp_path)
    assert reloaded.dtype is torch.bfloat16
    assert torch.equal(reloaded.lm_head.weight, model.lm_head.weight)


def test_save_dtype_float32_writes_the_exact_weights(tmp_path):
    model, _ = decorated(save_dtype="float32")
    exact = make_model().state_dict()
    model.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, exact[name]) for name, value in saved.items())
    # transformers writes the dtype of the parameters into the configuration, and reloads in it.
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    reloaded = type(model).from_pretrained(tmp_path, dtype="float32").state_dict()
    assert all(torch.equal(reloaded[name], value) for name, value in exact.items())


@pytest.mark.parametrize("save_dtype", [None, "float32"])
def test_safetensors_writes_what_the_state_dict_has(save_dtype, tmp_path):
    model, _ = decorated(**({} if save_dtype is None else {"save_dtype": save_dtype}))
    state = model.state_dict()
    safetensors.save_file(state, tmp_path / "state.safetensors")
    loaded = safetensors.load_file(tmp_path / "state.safetensors")
    dtype = torch.bfloat16 if save_dtype is None else torch.float32
    assert loaded["lm_head.weight"].dtype is dtype
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    other, _ = decorated(**({} if save_dtype is None else {"save_dtype": save_dtype}))
    other.load_state_dict(loaded)
    if save_dtype is not None:
        assert torch.equal(
            mezzo.master_params(other)["lm_head.weight"], make_model().lm_head.weight
        )
