"""Module rules go where the precision of forward is needed again: into recomputation by checkpointing, into other threads, to a later moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo

HALF = torch.bfloat16
KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "plain"])
PLACES = pytest.mark.parametrize(
    "inside", [True, False], ids=["backward inside", "backward outside"]
)
RULES = {
    "first": {"body.0": "half"},
    "all": {"body": "full"},
    "child": {"body": "full", "body.0": "half"},
    "kept": {"body.2": "keep", nn.Linear: "half"},
}
X = torch.linspace(-3, 3, 8).reshape(2, 4)


class Layer(nn.Linear):
    """Takes any dtype, as what comes before may have a rule of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(Layer(4, 4), Layer(4, 4), Layer(4, 4))
        self.reentrant: bool | None = None
        """Of the checkpoint; None is without one."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.body(x)
            if self.reentrant is None
            else checkpoint(self.body, x, use_reentrant=self.reentrant)
        )


class Whole(Model):
    """A checkpoint inside the module that has a rule, around one that has another."""

    def __init__(self) -> None:
        super().__init__()
        inner = Model()
        inner.body = self.body[0]
        self.body = nn.Sequential(inner, self.body[1], self.body[2])

    def forward(self, x: Tensor) -> Tensor:
        self.body[0].reentrant = self.reentrant
        return self.body(x)


def gradients(
    run: Callable[[Tensor], Tensor], model: nn.Module, region: Any, *, inside: bool
) -> list[Tensor]:
    x = X.clone().requires_grad_()
    with region:
        result = run(x)
        loss = (result.float() * torch.arange(8.0).reshape(2, 4)).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [result.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def with_rules(
    kind: type[Model], modules: Any, *, reentrant: bool | None, inside: bool
) -> list[Tensor]:
    model = kind()
    model.reentrant = reentrant
    region = mezzo.autocast("cpu", dtype=HALF, modules=modules, model=model)
    found = gradients(model, model, region, inside=inside)
    assert not any("forward" in module.__dict__ for module in model.modules())
    return found


@KINDS
@PLACES
@pytest.mark.parametrize("modules", RULES.values(), ids=RULES.keys())
def test_checkpointing_recomputes_under_the_rules_of_forward(
    modules: Any, reentrant: bool, inside: bool
) -> None:
    expected = with_rules(Model, modules, reentrant=None, inside=inside)
    found = with_rules(Model, modules, reentrant=reentrant, inside=inside)
    assert all(map(torch.equal, found, expected))


@KINDS
@PLACES
def test_a_checkpoint_inside_a_full_module_keeps_the_rules_of_its_children(
    reentrant: bool, inside: bool
) -> None:
    modules = {"body": "full", "body.0.body": "half"}
    expected = with_rules(Whole, modules, reentrant=None, inside=inside)
    found = with_rules(Whole, modules, reentrant=reentrant, inside=inside)
    assert all(map(torch.equal, found, expected))


@KINDS
def test_recomputing_follows_the_rules_of_forward_alone_when_backward_runs_under_others(
    reentrant: bool,
) -> None:
    expected = with_rules(Model, {"body.0": "half"}, reentrant=None, inside=False)
    for forward in ({"body.0": "half"}, None):
        model = Model()
        model.reentrant = reentrant
        x = X.clone().requires_grad_()
        with mezzo.autocast("cpu", dtype=HALF, modules=forward or (), model=model):
            result = model(x)
        if forward is None:
            expected = gradients(
                again := Model(), again, mezzo.autocast("cpu", dtype=HALF), inside=False
            )
        with mezzo.autocast(
            "cpu", dtype=HALF, modules={"body.2": "full", "body.0": "full"}, model=model
        ):
            (result.float() * torch.arange(8.0).reshape(2, 4)).sum().backward()
            assert model.body[2](X).dtype is torch.float32
        assert all(
            map(
                torch.equal,
                [x.grad, *(parameter.grad for parameter in model.parameters())],
                expected[1:],
            )
        )


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


def test_carry_takes_module_rules_into_a_thread_and_to_a_later_moment(
    elsewhere: Callable[..., Any],
) -> None:
    model = Model()
    with mezzo.autocast("cpu", dtype=HALF, modules={"body.2": "full"}, model=model):
        carried = mezzo.propagate_autocast(lambda: (model.body[0](X).dtype, model.body[2](X).dtype))
        assert elsewhere(carried) == (HALF, torch.float32)
        assert elsewhere(lambda: model.body[2](X).dtype) is torch.float32
    for call in (elsewhere, lambda function: function()):
        assert call(carried) == (HALF, torch.float32)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_carried_function_follows_its_own_rules_inside_other_rules() -> None:
    model = Model()
    run = lambda: [layer(X).dtype for layer in model.body]  # noqa: E731
    with mezzo.autocast("cpu", dtype=HALF, modules={"body.0": "full"}, model=model):
        carried, expected = mezzo.propagate_autocast(run), run()
    with mezzo.autocast("cpu", dtype=HALF):
        plain = mezzo.propagate_autocast(run)
    with mezzo.autocast("cpu", dtype=HALF, modules={"body.2": "full"}, model=model):
        assert carried() == expected == [torch.float32, HALF, HALF]
        assert plain() == [HALF, HALF, HALF]
        assert run() == [HALF, HALF, torch.float32]
        with pytest.raises(ZeroDivisionError):
            mezzo.propagate_autocast(lambda: 1 / 0)()
        assert run() == [HALF, HALF, torch.float32]


def test_a_function_carried_from_outside_any_region_follows_the_rules_around_its_call() -> None:
    model = Model()
    carried = mezzo.propagate_autocast(lambda: model.body[0](X).dtype)
    with mezzo.autocast("cpu", dtype=HALF, modules={"body.0": "full"}, model=model):
        assert carried() is torch.float32
    with mezzo.autocast("cpu", dtype=HALF):
        assert carried() is HALF
