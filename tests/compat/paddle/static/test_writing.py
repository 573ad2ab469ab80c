"""Which program is being written, and what it is fed."""

from __future__ import annotations

import pytest
import torch

from mezzo.compat import paddle
from mezzo.compat.paddle import static


def test_programs_nest(program):
    inner = static.Program()
    with static.program_guard(inner):
        static.data("x", [1])
    assert (list(inner.feeds), list(program.feeds), static.default_main_program() is program) == (
        ["x"],
        [],
        True,
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: static.data(3, [1]),
            TypeError,
            "The type of 'name' in data must be str, but received int",
        ),
        (
            lambda: static.data("x", [1], "floaty"),
            TypeError,
            "The data type of 'x' is 'floaty'. Use one such as 'float32'",
        ),
        (
            lambda: static.program_guard("main").__enter__(),
            TypeError,
            "The type of programs in program_guard must be Program, but received str",
        ),
    ],
    ids=["name", "dtype", "program"],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_guards_program_ends_with_it_whatever_happens(program):
    with pytest.raises(ZeroDivisionError), static.program_guard(static.Program()):
        1 / 0  # noqa: B018
    assert static.default_main_program() is program


def test_a_variable_shows_what_is_known_of_it():
    assert repr(static.data("x", [-1, 2], torch.float16)) == "var x : shape[-1, 2], dtype float16"


def test_static_mode_is_a_word():
    paddle.enable_static()
    assert not paddle.in_dynamic_mode()
    paddle.disable_static()
    assert paddle.in_dynamic_mode()


def test_a_name_that_is_declared_anew_is_the_new_one(program):
    static.data("x", [1])
    assert static.data("x", [2]) is program.feeds["x"]
