"""Random numbers on the host that have an effect, and those that have none."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from mezzo.prepare import rng_state
from mezzo.step.cuda_graph import CapturedGraph
from mezzo.step.host_random import HostDraws


class LayerDrop(nn.Module):
    def __init__(self, probability, use="compare"):
        super().__init__()
        self.layer, self.probability, self.use = nn.Linear(2, 2), probability, use

    def forward(self, x):
        drawn = torch.rand([])
        match self.use:
            case "compare":
                return x if drawn < self.probability else self.layer(x)
            case "item":
                return x if drawn.item() < self.probability else self.layer(x)
            case "multiply":
                return self.layer(x) * drawn
            case "reverse":
                return x if self.probability > drawn else self.layer(x)
        return x


def recorded(model):
    before = rng_state.capture_host_rng_state()
    with HostDraws() as draws:
        model(torch.ones(1, 2))
    return draws, before


@pytest.mark.parametrize("probability", [0.0, 0, -1.0])
def test_a_probability_of_zero_has_no_effect(probability):
    draws, before = recorded(LayerDrop(probability))
    assert draws.shapes == [torch.Size([])]
    assert draws.explain(before)
    assert not rng_state.host_rng_has_moved(before)


@pytest.mark.parametrize("use", ["compare", "item", "multiply", "reverse"])
def test_other_uses_have_an_effect(use):
    draws, before = recorded(LayerDrop(0.1, use))
    assert not draws.explain(before)


@pytest.mark.parametrize(
    "draw", [random.random, lambda: torch.randn(2), lambda: torch.rand([], out=torch.empty([]))]
)
def test_numbers_that_are_drawn_in_other_ways_are_not_explained(draw):
    before = rng_state.capture_host_rng_state()
    with HostDraws() as draws:
        torch.rand([]).lt(0.0)
        draw()
    assert draws.explain(before) == (len(draws.shapes) == 2)


def test_a_replay_draws_as_the_captured_function_did():
    class Nothing:
        def replay(self):
            pass

    graph = CapturedGraph(Nothing(), [], None, host_draws=(torch.Size([]), torch.Size([3])))
    torch.manual_seed(0)
    graph.replay([])
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand([]), torch.rand(3)
    assert torch.equal(after, torch.rand(1))


def test_models_of_transformers_that_drop_no_layer_draw_without_an_effect():
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16) | dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
        2,
    )
    ids = torch.randint(3, 50, (2, 8))
    for drop, explained in ((0.0, True), (0.5, False)):
        configuration = transformers.BartConfig(
            vocab_size=64, max_position_embeddings=32, encoder_layerdrop=drop, **sizes
        )
        model = transformers.BartForConditionalGeneration(configuration).train()
        with HostDraws() as draws:
            model(input_ids=ids, labels=ids)
        # Releases before 5.23 also draw for layers that they never drop.
        assert draws.shapes or explained
        assert draws.have_effect is not explained
