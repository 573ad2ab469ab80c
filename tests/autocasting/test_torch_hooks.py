"""Hooks for checkpointing, export, TorchScript and torch's cache of compiled code."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mezzo
from mezzo.autocasting import torch_hooks
from mezzo.autocasting.regions import REGION_NOTE

HALF = torch.bfloat16
POLICY_FIELDS = {
    "default": {},
    "half add": {"half": {"add"}},
    "full linear": {"full": {"linear"}},
    "O2": {"policy": "O2"},
}
POLICIES = pytest.mark.parametrize("fields", POLICY_FIELDS.values(), ids=POLICY_FIELDS.keys())
KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "plain"])


def region(**fields: Any) -> mezzo.autocast:
    return mezzo.autocast(device_type="cpu", dtype=HALF, **fields)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = x + y
        self.seen.append((y.dtype, z.dtype))
        return z.tanh() * y


def gradients(
    fields: dict[str, Any], *, reentrant: bool | None, inside: bool
) -> tuple[list[Tensor], list[Any]]:
    body, x = Body(), torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
    with region(**fields):
        result = body(x) if reentrant is None else checkpoint(body, x, use_reentrant=reentrant)
        loss = result.float().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [x.grad, *(parameter.grad for parameter in body.parameters())], body.seen


@POLICIES
@KINDS
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_checkpointing_recomputes_in_the_precision_of_forward(
    fields: dict[str, Any], reentrant: bool, inside: bool
) -> None:
    expected, _ = gradients(fields, reentrant=None, inside=False)
    found, (forward, recomputed) = gradients(fields, reentrant=reentrant, inside=inside)
    assert recomputed == forward
    assert all(map(torch.equal, found, expected))


@KINDS
@pytest.mark.parametrize(
    "off",
    [lambda: torch.autocast("cpu", enabled=False), lambda: mezzo.autocast("cpu", enabled=False)],
    ids=["torch", "mezzo"],
)
def test_checkpointing_in_a_disabled_region_stays_in_float32(reentrant: bool, off: Any) -> None:
    body, x = Body(), torch.ones(2, 4, requires_grad=True)
    with region(half={"add"}):
        with off():
            result = checkpoint(body, x, use_reentrant=reentrant)
        result.sum().backward()
    assert body.seen == [(torch.float32, torch.float32)] * 2


@KINDS
def test_a_region_inside_the_checkpointed_function_is_entered_again(reentrant: bool) -> None:
    body, x = Body(), torch.ones(2, 4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with region(half={"add"}):
            return body(x)

    checkpoint(run, x, use_reentrant=reentrant).float().sum().backward()
    assert body.seen == [(HALF, HALF)] * 2


@KINDS
def test_checkpointing_outside_any_region_is_unchanged(reentrant: bool) -> None:
    body, x = Body(), torch.ones(2, 4, requires_grad=True)
    checkpoint(body, x, use_reentrant=reentrant).sum().backward()
    assert body.seen == [(torch.float32, torch.float32)] * 2


def test_the_class_of_reentrant_checkpoints_stays_a_public_class_of_torch() -> None:
    replaced = torch.utils.checkpoint.CheckpointFunction
    assert replaced.__module__ == "torch.utils.checkpoint"
    assert replaced.__doc__ == replaced.__base__.__doc__
    assert pickle.loads(pickle.dumps(replaced)) is replaced


@KINDS
def test_nested_and_sequential_checkpoints_are_recomputed_in_the_region(reentrant: bool) -> None:
    first, second, x = Body(), Body(), torch.ones(2, 4, requires_grad=True)
    with region(half={"add"}):
        nested = checkpoint(
            lambda x: checkpoint(first, x, use_reentrant=reentrant), x, use_reentrant=reentrant
        )
        chained = checkpoint_sequential([second, nn.Tanh()], 2, x, use_reentrant=reentrant)
    (nested.float().sum() + chained.float().sum()).backward()
    assert {*first.seen, *second.seen} == {(HALF, HALF)}
    assert len(first.seen) >= 2


def test_backward_of_a_checkpoint_in_another_region_keeps_the_forward_precision() -> None:
    body, x = Body(), torch.ones(2, 4, requires_grad=True)
    with region(half={"add"}):
        result = checkpoint(body, x, use_reentrant=False)
    with mezzo.autocast("cpu", dtype=torch.float16, full={"linear"}):
        result.float().sum().backward()
    assert body.seen == [(HALF, HALF)] * 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y, x + x


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "plain"])
@pytest.mark.parametrize(
    ("fields", "dtypes"),
    [
        ({}, (HALF, torch.float32)),
        ({"half": {"add"}}, (HALF, HALF)),
        ({"full": {"linear"}}, (torch.float32,) * 2),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_exported_program_keeps_the_casts(
    fields: dict[str, Any], dtypes: tuple[torch.dtype, ...], strict: bool
) -> None:
    model, x = Small(), torch.randn(2, 4)
    with region(**fields):
        expected = model(x)
        program = torch.export.export(model, (x,), strict=strict)
    found = program.module()(x)
    assert tuple(one.dtype for one in found) == dtypes == tuple(one.dtype for one in expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "off",
    [lambda: torch.autocast("cpu", enabled=False), lambda: mezzo.autocast("cpu", enabled=False)],
    ids=["torch", "mezzo"],
)
def test_export_in_a_disabled_region_stays_in_float32(off: Any) -> None:
    with region(half={"add"}), off():
        program = torch.export.export(Small(), (torch.randn(2, 4),), strict=False)
    assert {one.dtype for one in program.module()(torch.randn(2, 4))} == {torch.float32}


class Regions(nn.Module):
    """A region in forward that lists an op, a disabled one, and an op outside both."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with mezzo.autocast("cpu", dtype="bfloat16", full={"mm"}):
            full, half = torch.mm(x, y), torch.bmm(x[None], y[None])
        with mezzo.autocast("cpu", enabled=False):
            off = torch.mm(x, y)
        return full, half, off, torch.mm(x, y)


def test_a_region_inside_an_exported_model_is_applied_and_marked() -> None:
    with torch.fx.traceback.preserve_node_meta():
        program = torch.export.export(
            Regions(), (torch.randn(2, 2), torch.randn(2, 2)), strict=False
        )
    assert [one.dtype for one in program.module()(torch.randn(2, 2), torch.randn(2, 2))] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    noted = [
        bool((node.meta.get("custom") or {}).get(REGION_NOTE))
        for node in program.graph.nodes
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    ]
    assert noted == [True, True, True, False]


def test_export_outside_any_region_is_unchanged() -> None:
    program = torch.export.export(Small(), (torch.randn(2, 4),), strict=False)
    assert {one.dtype for one in program.module()(torch.randn(2, 4))} == {torch.float32}


@pytest.fixture
def scripted() -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(lambda x: x @ x, torch.ones(2, 2))


def test_torchscript_runs_under_torchs_own_lists(scripted: tuple[Any, Any]) -> None:
    with region():
        assert scripted[0](torch.ones(2, 4)).dtype is HALF


def test_torchscript_raises_under_a_custom_policy_with_the_remedy(
    scripted: tuple[Any, Any], tmp_path: Path
) -> None:
    module, function = scripted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(function, str(tmp_path / "function.pt"))
        loaded = torch.jit.load(str(tmp_path / "function.pt"))
    with region(half={"add"}):
        for call, x in (
            (module, torch.ones(2, 4)),
            (loaded, torch.ones(2, 2)),
            (nn.Sequential(module), torch.ones(2, 4)),
        ):
            with pytest.raises(mezzo.UnsupportedError, match="TorchScript"):
                call(x)
        with torch.autocast("cpu", enabled=False):
            assert module(torch.ones(2, 4)).dtype is torch.float32
        assert torch.is_autocast_enabled("cpu")


def added(x: Tensor, by: int = 1) -> Tensor:
    return x + by


def test_a_scripted_function_runs_as_python_under_a_custom_policy(
    scripted: tuple[Any, Any],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(added)
    with region(half={"add"}):
        assert script(torch.ones(2), by=2).dtype is HALF
        assert scripted[1](torch.ones(2, 2)).dtype is HALF
    assert script(torch.ones(2), by=2).dtype is torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("fields", [{}, {"half": {"add"}}], ids=["default", "custom"])
def test_tracing_inside_a_region_keeps_the_casts(fields: dict[str, Any]) -> None:
    x = torch.ones(2, 2)
    with region(**fields), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: (x @ x, x + x), x, check_trace=False)
    assert [one.dtype for one in traced(x)] == [HALF, HALF if fields else torch.float32]


def test_the_dtype_of_a_region_is_part_of_the_key_of_compiled_code() -> None:
    class Details:
        def __init__(self, graph: str) -> None:
            self.graph = graph

    torch_hooks._hook_compile_cache(SimpleNamespace(Details=Details), "Details")
    keys = [vars(Details("x"))]
    for dtype in (torch.bfloat16, torch.float16):
        with mezzo.autocast("cpu", dtype=dtype):
            keys.append(vars(Details(graph="x")))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.append(vars(Details("x")))
    plain = {"graph": "x"}
    assert keys == [
        plain,
        *(
            {**plain, "mezzo_autocast_dtypes": {"cpu": dtype}}
            for dtype in (torch.bfloat16, torch.float16)
        ),
        plain,
    ]
