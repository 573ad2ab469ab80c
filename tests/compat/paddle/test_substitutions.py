"""Names of Paddle's that are not mixed precision: what they are in torch's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from mezzo.compat import paddle
from mezzo.compat.paddle.nn import SUBSTITUTIONS


@pytest.mark.parametrize(
    ("ask", "remedy"),
    [
        (lambda: paddle.to_tensor, "no to_tensor.*Use torch.as_tensor"),
        (lambda: paddle.seed, "Use torch.manual_seed"),
        (lambda: paddle.io, r"io.Dataset is torch.utils.data.Dataset; io.DataLoader is"),
        (lambda: paddle.nn.Layer, "no nn.Layer.*Use torch.nn.Module"),
        (lambda: paddle.nn.Fold, r"torch's: docs/coming-from/paddle.md has the table"),
        (lambda: paddle.optimizer.lr, r"Use torch.optim.lr_scheduler"),
    ],
    ids=["to_tensor", "seed", "io", "Layer", "Fold", "lr"],
)
def test_a_missing_name_says_what_to_use(ask, remedy):
    with pytest.raises(AttributeError, match=remedy):
        ask()


@pytest.mark.parametrize(
    "module", [paddle, paddle.nn, paddle.optimizer], ids=lambda module: module.__name__
)
def test_every_public_name_is_there(module):
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert not hasattr(module, "__nothing__")


def test_the_page_has_every_substitution():
    page = (Path(__file__).parents[3] / "docs" / "coming-from" / "paddle.md").read_text()
    assert [
        call for call, torchs in SUBSTITUTIONS.items() if f"| `{call}` | {torchs} |" not in page
    ] == []
