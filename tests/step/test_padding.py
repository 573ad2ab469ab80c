"""Padding of token batches."""

from __future__ import annotations

from collections import UserDict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mezzo


def batch_of(length, **more):
    tokens = torch.randint(1, 16, (2, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} | more


class Model(nn.Module):
    """Averages the tokens that the mask marks; computes a loss for each token if it has labels."""

    def __init__(self, pad_token_id=9, longest=None):
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.config = SimpleNamespace(pad_token_id=pad_token_id, max_position_embeddings=longest)
        self.seen = {}

    def forward(self, input_ids, attention_mask=None, labels=None):
        self.seen = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        weights = attention_mask.unsqueeze(-1)
        hidden = self.embed(input_ids)
        mean = (hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        logits = self.out(hidden + mean)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def make_step(pad_to, loss_fn=None, model_class=Model, **options):
    torch.manual_seed(0)
    model = model_class(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return mezzo.TrainStep(model, loss_fn, optimizer, "O0", pad_to=pad_to)


class TestPadBatch:
    def test_sequences_are_padded_to_a_multiple(self):
        labels = torch.ones(2, 5, dtype=torch.long)
        batch = batch_of(5, labels=labels, token_type_ids=labels, position_ids=labels, n=3)
        padded = mezzo.pad_batch(batch, 4, pad_token_id=7)
        fills = {name: padded[name][:, 5:].unique().tolist() for name in padded if name != "n"}
        assert fills == {
            "input_ids": [7],
            "attention_mask": [0],
            "labels": [-100],
            "token_type_ids": [0],
            "position_ids": [0],
        }
        assert all(torch.equal(padded[name][:, :5], batch[name]) for name in fills)
        assert {padded[name].shape for name in fills} == {(2, 8)}
        assert padded["n"] == 3

    def test_embeddings_keep_their_other_dimensions(self):
        padded = mezzo.pad_batch(batch_of(5, inputs_embeds=torch.ones(2, 5, 3)), 8)
        assert padded["inputs_embeds"].shape == (2, 8, 3)
        assert padded["inputs_embeds"].sum() == 2 * 5 * 3

    def test_inputs_without_a_sequence_stay_as_they_are(self):
        more = {"labels": torch.ones(2), "targets": torch.ones(2, 4), "pixels": torch.ones(2, 3, 5)}
        padded = mezzo.pad_batch(batch_of(5, **more), 8)
        assert all(padded[name] is more[name] for name in more)

    def test_labels_of_classes_as_numbers_stay_as_they_are(self):
        labels = torch.ones(2, 5)
        assert mezzo.pad_batch(batch_of(5, labels=labels), 8)["labels"] is labels

    def test_a_decoder_has_a_length_of_its_own(self):
        tokens = torch.ones(2, 3, dtype=torch.long)
        batch = batch_of(5, labels=tokens, decoder_input_ids=tokens, decoder_attention_mask=tokens)
        padded = mezzo.pad_batch(batch, 4, pad_token_id=7)
        assert padded["input_ids"].shape == (2, 8)
        assert padded["labels"].tolist() == [[1, 1, 1, -100]] * 2
        assert padded["decoder_input_ids"].tolist() == [[1, 1, 1, 7]] * 2
        assert padded["decoder_attention_mask"].tolist() == [[1, 1, 1, 0]] * 2

    def test_a_missing_mask_is_added_even_if_the_length_fits(self):
        padded = mezzo.pad_batch({"input_ids": torch.ones(2, 4, dtype=torch.long)}, 4)
        assert padded["attention_mask"].tolist() == [[1] * 4] * 2

    def test_a_mapping_that_is_no_dict_is_taken(self):
        assert mezzo.pad_batch(UserDict(batch_of(5)), 8)["input_ids"].shape == (2, 8)

    def test_it_collates_the_samples_of_a_data_loader(self):
        samples = [
            {"input_ids": list(range(1, length + 1)), "labels": length % 2} for length in (3, 6, 9)
        ]
        loader = DataLoader(samples, batch_size=3, collate_fn=partial(mezzo.pad_batch, multiple=8))
        (batch,) = loader
        assert batch["input_ids"].shape == (3, 16)
        assert batch["attention_mask"].sum(1).tolist() == [3, 6, 9]
        assert batch["labels"].tolist() == [1, 0, 1]

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            ({"x": torch.ones(2, 3)}, "'input_ids' or 'attention_mask', got x"),
            ({"input_ids": torch.ones(3)}, r"\[batch, sequence\], got shape \(3,\)"),
            (batch_of(5) | {"attention_mask": torch.ones(2, 1, 5, 5)}, "'attention_mask'"),
            ({"input_ids": [[1, 2]]}, "'input_ids' as a tensor"),
            ([torch.ones(3)], "got a list of Tensor"),
            ([], "got a list of nothing"),
        ],
    )
    def test_other_batches_are_refused(self, batch, message):
        with pytest.raises(mezzo.PolicyError, match=message):
            mezzo.pad_batch(batch, 8)


class TestPadTo:
    @pytest.mark.parametrize("shape", ["keywords", "mapping"])
    def test_losses_equal_those_without_padding_and_shapes_are_few(self, shape):
        plain, padded = make_step(None), make_step(8)
        lengths = set()
        for length in (5, 6, 7, 8, 13):
            batch = batch_of(length)
            batch["labels"] = batch["input_ids"].clone()
            batch["attention_mask"][1, 4:] = 0
            batch["labels"][1, 4:] = -100
            call = (
                (lambda step, batch=batch: step(**batch))
                if shape == "keywords"
                else (lambda step, batch=batch: step(UserDict(batch)))
            )
            assert torch.allclose(call(padded), call(plain), rtol=1e-5)
            lengths.add(padded.model.seen["input_ids"].shape[1])
        assert lengths == {8, 16}

    def test_the_padding_token_and_the_longest_sequence_are_those_of_the_model(self):
        step = make_step(8, longest=10)
        for length, expected in ((5, 8), (9, 10), (10, 10)):
            step(**batch_of(length, labels=torch.ones(2, length, dtype=torch.long)))
            seen = step.model.seen["input_ids"]
            assert seen.shape == (2, expected)
            assert (seen[:, length:] == 9).all()

    @pytest.mark.parametrize("pad_token_id", [None, -1])
    def test_a_model_without_a_padding_token_gets_zeros(self, pad_token_id):
        step = make_step(8, pad_token_id=pad_token_id)
        step(**batch_of(5, labels=torch.ones(2, 5, dtype=torch.long)))
        assert (step.model.seen["input_ids"][:, 5:] == 0).all()

    def test_a_mask_is_made_if_the_model_takes_one(self):
        step = make_step(8)
        tokens = batch_of(5)["input_ids"]
        step(input_ids=tokens, labels=tokens)
        assert step.model.seen["attention_mask"].tolist() == [[1] * 5 + [0] * 3] * 2

    def test_a_model_without_a_mask_is_refused(self):
        class Maskless(nn.Embedding):
            def __init__(self):
                super().__init__(16, 1)

            def forward(self, input_ids):
                return super().forward(input_ids).mean()

        with pytest.raises(mezzo.PolicyError, match=r"no parameter 'attention_mask'.*collate"):
            make_step(8, model_class=Maskless)(input_ids=batch_of(5)["input_ids"])

    def test_labels_that_are_the_target_are_padded_too(self):
        def loss_fn(output, labels, weight):
            return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten()) * weight

        plain, padded = make_step(None, loss_fn), make_step(8, loss_fn)
        batch = batch_of(5)
        target = (batch["input_ids"], torch.tensor(2.0))
        for _ in range(2):
            assert torch.allclose(padded(batch, target), plain(batch, target), rtol=1e-5)

    def test_a_function_pads_what_the_step_was_called_with(self):
        batches = []

        def pad(batch):
            batches.append(type(batch))
            return batch

        batch = batch_of(5, labels=torch.ones(2, 5, dtype=torch.long))
        step = make_step(pad)
        step(**batch)
        step(UserDict(batch))
        step(batch["input_ids"], batch["attention_mask"], batch["labels"])
        assert batches == [dict, UserDict, tuple]

    def test_a_function_may_be_pad_batch(self):
        step = make_step(partial(mezzo.pad_batch, multiple=16))
        step(**batch_of(5, labels=torch.ones(2, 5, dtype=torch.long)))
        assert step.model.seen["input_ids"].shape == (2, 16)

    def test_positional_tensors_are_refused(self):
        with pytest.raises(mezzo.PolicyError, match=r"got Tensor, Tensor.*collate"):
            make_step(8)(torch.ones(2, 5), torch.ones(2, 5))

    @pytest.mark.parametrize("pad_to", [0, -8, True, 1.5, "64"])
    def test_an_invalid_length_is_refused(self, pad_to):
        with pytest.raises(mezzo.PolicyError, match=f"pad_to={pad_to!r} is not a length"):
            make_step(pad_to)
