"""What stays float32, as `keep_full` takes it."""

from __future__ import annotations

from torch import nn

from mezzo.compat.paddle.amp._decorate import kept


def network():
    return nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), nn.BatchNorm1d(2), nn.GroupNorm(1, 2)
    )


def test_batch_norms_are_kept_always_and_layer_norms_beside_float16():
    model = network()
    assert kept([model], "float16", None) == [model[0][1], model[1]]
    assert kept([model], "bfloat16", None) == [model[1]]


def test_a_layer_is_kept_whole_and_the_layers_of_a_type_without_what_is_in_them():
    class Own(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 2))
            self.scale = nn.Parameter(nn.Linear(1, 1).bias.detach())

    model = nn.Sequential(Own(), nn.Linear(2, 2))
    assert kept([model], "bfloat16", model[0]) == [model[0]]
    assert kept([model], "bfloat16", Own) == ["0.scale"]
    assert kept([model], "bfloat16", [nn.Linear]) == [model[0][0], model[1]]


def test_a_layer_of_another_model_is_no_matter():
    assert kept([network()], "bfloat16", [nn.Linear(1, 1)])[0].num_features == 2
