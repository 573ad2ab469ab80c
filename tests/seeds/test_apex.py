"""The Apex program of a blog page (T. Heo, "AMP(Automatic Mixed-Precision)").

The calls are the page's; only the import differs.
"""

import pytest
import torch

from mezzo.compat import apex
from mezzo.compat.apex import amp

D_in, D_out = 16, 4
HERE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def disable_casts_afterwards():
    yield
    amp.initialize(torch.nn.Linear(1, 1), enabled=False)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, D_in, generator=generator)
    return x.to(HERE), (x[:, :D_out] * 0.5).to(HERE)


def train(opt_level=None, steps=20):
    x, y = data()
    torch.manual_seed(0)
    # Declare model and optimizer as usual, with default (FP32) precision
    model = torch.nn.Linear(D_in, D_out).to(HERE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 * 50)
    if opt_level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        if opt_level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def test_the_program_of_the_page_at_its_level(capsys):
    model, optimizer, losses = train("O1")
    assert "Selected optimization level O1" in capsys.readouterr().out
    assert model.weight.dtype is torch.float32
    assert model(data()[0]).dtype is torch.float16
    assert losses == pytest.approx(train()[2], abs=2e-3)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 20}}


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_the_program_of_the_page_at_the_other_levels(level):
    assert train(level)[2] == pytest.approx(train()[2], abs=0.0 if level == "O0" else 5e-3)


def test_install_makes_the_original_import_work():
    apex.install()
    try:
        from apex import amp as unchanged
    finally:
        apex.uninstall()
    assert unchanged is amp
