"""Rules for whole modules: what they match, what they do, and that nothing stays."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import mezzo
from mezzo.autocasting.module_rules import plan_modules
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
        module.register_forward_hook(
            lambda _m, _a, out, name=name: found.__setitem__(name, out.dtype)
        )
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
    assert all(
        parameter.grad is not None and parameter.grad.dtype is torch.float32
        for parameter in model.parameters()
    )


def test_keyword_arguments_and_containers_are_cast_too() -> None:
    class Takes(nn.Module):
        def forward(
            self, pair: tuple[torch.Tensor, ...], *, named: dict[str, torch.Tensor], number: int
        ) -> list[torch.dtype]:
            return [pair[0].dtype, pair[1].dtype, named["x"].dtype]

    model = nn.ModuleDict({"takes": Takes()})
    with region(model, {"takes": "half"}):
        found = model["takes"](
            (torch.ones(1), torch.ones(1, dtype=torch.int64)), named={"x": torch.ones(1)}, number=3
        )
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
        for modules in (
            {"a": rule, nn.Linear: other},
            {nn.Linear: other, "a": rule},
            {"b": rule, nn.Linear: other},
            {"?": other, "b": rule},
        ):
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


@pytest.mark.parametrize(
    "off",
    [lambda: torch.autocast("cpu", enabled=False), lambda: mezzo.autocast("cpu", enabled=False)],
    ids=["torch", "mezzo"],
)
@pytest.mark.parametrize("rule", ["half", "full"])
def test_a_disabled_region_inside_switches_the_rules_off(off: Any, rule: str) -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": rule}), off():
        assert model(x).dtype is torch.float32
        assert torch.equal(
            model.head(x), nn.functional.linear(x, model.head.weight, model.head.bias)
        )


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


@pytest.mark.usefixtures("_fresh_compiler")
def test_entering_equal_rules_anew_costs_no_compilation() -> None:
    model, x, counter = Model(), torch.randn(2, 4), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        with region(model, {"head": "full"}):
            compiled(x)
    assert counter.frame_count == 1
    with region(model, {"head": "half"}):
        assert compiled(x).dtype is HALF
    assert counter.frame_count == 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_code_follows_the_rules_of_the_thread_that_runs_it(together: Together) -> None:
    model, x = Model(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def ruled(rule: str, turn: Callable[[], None]) -> list[torch.dtype]:
        with region(model, {"head": rule}):
            turn()
            found = [compiled(x).dtype]
            turn()
            found.append(compiled(x).dtype)
            turn()
        return found

    def plain(turn: Callable[[], None]) -> list[torch.dtype]:
        with mezzo.autocast("cpu", dtype=HALF):
            turn()
            found = [compiled(x).dtype]
            turn()
            found.append(compiled(x).dtype)
            turn()
        return found

    full, half, none = together(partial(ruled, "full"), partial(ruled, "half"), plain)
    assert (full, half, none) == ([torch.float32] * 2, [HALF] * 2, [HALF] * 2)
    assert compiled(x).dtype is torch.float32


# -- threads ---------------------------------------------------------------------------------------

Together = Callable[..., list[Any]]


@pytest.fixture
def together() -> Together:
    """Runs functions at once, each in a thread; each is given a barrier, which lets all of them go on when all have come to it."""

    def run(*functions: Callable[[Callable[[], Any]], Any]) -> list[Any]:
        barrier = threading.Barrier(len(functions), timeout=60)
        with ThreadPoolExecutor(len(functions)) as pool:
            return [
                done.result()
                for done in [pool.submit(function, barrier.wait) for function in functions]
            ]

    return run


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_threads_follow_their_own_rules_and_leave_those_of_others(together: Together) -> None:
    model, x = Model(), torch.randn(2, 4)

    def first(turn: Callable[[], Any]) -> list[torch.dtype]:
        with region(model, {"head": "full"}):
            turn()  # both are inside
            found = [model(x).dtype]
            turn()  # both have run
        turn()  # this one has left
        found.append(model(x).dtype)
        turn()
        return found

    def second(turn: Callable[[], Any]) -> list[torch.dtype]:
        with region(model, {"head": "half"}):
            turn()
            found = [model(x).dtype]
            turn()
            turn()
            found.append(model(x).dtype)
        turn()
        return found

    assert together(first, second) == [[torch.float32, torch.float32], [HALF, HALF]]
    assert together(second, first) == [[HALF, HALF], [torch.float32, torch.float32]]
    assert replaced(model) == []


@pytest.mark.parametrize(
    "words", [None, {}, {"half": {"add"}}], ids=["no region", "default", "custom"]
)
def test_a_thread_without_rules_sees_the_plain_module(
    words: dict[str, Any] | None, together: Together
) -> None:
    model, x = Model(), torch.randn(2, 4)
    here = nullcontext() if words is None else mezzo.autocast("cpu", dtype=HALF, **words)

    def ruled(turn: Callable[[], Any]) -> torch.dtype:
        with region(model, {"head": "full", "blocks.*": "half"}):
            turn()
            turn()
            return model(x).dtype

    def plain(turn: Callable[[], Any]) -> Any:
        with here:
            expected = model(x)
            turn()
            found = model(x)
            turn()
            return found.dtype, torch.equal(found, expected)

    assert together(ruled, plain) == [
        torch.float32,
        (torch.float32 if words is None else HALF, True),
    ]
    assert replaced(model) == []


def test_one_region_is_open_in_two_threads_and_holds_until_each_has_left(
    together: Together,
) -> None:
    model, x = Model(), torch.randn(2, 4)
    shared = region(model, {"head": "full"})

    def leaves_first(turn: Callable[[], Any]) -> None:
        with shared:
            turn()
        turn()

    def leaves_last(turn: Callable[[], Any]) -> torch.dtype:
        with shared:
            turn()
            turn()
            return model(x).dtype

    assert together(leaves_first, leaves_last)[1] is torch.float32
    assert replaced(model) == []


def test_a_thread_that_ends_inside_a_region_leaves_no_forward_behind() -> None:
    model = Model()
    thread = threading.Thread(
        target=lambda: mezzo.enable_autocast(
            "cpu", dtype="bfloat16", modules={"head": "full"}, model=model
        )
    )
    thread.start()
    thread.join()
    assert replaced(model) == []


def test_an_outer_region_left_first_takes_its_rules_alone() -> None:
    model, x = Model(), torch.randn(2, 4)
    outer, inner = (
        region(model, {"head": "full", "blocks.0.linear": "full"}),
        region(model, {"head": "half"}),
    )
    outer.__enter__()
    inner.__enter__()
    assert (model(x).dtype, model.blocks[0].linear(x).dtype) == (HALF, torch.float32)
    outer.__exit__(None, None, None)
    assert (model(x).dtype, model.blocks[0].linear(x).dtype) == (HALF, HALF)
    inner.__exit__(None, None, None)
    assert replaced(model) == []


def test_rules_hold_while_a_decorated_generator_is_closed() -> None:
    model, x, found = Model(), torch.randn(2, 4), []

    @region(model, {"head": "full"})
    def run() -> Iterator[int]:
        try:
            yield 1
        finally:
            found.append(model(x).dtype)

    running = run()
    next(running)
    running.close()
    assert found == [torch.float32]


def test_an_exported_program_keeps_the_rules() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": "full", "blocks.1": "half"}):
        expected = model(x)
        program = torch.export.export(model, (x,), strict=False)
    assert torch.equal(program.module()(x), expected)
    assert expected.dtype is torch.float32


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
