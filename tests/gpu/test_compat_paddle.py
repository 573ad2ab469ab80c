"""mezzo.compat.paddle on CUDA: programs run on the device of their place, captured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import mezzo
from mezzo.compat import paddle
from mezzo.compat.paddle import static

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"use_pure_fp16": True, "use_fp16_guard": False}, np.float16), ({"level": "O1"}, np.float32)],
    ids=["pure", "O1"],
)
def test_a_program_moves_to_its_place_and_trains_there(options, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    weight, place, program = model[0].weight, paddle.CUDAPlace(0), static.Program()
    with static.program_guard(program):
        loss = nn.functional.mse_loss(
            model(static.data("data", [-1, 64])), static.data("label", [-1, 8])
        )
        optimizer = static.amp.decorate(
            paddle.optimizer.Momentum(learning_rate=0.1, parameters=model.parameters()),
            init_loss_scaling=128.0,
            **options,
        )
        optimizer.minimize(loss)
    exe = static.Executor(place)
    optimizer.amp_init(place)
    feed = {"data": np.ones((32, 64), dtype="float32"), "label": np.zeros((32, 8), dtype="float32")}
    losses = [
        exe.run(program, feed=feed, fetch_list=[loss], use_program_cache=True)[0] for _ in range(20)
    ]
    assert model[0].weight is weight
    assert weight.is_cuda
    assert model[1].running_mean.is_cuda
    assert losses[0].dtype == dtype
    assert losses[-1] < losses[0]


def test_eager_training_at_o2():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    optimizer = paddle.optimizer.AdamW(
        learning_rate=1e-2,
        parameters=model.parameters(),
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    model, optimizer = paddle.amp.decorate(models=model, optimizers=optimizer, level="O2")
    scaler, losses = paddle.amp.GradScaler(init_loss_scaling=1024), []
    for _ in range(10):
        with paddle.amp.auto_cast(level="O2"):
            loss = model(torch.ones(32, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad(set_to_zero=False)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert scaler.state_dict()["incr_count"] == 10


NORMS = {
    "layer_norm": lambda: nn.LayerNorm(64),
    "batch_norm": lambda: nn.BatchNorm1d(64),
    "group_norm": lambda: nn.GroupNorm(4, 64),
}


# Raised by modules that Inductor imports.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_with_float32_parameters_takes_a_float16_input(norm, backend):
    torch.manual_seed(0)
    module, x = (
        NORMS[norm]().cuda(),
        torch.randn(32, 64, device="cuda", dtype=torch.float16, requires_grad=True),
    )
    torch._dynamo.reset()
    run = module if backend is None else torch.compile(module, backend=backend)
    exempt = {op: ["weight", "bias"] for op in ("layer_norm", "group_norm")}
    with mezzo.autocast(
        "O2", device_type="cuda", preset="paddle", dtype="float16", exempt_args=exempt
    ):
        result = run(x)
    result.float().square().sum().backward()
    assert (result.dtype, x.grad.dtype, module.weight.grad.dtype, module.bias.grad.dtype) == (
        torch.float16,
        torch.float16,
        torch.float32,
        torch.float32,
    )
    assert torch.allclose(result.float(), NORMS[norm]().cuda()(x.detach().float()), atol=2e-3)
