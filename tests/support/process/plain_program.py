"""A program without mezzo: results and errors of plain torch, as lines of text."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MATRIX = torch.eye(4) + 0.25
CUBE = torch.linspace(-1, 1, 4**3).reshape(1, 1, 4, 4, 4)

OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda x: x @ x,
    "linear": lambda x: torch.nn.functional.linear(x, x),
    "softmax": lambda x: x.softmax(-1),
    "add": lambda x: x + x,
    "det": lambda x: torch.linalg.det(x),
    "qr": lambda x: torch.linalg.qr(x)[1],
    "pinv": lambda x: torch.linalg.pinv(x),
    "solve": lambda x: torch.linalg.solve(x, x),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "cdist": lambda x: torch.cdist(x, x),
    "pdist": lambda x: torch.pdist(x),
    "rfft": lambda x: torch.fft.rfft(x),
    "bessel_j0": lambda x: torch.special.bessel_j0(x),
    "zeta": lambda x: torch.special.zeta(x + 2, x + 2),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "histogram": lambda x: torch.histogram(x, 4).hist,
    "avg_pool3d": lambda x: torch.nn.functional.avg_pool3d(CUBE.to(x.dtype), 2),
    "multi_margin_loss": lambda x: torch.nn.functional.multi_margin_loss(
        x, torch.zeros(4, dtype=torch.int64)
    ),
    "lstm": lambda x: _filled(nn.LSTM(4, 4))(x)[0],
    "wrong sizes": lambda x: torch.linalg.det(x[:3]),
    "wrong type": lambda x: torch.linalg.det("x"),
    "wrong mm": lambda x: x @ x[:3],
}


def results() -> list[str]:
    """Return the results of all calls."""
    return [f"{name}: {_result(call)}" for name, call in _calls()]


def warned_results() -> list[str]:
    """Return the results with their warnings, which Python collects for all threads together."""
    return [f"{name}: {_warned(call)}" for name, call in _calls()]


def _calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, op in OPS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for region in (None, torch.bfloat16, torch.float16):
                yield (
                    f"{name} of {dtype} in {region}",
                    lambda op=op, dtype=dtype, region=region: _call(op, dtype, region),
                )
    for region in (None, torch.bfloat16):
        yield f"training in {region}", lambda region=region: _train(region)
        yield (
            f"scaled training in {region}",
            lambda region=region: _train(region, torch.amp.GradScaler("cpu", init_scale=4.0)),
        )
        for reentrant in (True, False):
            yield (
                f"checkpoint {reentrant} in {region}",
                lambda region=region, reentrant=reentrant: _recomputed(region, reentrant),
            )
        yield (
            f"TorchScript in {region}",
            lambda region=region: _call(torch.jit.script(_scripted), torch.float32, region),
        )
    yield "backward of a vector", lambda: torch.ones(2, requires_grad=True).exp().backward()
    yield "backward without a graph", lambda: torch.ones(()).backward()


def compiled_results() -> list[str]:
    """Return the results of the compiler and torch.export, which are not thread-safe."""

    def compiled(op: Callable[[torch.Tensor], Any], region: torch.dtype | None) -> Any:
        torch._dynamo.reset()
        return _call(torch.compile(op, backend="aot_eager", fullgraph=True), torch.float32, region)

    calls = [
        (
            f"compiled {name} in {region}",
            lambda name=name, region=region: compiled(OPS[name], region),
        )
        for name in ("mm", "det")
        for region in (None, torch.bfloat16)
    ]
    calls.append(
        (
            "exported",
            lambda: [
                str(node.target)
                for node in torch.export.export(nn.Linear(4, 4), (MATRIX,)).graph.nodes
            ],
        )
    )
    return [f"{name}: {_warned(call)}" for name, call in calls]


def _warned(call: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return f"{_result(call)} {[str(one.message) for one in caught]}"


def _result(call: Callable[[], Any]) -> str:
    try:
        return str(_shown(call()))
    except Exception as error:  # noqa: BLE001 - an error is a result
        return f"{type(error).__name__}({error})"


def _shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.detach().tolist()} {value.grad_fn and value.grad_fn.name()}"
    return [_shown(one) for one in value] if isinstance(value, list | tuple) else value


def _call(op: Callable[[torch.Tensor], Any], dtype: torch.dtype, region: torch.dtype | None) -> Any:
    with torch.autocast("cpu", dtype=region or torch.bfloat16, enabled=region is not None):
        return op(MATRIX.clone().to(dtype).requires_grad_())


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.detach(), x.detach()) + x.detach()


def _train(region: torch.dtype | None, scaler: torch.amp.GradScaler | None = None) -> Any:
    model = _filled(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        with torch.autocast("cpu", dtype=region or torch.bfloat16, enabled=region is not None):
            loss = model(MATRIX).square().mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    return [loss, *model.parameters(), len(file.getvalue())]


def _filled(module: nn.Module) -> nn.Module:
    """Set parameters without random numbers, whose generator all threads share."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))
    return module


def _recomputed(region: torch.dtype | None, reentrant: bool) -> Any:
    x = MATRIX.clone().requires_grad_()
    with torch.autocast("cpu", dtype=region or torch.bfloat16, enabled=region is not None):
        checkpoint(lambda x: torch.mm(x, x).exp() + x, x, use_reentrant=reentrant).sum().backward()
    return x.grad
