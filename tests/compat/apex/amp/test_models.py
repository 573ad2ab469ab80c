"""Models under `amp.initialize`: input containers, custom batches, 16-bit parameters, release."""

import copy

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
        return {"out": self.linear(x) * scale, "index": index, "text": "text"}


def sgd(*models):
    return torch.optim.SGD(
        [parameter for model in models for parameter in model.parameters()], lr=0.1
    )


def test_input_and_output_containers_are_cast():
    model = Many()
    amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    out = model({"x": (torch.ones(1, 2), torch.tensor([1]))}, scale=torch.ones(()))
    assert (out["out"].dtype, out["index"].dtype, out["text"]) == (
        torch.float32,
        torch.int64,
        "text",
    )


def test_a_model_without_parameters_is_accepted():
    model, act = nn.Linear(2, 2), nn.ReLU()
    amp.initialize([model, act], sgd(model), opt_level="O2", verbosity=0)
    assert act(model(torch.ones(1, 2))).dtype is torch.float32


def test_release_restores_the_model():
    model = nn.Linear(2, 2)
    before, forward = model.weight.detach().clone(), model.forward
    for level in ("O0", "O2", "O3"):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
        release([model])
        assert model.weight.dtype is torch.float32
        assert model.forward == forward
        assert not model._state_dict_hooks
    torch.testing.assert_close(model.weight.data, before, atol=1e-3, rtol=1e-3)


def test_device_of_returns_the_device_of_the_parameters():
    assert device_of([nn.ReLU(), nn.Linear(1, 1)]) == "cpu"
    assert device_of([nn.Linear(1, 1, device="meta")]) == "meta"


def test_shared_parameters_stay_shared():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype is torch.float16


@pytest.mark.parametrize("kwargs", [{}, {"cast_model_type": False}], ids=["cast", "not cast"])
def test_a_group_added_later_has_masters(kwargs):
    model, late = nn.Linear(4, 1), nn.Linear(4, 1).half()
    model, optimizer = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=2.0**-10),
        opt_level="O2",
        loss_scale=1.0,
        verbosity=0,
        **kwargs,
    )
    optimizer.add_param_group({"params": late.parameters()})
    assert {master.dtype for master in amp.master_params(optimizer)} == {torch.float32}
    start, x = late.bias.detach().clone().fill_(1.0), torch.ones(1, 4)
    late.bias.data.copy_(start)
    for _ in range(4):
        optimizer.zero_grad()
        with amp.scale_loss(
            (model(x).float() + late(x.half()).float()).sum() / 4, optimizer
        ) as scaled:
            scaled.backward()
        optimizer.step()
    # Each update is a quarter of the spacing of float16 below 1.
    assert late.bias.item() == 1.0 - 2.0**-10


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_whole_model_can_be_saved(level, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model, _ = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))


# -- custom batches --------------------------------------------------------------------------------


class Batch:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, dtype):
        return Batch(self.tensor.to(dtype))


class Net(nn.Linear):
    def forward(self, batch, extra=None):
        assert batch[0].tensor.dtype is torch.float16
        return Batch(super().forward(batch[0].tensor)), extra


def test_custom_batches_are_cast_by_their_to_method():
    model = Net(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    batch, extra = model(
        [Batch(torch.ones(1, 2))], extra={"name": "text", "mask": torch.ones(2, dtype=torch.long)}
    )
    assert batch.tensor.dtype is torch.float32
    assert (extra["name"], extra["mask"].dtype) == ("text", torch.long)


def test_another_initialize_removes_the_batch_hooks():
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert model._forward_pre_hooks
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_copied_model_casts_inputs_and_state_dict():
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O3", verbosity=0)
    again = copy.deepcopy(model)
    assert again(torch.ones(1, 2)).dtype is torch.float32
    assert all(value.dtype is torch.float32 for value in again.state_dict().values())


# -- 16-bit parameters -----------------------------------------------------------------------------


X = torch.ones(2)


class Mixed(nn.Module):
    """One of the two weights is float16 from the start."""

    def __init__(self, start):
        super().__init__()
        self.full = nn.Parameter(start + torch.arange(2.0))
        self.half_weight = nn.Parameter((1.0 + start + torch.arange(2.0)).half())

    def forward(self, x):
        return (x * self.full.float() * self.half_weight.float()).sum()


def float32_reference(accumulate):
    one, two = Mixed(1.0).float(), Mixed(2.0).float()
    optimizer = torch.optim.SGD([{"params": one.parameters(), "lr": 0.25}], lr=0.25, momentum=0.125)
    one(X).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": two.parameters(), "lr": 0.5})
    for _ in range(2):
        for _ in range(1 + accumulate):
            (one(X) + two(X)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*one.parameters(), *two.parameters()]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("zero", ["optimizer", "model", "none"])
def test_a_group_is_added_without_a_model_cast(level, accumulate, zero):
    one, two = Mixed(1.0), Mixed(2.0)
    optimizer = torch.optim.SGD([{"params": one.parameters(), "lr": 0.25}], lr=0.25, momentum=0.125)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    [one, two], optimizer = amp.initialize(
        [one, two],
        optimizer,
        opt_level=level,
        verbosity=0,
        cast_model_type=False,
        loss_scale="dynamic",
    )
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0

    def clear():
        for parameter in (*one.parameters(), *two.parameters()):
            if zero == "none":
                parameter.grad = None
        if zero == "model":
            one.zero_grad()
            two.zero_grad()
        elif zero == "optimizer":
            optimizer.zero_grad()

    def backward(loss):
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    backward(one(X))
    optimizer.step()
    clear()
    optimizer.add_param_group({"params": two.parameters(), "lr": 0.5})
    for _ in range(2):
        for _ in range(1 + accumulate):
            backward(one(X) + two(X))
        optimizer.step()
        clear()
    for parameter, expected in zip(
        (*one.parameters(), *two.parameters()), float32_reference(accumulate), strict=True
    ):
        torch.testing.assert_close(parameter.float(), expected.float(), rtol=2e-3, atol=2e-3)
