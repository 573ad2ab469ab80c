"""Steps of tiny models of transformers: their batches, their losses and their outputs."""

from __future__ import annotations

import pytest
import torch

import mezzo

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


def bert():
    config = transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForSequenceClassification(config)


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False)
    )


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=32,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


MODELS = {"bert": bert, "llama": llama, "t5": t5}


def batch_for(name, length=11, *, padded=2):
    """Return tokens of which those at the end of the second row are padding."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(1, 32, (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, length - padded :] = 0
    labels = {
        "bert": torch.tensor([0, 1]),
        "llama": tokens.masked_fill(mask == 0, -100),
        "t5": tokens[:, : length // 2].clone(),
    }[name]
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def make_step(name, loss_fn=None, level="O0", **options):
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level != "O0":
        options["dtype"] = "bfloat16"
    return mezzo.TrainStep(model, loss_fn, optimizer, level, **options)


def by_hand(name, batches):
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


SHAPES = {
    "keywords": lambda step, batch: step(**batch),
    "dict": lambda step, batch: step(batch),
    "BatchEncoding": lambda step, batch: step(transformers.BatchEncoding(batch)),
    "BatchFeature": lambda step, batch: step(transformers.BatchFeature(batch)),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [*(("bert", shape) for shape in SHAPES), ("llama", "keywords"), ("t5", "BatchEncoding")],
)
def test_a_step_without_a_loss_function_trains_as_the_loop_by_hand(name, shape):
    step, batches = make_step(name), [batch_for(name, length) for length in (11, 7, 11)]
    losses = [float(SHAPES[shape](step, batch)) for batch in batches]
    assert losses == pytest.approx(by_hand(name, batches), rel=1e-6)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_does_not_change_losses(name, level):
    plain, padded = make_step(name, level=level), make_step(name, level=level, pad_to=16)
    tolerance = 1e-5 if level == "O0" else 1e-2
    for length in (11, 7, 19):
        batch = batch_for(name, length)
        assert float(padded(**batch)) == pytest.approx(float(plain(**batch)), rel=tolerance)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_batch_without_a_mask_is_padded_with_one(name):
    plain, padded = make_step(name), make_step(name, pad_to=16)
    batch = batch_for(name, padded=0)
    del batch["attention_mask"]
    for _ in range(2):
        assert float(padded(**batch)) == pytest.approx(float(plain(**batch)), rel=1e-5)


def test_accuracy_is_logged_while_training():
    def loss_fn(output, labels):
        accuracy = (output.logits.argmax(-1) == labels).float().mean()
        return output.loss, {"accuracy": accuracy}

    step, batch = make_step("bert", loss_fn, mean_over=2), batch_for("bert")
    losses = [float(step(batch, batch["labels"])) for _ in range(2)]
    assert losses == pytest.approx(by_hand("bert", [batch] * 2), rel=1e-6)
    assert step.means["loss"] == pytest.approx(sum(losses) / 2)
    assert float(step.outputs["accuracy"]) in (0.0, 0.5, 1.0)


def test_the_output_of_the_model_keeps_its_type():
    step = make_step("bert", keep_outputs=True)
    loss = step(**batch_for("bert"))
    kept = step.outputs
    assert type(kept).__name__ == "SequenceClassifierOutput"
    assert float(kept.loss) == float(kept["loss"]) == float(loss)
    logits = kept.logits.clone()
    step(**batch_for("bert"))
    assert torch.equal(kept.logits, logits)
    assert step.outputs_on_host().get().logits.shape == (2, 2)


def test_a_batch_without_labels_is_explained():
    batch = batch_for("bert")
    del batch["labels"]
    with pytest.raises(mezzo.PolicyError, match=r"SequenceClassifierOutput with logits.*labels="):
        make_step("bert")(**batch)


def test_a_body_gets_a_batch_of_the_type_that_was_passed():
    torch.manual_seed(0)
    model, seen = bert(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @mezzo.train_step(models=model, optimizers=optimizer, policy="O0")
    def step(batch):
        seen.append(batch)
        return model(**batch)

    batch = transformers.BatchEncoding(batch_for("bert"))
    assert float(step(batch).loss) == pytest.approx(by_hand("bert", [dict(batch)])[0])
    assert type(seen[0]) is transformers.BatchEncoding
    assert step.outputs.logits.shape == (2, 2)


def test_evaluation_takes_every_shape():
    model = make_step("bert").model
    evaluate, batch = mezzo.EvalStep(model), batch_for("bert")
    with torch.no_grad():
        expected = model.eval()(**batch).logits
    for call in SHAPES.values():
        assert torch.equal(call(evaluate, batch).logits, expected)


def test_an_output_of_a_model_can_be_an_input():
    step = make_step("bert")
    output = transformers.utils.ModelOutput(batch_for("bert"))
    assert float(step(output)) == pytest.approx(by_hand("bert", [batch_for("bert")])[0])


def test_a_model_that_returns_tuples_works():
    step = make_step("bert")
    step.model.config.return_dict = False
    assert float(step(**batch_for("bert"))) == pytest.approx(
        by_hand("bert", [batch_for("bert")])[0]
    )
