"""Fixtures: each test records its own program."""

from __future__ import annotations

import pytest

from mezzo.compat import paddle


@pytest.fixture(autouse=True)
def program():
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        yield main


@pytest.fixture
def exe():
    return paddle.static.Executor(paddle.CPUPlace())
