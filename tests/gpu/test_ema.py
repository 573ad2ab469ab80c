"""EMA with a captured step.

It averages the master weights that replays write, applies its weights temporarily without changing
the training, and does not synchronize.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.step_models import Made, batches, copied, in_steps, same
from torch import nn

import mezzo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("O1", "bfloat16", {}),
    ("O1", "float16", {}),
    ("O2", "float16", {}),
    ("O2", "bfloat16", {"master": "float32"}),
    ("O2", "bfloat16", {"master": "split"}),
    ("O2", "bfloat16", {"master": "kahan"}),
]
cases = pytest.mark.parametrize(
    ("level", "dtype", "options"),
    CASES,
    ids=lambda value: str(value) if isinstance(value, str) else value.get("master", ""),
)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with torch.backends.cudnn.flags(deterministic=True):
        yield


def captured(
    name: str, level: str, dtype: str, options: dict[str, Any]
) -> tuple[mezzo.TrainStep, nn.Module]:
    """Return a step that is captured, and its model."""
    made = Made(name, "AdamW", "cuda")
    _, step = in_steps(made, batches(name, 8, (), "cuda"), level, dtype, **options)
    assert step.captured, step.eager_reason
    return step, made.model


def everything(step: mezzo.TrainStep) -> Any:
    """Return weights, masters, moments, buffers and scale, without random number generators."""
    state = {name: value for name, value in step.state_dict().items() if name != "rng"}
    return copied(
        (
            state,
            step.model.state_dict(),
            step.optimizer.state_dict(),
            dict(mezzo.master_params(step.model)),
        )
    )


@cases
def test_the_average_equals_a_float64_average_of_the_masters_of_each_step(
    level: str, dtype: str, options: dict[str, Any]
) -> None:
    step, model = captured("mlp", level, dtype, options)
    ema = mezzo.EMA(model, 0.9)
    expected = {name: value.double() for name, value in mezzo.master_params(model).items()}
    overflows = (3, 4) if dtype == "float16" else ()
    for x, y in batches("mlp", 30, overflows, "cuda"):
        step(x, y)
        ema.update()
        for name, value in mezzo.master_params(model).items():
            expected[name] = 0.9 * expected[name] + 0.1 * value.double()
    assert step.captured
    for name, average in ema.state_dict().items():
        assert average.dtype is torch.float32
        torch.testing.assert_close(average.double(), expected[name], rtol=3e-6, atol=1e-7)


@cases
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_an_evaluation_with_applied_weights_does_not_change_the_training(
    name: str, level: str, dtype: str, options: dict[str, Any]
) -> None:
    finals = []
    for evaluates in (True, False):
        step, model = captured(name, level, dtype, options)
        ema, evaluate = mezzo.EMA(model, 0.9), mezzo.EvalStep(model)
        data = list(batches(name, 12, (), "cuda"))
        for place, (x, y) in enumerate(data):
            step(x, y)
            ema.update()
            if evaluates and place % 2:
                before = everything(step)
                with ema.applied():
                    for _ in range(2):
                        evaluate(data[0][0])
                assert same(before, everything(step))
        # Nothing was captured again.
        assert step.captured
        finals.append((everything(step), ema.state_dict()))
    if name == "mlp":
        assert same(*finals)


def test_captured_evaluation_uses_the_applied_weights() -> None:
    step, model = captured("mlp", "O2", "bfloat16", {"master": "split"})
    ema, evaluate = mezzo.EMA(model, 0.5), mezzo.EvalStep(model)
    (x, y), *_ = batches("mlp", 1, (), "cuda")
    for _ in range(5):
        trained = evaluate(x)
    assert evaluate.captured
    ema.load_state_dict({name: torch.zeros_like(value) for name, value in ema.state_dict().items()})
    with ema.applied():
        assert not evaluate(x).any()
        with pytest.raises(mezzo.UnsupportedError, match="inside `with ema"):
            step(x, y)
    assert torch.equal(evaluate(x), trained)


@cases
def test_an_update_does_not_synchronize(
    level: str, dtype: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    step, model = captured("cnn", level, dtype, options)
    ema = mezzo.EMA(model, use_buffers=True)
    data = list(batches("cnn", 6, (), "cuda"))
    step(*data[0])
    ema.update()
    # Only from here on: a capture may synchronize.
    request.getfixturevalue("no_host_reads")
    for x, y in data:
        step(x, y)
        ema.update()
        mezzo.master_params(model)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize(("master", "most"), [("float32", 8), ("split", 160)])
def test_an_update_takes_few_launches(master: str, most: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, device="cuda") for _ in range(40)))
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.01),
        "O2",
        dtype="bfloat16",
        master=master,
    )
    ema = mezzo.EMA(model)
    x = torch.randn(8, 16, device="cuda")
    for _ in range(6):
        step(x, x)
        ema.update()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        ema.update()
        torch.cuda.synchronize()
    launched = sum(
        event.count
        for event in profiled.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    # 80 parameters. torch 2.11 copies between dtypes one by one, and reconstructing split masters
    # one by one would take five launches for each.
    assert 0 < launched <= most
