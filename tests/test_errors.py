"""The exception tree, and how its messages are made."""

import pytest

from mezzo._errors import MezzoError, PolicyError, RefusedOpError, UnsupportedError, choices, nearest


@pytest.mark.parametrize(("error", "builtin"), [(PolicyError, ValueError), (RefusedOpError, RuntimeError), (UnsupportedError, RuntimeError)])
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
