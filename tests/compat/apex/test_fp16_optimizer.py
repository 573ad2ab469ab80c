"""`apex.fp16_utils.FP16_Optimizer` around optimizers with 16-bit parameters."""

import copy
import pickle

import pytest
import torch
from torch import nn

from mezzo.compat.apex.fp16_utils import FP16_Optimizer

X = torch.tensor([[1.0, 2.0]], dtype=torch.float16)
INF = float("inf")


def make(lr=0.25, half=True, optimizer=torch.optim.SGD, **kwargs):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model = model.half() if half else model
    return model, FP16_Optimizer(optimizer(model.parameters(), lr=lr), verbose=False, **kwargs)


def run(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    optimizer.backward(model(X.to(model.weight.dtype)).sum() * factor)
    optimizer.step()


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"static_loss_scale": 128.0},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 4.0}},
    ],
    ids=["one", "static", "dynamic"],
)
def test_the_loss_scale_does_not_change_the_step(kwargs):
    model, optimizer = make(**kwargs)
    before = model.weight.detach().clone()
    run(model, optimizer)
    torch.testing.assert_close(model.weight.detach(), before - 0.25 * X, rtol=1e-3, atol=0)


def test_masters_keep_updates_too_small_for_16_bits():
    model, optimizer = make(lr=2.0**-14)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    for _ in range(16):
        run(model, optimizer)
    # Sixteen updates of 2^-14; a single one rounds to zero at 2.0 in float16.
    assert model.bias.item() == 2.0 - 2.0**-9 * 0.5
    assert [master.dtype for group in optimizer.fp32_from_fp16_groups for master in group] == [
        torch.float32,
        torch.float32,
    ]


def test_a_dynamic_scale_skips_backs_off_and_grows(capsys):
    model, optimizer = make(
        dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0, "scale_window": 2}
    )
    optimizer.verbose = True
    before = model.weight.detach().clone()
    run(model, optimizer, INF)
    assert torch.equal(model.weight, before)
    assert optimizer.loss_scale == 4.0
    assert (
        capsys.readouterr().out
        == "OVERFLOW! Skipping step. Attempted loss scale: 8.0, reducing to 4.0\n"
    )
    run(model, optimizer)
    run(model, optimizer)
    assert optimizer.loss_scale == 8.0


def test_a_dynamic_scale_starts_high_and_stays_above_one():
    _, optimizer = make(dynamic_loss_scale=True)
    assert optimizer.loss_scale == 2.0**32
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0})
    with pytest.warns(UserWarning, match="floor"):
        run(model, optimizer, INF)
    run(model, optimizer, INF)
    assert optimizer.loss_scale == 1.0


def test_gradients_accumulate_with_and_without_delayed_update():
    grads = []
    for update in (True, False):
        model, optimizer = make(static_loss_scale=4.0)
        optimizer.backward(model(X).sum(), update_master_grads=update)
        optimizer.backward(model(X).sum() * 2, update_master_grads=update)
        optimizer.update_master_grads()
        grads.append(optimizer.inspect_master_grad_data()[0][0])
    assert torch.equal(grads[0], grads[1])
    assert (grads[0].dtype, grads[0].tolist()) == (torch.float32, [[3.0, 6.0]])


def test_clipping_changes_the_gradients_and_returns_the_norm():
    model, optimizer = make(static_loss_scale=8.0)
    optimizer.backward(model(X).sum())
    assert optimizer.clip_master_grads(1.0).item() == pytest.approx(6.0**0.5)
    assert sum(
        grad.square().sum() for grad in optimizer.inspect_master_grad_data()[0]
    ).sqrt().item() == pytest.approx(1.0, abs=1e-4)
    optimizer.backward(model(X).sum() * INF)
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None


def test_a_closure_is_supported_with_a_static_scale():
    model, optimizer = make(static_loss_scale=8.0)
    before = model.bias.item()

    def closure():
        optimizer.zero_grad()
        loss = model(X).sum()
        optimizer.backward(loss)
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    assert model.bias.item() == pytest.approx(before - 0.25, abs=1e-3)


def test_a_closure_with_a_dynamic_scale_is_a_type_error():
    _, optimizer = make(dynamic_loss_scale=True)
    with pytest.raises(TypeError, match="not supported with dynamic loss scaling"):
        optimizer.step(lambda: None)


def test_float32_parameters_are_stepped_too():
    model, optimizer = make(half=False, static_loss_scale=8.0)
    before = model.bias.item()
    run(model, optimizer)
    assert model.bias.item() == pytest.approx(before - 0.25)
    with pytest.raises(TypeError, match="must be float16, bfloat16 or float32"):
        FP16_Optimizer(
            torch.optim.SGD([nn.Parameter(torch.ones(1).double())], lr=0.1), verbose=False
        )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_resumes_bit_for_bit(optimizer):
    model, original = make(
        lr=0.01,
        optimizer=optimizer,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 16.0},
    )
    for _ in range(3):
        run(model, original)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": original.state_dict()})
    restored_model, restored = make(lr=0.01, optimizer=optimizer, dynamic_loss_scale=True)
    restored_model.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    assert restored.loss_scale == 16.0
    for _ in range(3):
        run(model, original)
        run(restored_model, restored)
    assert torch.equal(model.weight, restored_model.weight)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            original.fp32_from_fp16_groups[0], restored.fp32_from_fp16_groups[0], strict=True
        )
    )


def test_pickling_raises():
    _, optimizer = make()
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)


def test_groups_state_and_scale_are_accessible(capsys):
    model = nn.Linear(2, 1).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "FP16_Optimizer processing param group 0" in capsys.readouterr().out
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.loss_scale = 64.0
    assert (
        optimizer.optimizer.param_groups[0]["lr"],
        optimizer.loss_scale,
        len(optimizer.state),
    ) == (0.5, 64.0, 0)
    optimizer.backward(model(X).sum())
    optimizer.zero_grad(set_grads_to_None=True)
    assert model.weight.grad is None
