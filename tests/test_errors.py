"""The exceptions, and the helpers for their messages."""

from pathlib import Path

import pytest
import torch

import mezzo
from mezzo._errors import (
    MEZZO_FOLDER,
    TORCH_FOLDER,
    MezzoError,
    PolicyError,
    RefusedOpError,
    UnsupportedError,
    choices,
    nearest,
)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (PolicyError, ValueError),
        (RefusedOpError, RuntimeError),
        (RefusedOpError, NotImplementedError),
        (UnsupportedError, RuntimeError),
    ],
)
def test_an_error_can_be_caught_as_mezzos_and_as_a_builtin_one(error, builtin):
    for caught in (MezzoError, builtin):
        with pytest.raises(caught, match="why"):
            raise error("why")


def test_choices_are_listed_in_their_order():
    assert choices(["O2", "O0"]) == "Choose one of: O2, O0."


def test_choices_may_come_from_a_generator():
    assert choices(str(number) for number in range(2)) == "Choose one of: 0, 1."


def test_a_misspelt_name_gets_the_closest_one_as_suggestion():
    assert nearest("sofmax", ["add", "softmax"]) == " Did you mean 'softmax'?"


def test_several_suggestions_are_joined():
    assert nearest("conv4d", ["conv1d", "conv2d", "add"]) == " Did you mean 'conv2d' or 'conv1d'?"


def test_a_name_without_a_close_one_gets_no_suggestion():
    assert nearest("zzz", ["softmax", "add"]) == ""


def test_suggestions_ignore_case():
    assert nearest("o1", ["O1", "OD"]) == " Did you mean 'O1'?"


def test_names_that_contain_it_come_before_names_that_are_only_similar():
    assert (
        nearest("attention", ["flatten", "head_attention"])
        == " Did you mean 'head_attention' or 'flatten'?"
    )


def test_a_name_of_two_characters_is_not_searched_inside_others():
    assert nearest("ad", ["gradient", "adaptive"]) == ""


@pytest.mark.parametrize(("folder", "package"), [(TORCH_FOLDER, torch), (MEZZO_FOLDER, mezzo)])
def test_a_package_whose_name_begins_with_that_of_a_library_is_not_in_its_folder(folder, package):
    inside = Path(package.__file__)
    assert str(inside).startswith(folder)
    assert not str(inside.parent.with_name(f"{package.__name__}vision") / "ops.py").startswith(
        folder
    )
