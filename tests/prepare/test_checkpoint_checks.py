"""What does not fit is refused in words that name it."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.prepare import checkpoint_checks


def test_a_thing_is_paired_with_its_state_in_order():
    found = checkpoint_checks.match_parts(
        "file", {"model": [1, 2], "scaler": None}, {"model": ("a", "b"), "scaler": ()}
    )
    assert found == {"model": [("a", 1), ("b", 2)], "scaler": []}


def test_many_names_are_shortened():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(8)))
    with pytest.raises(
        mezzo.CheckpointError,
        match=r"it lacks '0.weight', '1.weight', '2.weight', '3.weight', '4.weight' and 3 more",
    ):
        checkpoint_checks.refuse_other_model(model, {}, strict=True)


def test_a_shape_counts_even_without_strict():
    with pytest.raises(mezzo.CheckpointError, match="shape"):
        checkpoint_checks.refuse_other_model(
            nn.Linear(1, 1), {"weight": torch.ones(2, 2)}, strict=False
        )


def test_the_same_model_in_another_dtype_fits():
    checkpoint_checks.refuse_other_model(
        nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).state_dict(), strict=True
    )


def test_masters_of_other_shapes_are_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {**optimizer.state_dict(), "mezzo_masters": {0: {"mezzo_master": torch.zeros(3, 3)}}}
    with pytest.raises(mezzo.PolicyError, match=r"master of shape \(3, 3\)"):
        checkpoint_checks.refuse_other_optimizer(optimizer, state)
