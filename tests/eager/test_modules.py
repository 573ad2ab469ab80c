"""Rules for whole modules: what they match, what they do, and that nothing stays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import mezzo
from mezzo.eager.modules import plan_modules
from mezzo.policy.policy import Policy

HALF = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def region(model: nn.Module | None, modules: Any, **words: Any) -> mezzo.autocast:
    return mezzo.autocast("cpu", dtype=HALF, modules=modules, model=model, **words)


def dtypes(model: nn.Module, x: torch.Tensor) -> dict[str, torch.dtype]:
    """What each leaf module gives."""
    found: dict[str, torch.dtype] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _a, out, name=name: found.__setitem__(name, out.dtype))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def rules(modules: Any) -> dict[str, str]:
    return {one.name: one.rule.value for one in plan_modules(Model(), Policy(modules=modules))}


def test_a_glob_an_exact_name_and_a_type_find_their_modules() -> None:
    assert rules({"blocks.*.norm": "full"}) == {"blocks.0.norm": "full", "blocks.1.norm": "full"}
    assert rules({"head": "half"}) == {"head": "half"}
    assert rules({nn.LayerNorm: "full"}) == {"blocks.0.norm": "full", "blocks.1.norm": "full"}
    assert rules({Model: "full"}) == {"": "full"}


@pytest.mark.parametrize("turned", [False, True])
def test_an_exact_name_beats_a_glob_and_a_glob_beats_a_type(turned: bool) -> None:
    table = {nn.Linear: "keep", "blocks.*.linear": "full", "blocks.1.linear": "half"}
    ordered = dict(reversed(table.items())) if turned else table
    assert rules(ordered) == {"blocks.0.linear": "full", "blocks.1.linear": "half", "head": "keep"}


def test_of_two_globs_the_later_wins() -> None:
    assert rules({"blocks.*": "half", "*.norm": "full"})["blocks.0.norm"] == "full"
    assert rules({"*.norm": "full", "blocks.*": "half"})["blocks.0.norm"] == "half"


def test_a_full_module_runs_in_float32_and_its_input_is_cast() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": "full"}):
        assert dtypes(model, x)["head"] is torch.float32
        assert model.head(x.to(HALF)).dtype is torch.float32


def test_a_half_module_runs_every_op_in_16_bits() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"blocks.1": "half"}, preset="torch-cuda"):
        found = dtypes(model, x)
    assert (found["blocks.0.norm"], found["blocks.1.norm"]) == (torch.float32, HALF)


def test_a_kept_module_is_left_alone_with_what_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    with region(model, {"0": "keep"}):
        assert model(torch.randn(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("custom", [False, True])
def test_a_childs_exception_beats_the_parents_rule(custom: bool) -> None:
    model, x = Model(), torch.randn(2, 4)
    words = {"half": {"add"}} if custom else {}
    with region(model, {"blocks.*": "full", "blocks.1.linear": "half"}, **words):
        found = dtypes(model, x)
    assert (found["blocks.0.linear"], found["blocks.1.linear"]) == (torch.float32, HALF)
    with region(model, {Model: "half", "head": "full"}, **words):
        found = dtypes(model, x)
    assert (found["blocks.0.linear"], found["head"]) == (HALF, torch.float32)


def test_gradients_flow_through_a_ruled_module() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": "full", "blocks.0": "half"}):
        model(x).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype is torch.float32 for parameter in model.parameters())


def test_keyword_arguments_and_containers_are_cast_too() -> None:
    class Takes(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, ...], *, named: dict[str, torch.Tensor], number: int) -> list[torch.dtype]:
            return [pair[0].dtype, pair[1].dtype, named["x"].dtype]

    model = nn.ModuleDict({"takes": Takes()})
    with region(model, {"takes": "half"}):
        found = model["takes"]((torch.ones(1), torch.ones(1, dtype=torch.int64)), named={"x": torch.ones(1)}, number=3)
    assert found == [HALF, torch.int64, HALF]


def test_rules_are_undone_at_the_end_and_after_an_exception() -> None:
    model = Model()
    with region(model, {"head": "full"}):
        assert "forward" in model.head.__dict__
    assert "forward" not in model.head.__dict__
    with pytest.raises(ZeroDivisionError), region(model, {"head": "full"}):
        raise ZeroDivisionError
    assert "forward" not in model.head.__dict__


def test_a_forward_of_the_instances_own_is_kept_and_put_back() -> None:
    model = Model()

    def own(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, model.head.weight) * 2

    model.head.forward = own
    with region(model, {"head": "full"}):
        assert model.head(torch.ones(1, 4, dtype=HALF)).dtype is torch.float32
    assert model.head.forward is own


def test_one_bound_instance_entered_twice_binds_once() -> None:
    model, x = Model(), torch.randn(2, 4)
    bound = region(model, {"head": "full"})
    with bound:
        with bound:
            assert model(x).dtype is torch.float32
        assert model(x).dtype is torch.float32
    assert "forward" not in model.head.__dict__


def test_two_bindings_nest_and_the_inner_one_speaks() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": "full"}):
        with region(model, {"head": "half"}):
            assert model(x).dtype is HALF
        assert model(x).dtype is torch.float32


def test_a_shared_module_has_the_rule_of_its_most_exact_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = model["a"]
    for rule, other, dtype in (("half", "full", HALF), ("full", "half", torch.float32)):
        for modules in ({"a": rule, nn.Linear: other}, {nn.Linear: other, "a": rule}, {"b": rule, nn.Linear: other}, {"?": other, "b": rule}):
            with region(model, modules):
                assert model["b"](torch.ones(1, 2)).dtype is dtype
    assert "forward" not in model["a"].__dict__


def test_a_deep_copy_made_inside_follows_the_rules_inside_and_forgets_them_outside() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": "full"}):
        again = copy.deepcopy(model)
        with torch.no_grad():
            again.head.weight.zero_()
            again.head.bias.zero_()
        assert again(x).dtype is torch.float32
        assert not again(x).any()
        assert model(x).any()
    assert again(x.to(torch.float64).float()).dtype is torch.float32
    with mezzo.autocast("cpu", dtype=HALF):
        assert again.head(x).dtype is HALF


def test_a_half_modules_deep_copy_does_not_cast_outside_the_region() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": "half"}):
        again = copy.deepcopy(model)
    assert again(x).dtype is torch.float32


def test_a_bound_model_is_pickled_without_its_rules() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": "half"}):
        again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), model(x))


def test_the_state_dict_is_the_same_inside() -> None:
    model = Model()
    keys = list(model.state_dict())
    with region(model, {"head": "full"}):
        assert list(model.state_dict()) == keys


@pytest.mark.parametrize("off", [lambda: torch.autocast("cpu", enabled=False), lambda: mezzo.autocast("cpu", enabled=False)], ids=["torch", "mezzo"])
@pytest.mark.parametrize("rule", ["half", "full"])
def test_a_disabled_region_inside_switches_the_rules_off(off: Any, rule: str) -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": rule}), off():
        assert model(x).dtype is torch.float32
        assert torch.equal(model.head(x), nn.functional.linear(x, model.head.weight, model.head.bias))


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_bound_model_is_compiled_whole_and_again_when_unbound() -> None:
    model, x = Model(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with region(model, {"head": "full", "blocks.0.norm": "half"}, half={"add"}):
        assert torch.equal(compiled(x), model(x))
        assert compiled(x).dtype is torch.float32
    with mezzo.autocast("cpu", dtype=HALF):
        assert compiled(x).dtype is HALF
    assert compiled(x).dtype is torch.float32


def test_a_pattern_that_matches_nothing_is_refused_with_close_names() -> None:
    with pytest.raises(mezzo.PolicyError, match=r"'heads' matches nothing in Model.*'head'"):
        region(Model(), {"heads": "full"})


def test_a_policy_with_module_rules_needs_a_model() -> None:
    with pytest.raises(mezzo.PolicyError, match="model=model"):
        region(None, {"head": "full"})


def test_a_disabled_region_needs_no_model() -> None:
    with region(None, {"head": "full"}, enabled=False):
        pass


def test_data_parallel_is_refused() -> None:
    wrapped = nn.DataParallel(Model())
    with pytest.raises(mezzo.UnsupportedError, match="DataParallel"):
        region(wrapped, {"*.head": "full"})


def test_the_rules_that_a_module_cannot_have_are_refused() -> None:
    with pytest.raises(mezzo.PolicyError, match="refuse"):
        region(Model(), {"head": "refuse"})
