"""Tests of torch's own names on mezzo: each starts with them installed, and leaves torch as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mezzo.compat import torch as dialect


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    before = (
        torch.autocast,
        torch.amp.GradScaler,
        torch.cuda.amp.autocast,
        torch.cpu.amp.GradScaler,
    )
    dialect.install()
    yield
    dialect.uninstall()
    now = (torch.autocast, torch.amp.GradScaler, torch.cuda.amp.autocast, torch.cpu.amp.GradScaler)
    # By identity: a class of ours is equal to the one of torch's that it stands for.
    assert all(one is other for one, other in zip(now, before, strict=True))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
