"""What becomes of models: inputs of all shapes, parts without parameters, release."""

import pytest
import torch
from torch import nn

from mezzo.compat.apex import amp
from mezzo.compat.apex.amp._initialize import device_of, release


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, batch, *, scale):
        x, index = batch["x"]
        return {"out": self.linear(x) * scale, "index": index, "text": "words"}


def sgd(*models):
    return torch.optim.SGD(
        [parameter for model in models for parameter in model.parameters()], lr=0.1
    )


def test_containers_are_cast_on_the_way_in_and_out():
    model = Many()
    amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    out = model({"x": (torch.ones(1, 2), torch.tensor([1]))}, scale=torch.ones(()))
    assert (out["out"].dtype, out["index"].dtype, out["text"]) == (
        torch.float32,
        torch.int64,
        "words",
    )


def test_a_model_without_parameters_goes_along():
    model, act = nn.Linear(2, 2), nn.ReLU()
    amp.initialize([model, act], sgd(model), opt_level="O2", verbosity=0)
    assert act(model(torch.ones(1, 2))).dtype is torch.float32


def test_a_released_model_is_as_it_was():
    model = nn.Linear(2, 2)
    before, forward = model.weight.detach().clone(), model.forward
    for level in ("O0", "O2", "O3"):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
        release([model])
        assert model.weight.dtype is torch.float32
        assert model.forward == forward
        assert not model._state_dict_hooks
    torch.testing.assert_close(model.weight.data, before, atol=1e-3, rtol=1e-3)


def test_the_device_is_that_of_the_parameters():
    assert device_of([nn.ReLU(), nn.Linear(1, 1)]) == "cpu"
    assert device_of([nn.Linear(1, 1, device="meta")]) == "meta"


def test_shared_parameters_stay_shared():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype is torch.float16


@pytest.mark.parametrize("words", [{}, {"cast_model_type": False}], ids=["cast", "as it comes"])
def test_a_group_that_is_added_later_has_masters(words):
    model, late = nn.Linear(4, 1), nn.Linear(4, 1).half()
    model, optimizer = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=2.0**-10),
        opt_level="O2",
        loss_scale=1.0,
        verbosity=0,
        **words,
    )
    optimizer.add_param_group({"params": late.parameters()})
    assert {one.dtype for one in amp.master_params(optimizer)} == {torch.float32}
    start, x = late.bias.detach().clone().fill_(1.0), torch.ones(1, 4)
    late.bias.data.copy_(start)
    for _ in range(4):
        optimizer.zero_grad()
        with amp.scale_loss(
            (model(x).float() + late(x.half()).float()).sum() / 4, optimizer
        ) as scaled:
            scaled.backward()
        optimizer.step()
    # Each update is a quarter of what 16 bits can tell beside 1.
    assert late.bias.item() == 1.0 - 2.0**-10


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_whole_model_goes_into_a_file(level, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model, _ = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))
