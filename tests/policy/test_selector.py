"""Modules are meant by a glob on their qualified name, or by type."""

import pytest
import torch
from torch import nn

from mezzo import NORMS
from mezzo._errors import PolicyError
from mezzo.policy.types import Selector


class OwnNorm(nn.LayerNorm):
    """A user's subclass."""


@pytest.mark.parametrize(
    ("text", "name", "matched"),
    [
        ("head", "head", True),
        ("head", "encoder.head", False),
        ("encoder.*.norm", "encoder.0.norm", True),
        ("encoder.*.norm", "encoder.0.block.norm", True),
        ("encoder.*.norm", "encoder.norm", False),
        ("layer?", "layer1", True),
        ("layer[12]", "layer3", False),
        ("HEAD", "head", False),
        ("*", "", True),
        ("", "", True),
        ("", "head", False),
    ],
)
def test_a_glob_is_matched_against_the_qualified_name(text, name, matched):
    assert Selector.parse(text).matches(name, nn.Linear(1, 1)) is matched


@pytest.mark.parametrize(
    "word",
    [
        nn.LayerNorm,
        "type:torch.nn.modules.normalization.LayerNorm",
        "type:torch.nn.LayerNorm",
        "type:LayerNorm",
    ],
)
def test_a_type_is_meant_by_its_class_or_any_path_to_it_and_takes_subclasses_along(word):
    selector = Selector.parse(word)
    assert selector.matches("any", nn.LayerNorm(1))
    assert selector.matches("any", OwnNorm(1))
    assert not selector.matches("any", nn.GroupNorm(1, 1))


def test_a_type_that_is_nowhere_matches_nothing():
    assert not Selector.parse("type:no.such.Thing").matches("any", nn.Linear(1, 1))


def test_a_type_that_was_not_imported_is_not_imported_to_be_matched():
    import sys

    assert not Selector.parse("type:torch.utils.tensorboard.SummaryWriter").matches(
        "any", nn.Linear(1, 1)
    )
    assert "torch.utils.tensorboard" not in sys.modules


def test_a_class_and_the_text_it_is_kept_as_are_the_same_selector():
    selector = Selector.parse(OwnNorm)
    assert Selector.parse(selector.text) == selector == Selector.parse(selector)
    assert hash(Selector.parse(selector.text)) == hash(selector)


def test_an_exact_name_beats_a_glob_and_a_glob_beats_a_type():
    exact, glob, kind = (
        Selector.parse(word).rank for word in ("head.norm", "head.*", nn.LayerNorm)
    )
    assert exact > glob > kind


@pytest.mark.parametrize("word", ["type:", 3, None, int, nn.Linear(1, 1), torch.add, ["head"]])
def test_what_names_no_module_is_refused_with_what_does(word):
    with pytest.raises(
        PolicyError,
        match=(
            r"^A module is named by a glob on its qualified name \('encoder.\*.norm'\) or by its"
            r" class \(nn.LayerNorm\), got "
        ),
    ):
        Selector.parse(word)


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(1),
        nn.BatchNorm2d(1),
        nn.BatchNorm3d(1),
        nn.SyncBatchNorm(1),
        nn.InstanceNorm2d(1),
        nn.LazyBatchNorm2d(),
        nn.LayerNorm(1),
        nn.GroupNorm(1, 1),
        nn.RMSNorm(1),
        nn.LocalResponseNorm(1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_norms_are_all_the_normalisation_layers(module):
    assert isinstance(module, NORMS)
    assert any(Selector.parse(norm).matches("any", module) for norm in NORMS)


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.Conv2d(1, 1, 1), nn.Dropout()])
def test_norms_are_nothing_else(module):
    assert not isinstance(module, NORMS)
