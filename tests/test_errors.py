"""The exception tree, and how its messages are made."""

import pytest

from mezzo._errors import (
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
def test_an_error_can_be_caught_as_ours_and_as_pythons(error, builtin):
    for caught in (MezzoError, builtin):
        with pytest.raises(caught, match="why"):
            raise error("why")


def test_choices_are_spelled_out_in_their_order():
    assert choices(["O2", "O0"]) == "Choose one of: O2, O0."


def test_choices_may_come_from_a_generator():
    assert choices(str(number) for number in range(2)) == "Choose one of: 0, 1."


def test_a_misspelt_word_is_answered_with_its_neighbour():
    assert nearest("sofmax", ["add", "softmax"]) == " Did you mean 'softmax'?"


def test_several_neighbours_are_joined():
    assert nearest("conv4d", ["conv1d", "conv2d", "add"]) == " Did you mean 'conv2d' or 'conv1d'?"


def test_a_word_with_no_neighbour_adds_nothing_to_the_message():
    assert nearest("zzz", ["softmax", "add"]) == ""


def test_a_neighbour_is_found_whatever_the_case():
    assert nearest("o1", ["O1", "OD"]) == " Did you mean 'O1'?"


def test_what_contains_the_word_is_named_before_what_is_only_a_little_like_it():
    assert (
        nearest("attention", ["flatten", "head_attention"])
        == " Did you mean 'head_attention' or 'flatten'?"
    )


def test_a_word_of_two_letters_is_not_looked_for_inside_others():
    assert nearest("ad", ["gradient", "adaptive"]) == ""
