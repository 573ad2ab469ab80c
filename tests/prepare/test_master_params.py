"""`master_params` returns float32 weights by name, of models and optimizers, decorated or not."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo.optim.binding import optimizer_binding


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 4, bias=False),
        )
        self.head.weight = self.body.weight
        self.frozen = nn.Parameter(torch.full((2,), 1 / 3), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 1 / 3))

    def forward(self, x):
        return self.head(self.norm(self.body(x))) + self.shift


def decorated(**options):
    torch.manual_seed(0)
    model = Net()
    original = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    mezzo.decorate(model, optimizer, **{"dtype": "bfloat16", **options})
    return model, optimizer, original


@pytest.mark.parametrize(
    ("dtype", "master"), [("bfloat16", "float32"), ("bfloat16", "split"), ("float16", "float32")]
)
def test_master_params_are_exact_and_have_the_names_of_the_model(dtype, master):
    model, optimizer, original = decorated(dtype=dtype, master=master)
    for masters in (mezzo.master_params(model), mezzo.master_params(optimizer)):
        assert list(masters) == [name for name, _ in model.named_parameters()]
        # A frozen parameter has no master: its value is rounded.
        assert torch.equal(masters["frozen"], original["frozen"].to(getattr(torch, dtype)).float())
        assert all(
            torch.equal(masters[name], original[name]) for name in masters if name != "frozen"
        )
        assert all(
            value.dtype is torch.float32 and not value.requires_grad for value in masters.values()
        )


def test_float32_masters_are_live_and_split_ones_are_copies():
    for master, live in (("float32", True), ("split", False)):
        model, optimizer, original = decorated(master=master)
        masters = mezzo.master_params(model)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert torch.equal(masters["body.weight"], original["body.weight"]) is not live
        assert (
            torch.equal(masters["body.weight"], mezzo.master_params(model)["body.weight"]) is live
        )
        assert (
            optimizer_binding(optimizer).masters.companion_tensor(model.body.weight)
            is masters["body.weight"]
        ) is live
        assert masters["norm.weight"].data_ptr() == model.norm.weight.data_ptr()


@pytest.mark.parametrize("master", ["float32", "split"])
def test_writes_by_other_code_are_included(master):
    model, optimizer, _ = decorated(master=master)
    with torch.no_grad():
        model.body.weight.fill_(0.25)
    assert bool((mezzo.master_params(optimizer)["body.weight"] == 0.25).all())


def test_submodules_and_containing_modules_have_exact_weights():
    model, _, original = decorated(master="split")
    assert torch.equal(mezzo.master_params(model.body)["weight"], original["body.weight"])
    assert torch.equal(
        mezzo.master_params(nn.Sequential(model))["0.body.weight"], original["body.weight"]
    )


def test_names_of_several_models_have_a_prefix():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizer = torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)
    mezzo.decorate(models, optimizer, dtype="bfloat16")
    assert list(mezzo.master_params(optimizer)) == [
        "models[0].weight",
        "models[0].bias",
        "models[1].weight",
        "models[1].bias",
    ]


def test_plain_models_and_optimizers_return_their_parameters():
    model = nn.Linear(2, 2)
    assert mezzo.master_params(model)["weight"].data_ptr() == model.weight.data_ptr()
    assert list(
        mezzo.master_params(
            torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
        )
    ) == ["0", "1"]
    assert list(mezzo.master_params(torch.optim.SGD(model.named_parameters(), lr=0.1))) == [
        "weight",
        "bias",
    ]
    assert mezzo.master_params(nn.Linear(2, 2).half())["weight"].dtype is torch.float32
    assert mezzo.master_params(nn.Linear(2, 2).double())["weight"].dtype is torch.float64


def test_other_arguments_are_refused():
    with pytest.raises(mezzo.PolicyError, match="takes a model or an optimizer, got list"):
        mezzo.master_params([nn.Linear(1, 1)])
