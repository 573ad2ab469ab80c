"""Install mezzo's names in torch for each test, and check that torch's are restored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mezzo.compat import torch as dialect


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    originals = (
        torch.autocast,
        torch.amp.GradScaler,
        torch.cuda.amp.autocast,
        torch.cpu.amp.GradScaler,
    )
    dialect.install()
    yield
    dialect.uninstall()
    restored = (
        torch.autocast,
        torch.amp.GradScaler,
        torch.cuda.amp.autocast,
        torch.cpu.amp.GradScaler,
    )
    # By identity: mezzo's autocast compares equal to torch's.
    assert all(new is old for new, old in zip(restored, originals, strict=True))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
