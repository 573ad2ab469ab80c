"""Module rules: matching, precision, nesting, threads, and restoring the forward."""

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
from mezzo.autocasting.module_rules import plan_modules, replace_forward
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


def region(model: nn.Module | None, modules: Any, **fields: Any) -> mezzo.autocast:
    return mezzo.autocast("cpu", dtype=HALF, modules=modules, model=model, **fields)


def dtypes(model: nn.Module, x: torch.Tensor) -> dict[str, torch.dtype]:
    """Return the output dtype of each leaf module."""
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


def test_globs_exact_names_and_classes_match_their_modules() -> None:
    assert rules({"blocks.*.norm": "full"}) == {"blocks.0.norm": "full", "blocks.1.norm": "full"}
    assert rules({"head": "half"}) == {"head": "half"}
    assert rules({nn.LayerNorm: "full"}) == {"blocks.0.norm": "full", "blocks.1.norm": "full"}
    assert rules({Model: "full"}) == {"": "full"}


@pytest.mark.parametrize("reverse", [False, True])
def test_exact_names_take_precedence_over_globs_and_globs_over_classes(reverse: bool) -> None:
    table = {nn.Linear: "keep", "blocks.*.linear": "full", "blocks.1.linear": "half"}
    ordered = dict(reversed(table.items())) if reverse else table
    assert rules(ordered) == {"blocks.0.linear": "full", "blocks.1.linear": "half", "head": "keep"}


def test_of_two_globs_the_later_applies() -> None:
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


def test_a_kept_module_runs_with_uncast_inputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    with region(model, {"0": "keep"}):
        assert model(torch.randn(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("custom", [False, True])
def test_the_rule_of_a_child_overrides_that_of_its_parent(custom: bool) -> None:
    model, x = Model(), torch.randn(2, 4)
    fields = {"half": {"add"}} if custom else {}
    with region(model, {"blocks.*": "full", "blocks.1.linear": "half"}, **fields):
        found = dtypes(model, x)
    assert (found["blocks.0.linear"], found["blocks.1.linear"]) == (torch.float32, HALF)
    with region(model, {Model: "half", "head": "full"}, **fields):
        found = dtypes(model, x)
    assert (found["blocks.0.linear"], found["head"]) == (HALF, torch.float32)


def test_gradients_flow_through_a_module_with_a_rule() -> None:
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


def test_rules_end_with_the_region_and_after_an_exception() -> None:
    model = Model()
    with region(model, {"head": "full"}):
        assert "forward" in model.head.__dict__
    assert "forward" not in model.head.__dict__
    with pytest.raises(ZeroDivisionError), region(model, {"head": "full"}):
        raise ZeroDivisionError
    assert "forward" not in model.head.__dict__


def test_a_forward_set_on_the_instance_is_used_and_restored() -> None:
    model = Model()

    def own(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, model.head.weight) * 2

    model.head.forward = own
    with region(model, {"head": "full"}):
        assert model.head(torch.ones(1, 4, dtype=HALF)).dtype is torch.float32
    assert model.head.forward is own


def test_one_instance_entered_twice_binds_once() -> None:
    model, x = Model(), torch.randn(2, 4)
    bound = region(model, {"head": "full"})
    with bound:
        with bound:
            assert model(x).dtype is torch.float32
        assert model(x).dtype is torch.float32
    assert "forward" not in model.head.__dict__


def test_of_nested_bindings_the_inner_one_applies() -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": "full"}):
        with region(model, {"head": "half"}):
            assert model(x).dtype is HALF
        assert model(x).dtype is torch.float32


def test_a_shared_module_has_the_rule_of_its_most_specific_match() -> None:
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


def test_a_deep_copy_made_inside_has_the_rules_only_inside() -> None:
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


def test_a_bound_model_pickles_without_its_rules() -> None:
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
def test_a_disabled_region_inside_disables_the_rules(off: Any, rule: str) -> None:
    model, x = Model(), torch.randn(2, 4)
    with region(model, {"head": rule}), off():
        assert model(x).dtype is torch.float32
        assert torch.equal(
            model.head(x), nn.functional.linear(x, model.head.weight, model.head.bias)
        )


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_bound_model_compiles_without_graph_breaks_and_again_when_unbound() -> None:
    model, x = Model(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with region(model, {"head": "full", "blocks.0.norm": "half"}, half={"add"}):
        assert torch.equal(compiled(x), model(x))
        assert compiled(x).dtype is torch.float32
    with mezzo.autocast("cpu", dtype=HALF):
        assert compiled(x).dtype is HALF
    assert compiled(x).dtype is torch.float32


@pytest.mark.usefixtures("_fresh_compiler")
def test_entering_equal_rules_again_does_not_recompile() -> None:
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
def test_compiled_code_uses_the_rules_of_its_thread(together: Together) -> None:
    model, x = Model(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def with_rule(rule: str, wait: Callable[[], None]) -> list[torch.dtype]:
        with region(model, {"head": rule}):
            wait()
            found = [compiled(x).dtype]
            wait()
            found.append(compiled(x).dtype)
            wait()
        return found

    def plain(wait: Callable[[], None]) -> list[torch.dtype]:
        with mezzo.autocast("cpu", dtype=HALF):
            wait()
            found = [compiled(x).dtype]
            wait()
            found.append(compiled(x).dtype)
            wait()
        return found

    full, half, none = together(partial(with_rule, "full"), partial(with_rule, "half"), plain)
    assert (full, half, none) == ([torch.float32] * 2, [HALF] * 2, [HALF] * 2)
    assert compiled(x).dtype is torch.float32


# -- threads ---------------------------------------------------------------------------------------

Together = Callable[..., list[Any]]


@pytest.fixture
def together() -> Together:
    """Run functions in concurrent threads; each takes the `wait` of a barrier of all threads."""

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


def test_threads_have_independent_rules(together: Together) -> None:
    model, x = Model(), torch.randn(2, 4)

    def first(wait: Callable[[], Any]) -> list[torch.dtype]:
        with region(model, {"head": "full"}):
            wait()  # both are inside
            found = [model(x).dtype]
            wait()  # both have run
        wait()  # this one has left
        found.append(model(x).dtype)
        wait()
        return found

    def second(wait: Callable[[], Any]) -> list[torch.dtype]:
        with region(model, {"head": "half"}):
            wait()
            found = [model(x).dtype]
            wait()
            wait()
            found.append(model(x).dtype)
        wait()
        return found

    assert together(first, second) == [[torch.float32, torch.float32], [HALF, HALF]]
    assert together(second, first) == [[HALF, HALF], [torch.float32, torch.float32]]
    assert replaced(model) == []


@pytest.mark.parametrize(
    "fields", [None, {}, {"half": {"add"}}], ids=["no region", "default", "custom"]
)
def test_a_thread_without_rules_runs_the_original_forward(
    fields: dict[str, Any] | None, together: Together
) -> None:
    model, x = Model(), torch.randn(2, 4)
    here = nullcontext() if fields is None else mezzo.autocast("cpu", dtype=HALF, **fields)

    def with_rule(wait: Callable[[], Any]) -> torch.dtype:
        with region(model, {"head": "full", "blocks.*": "half"}):
            wait()
            wait()
            return model(x).dtype

    def plain(wait: Callable[[], Any]) -> Any:
        with here:
            expected = model(x)
            wait()
            found = model(x)
            wait()
            return found.dtype, torch.equal(found, expected)

    assert together(with_rule, plain) == [
        torch.float32,
        (torch.float32 if fields is None else HALF, True),
    ]
    assert replaced(model) == []


def test_two_threads_in_one_region_have_rules_until_each_leaves(
    together: Together,
) -> None:
    model, x = Model(), torch.randn(2, 4)
    shared = region(model, {"head": "full"})

    def leaves_first(wait: Callable[[], Any]) -> None:
        with shared:
            wait()
        wait()

    def leaves_last(wait: Callable[[], Any]) -> torch.dtype:
        with shared:
            wait()
            wait()
            return model(x).dtype

    assert together(leaves_first, leaves_last)[1] is torch.float32
    assert replaced(model) == []


def test_a_thread_that_ends_inside_a_region_restores_the_forward() -> None:
    model = Model()
    thread = threading.Thread(
        target=lambda: mezzo.enable_autocast(
            "cpu", dtype="bfloat16", modules={"head": "full"}, model=model
        )
    )
    thread.start()
    thread.join()
    assert replaced(model) == []


def test_leaving_an_outer_region_first_removes_only_its_rules() -> None:
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


def test_rules_apply_while_a_decorated_generator_is_closed() -> None:
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


def test_a_selector_that_matches_nothing_raises_with_close_names() -> None:
    with pytest.raises(mezzo.PolicyError, match=r"'heads' matches nothing in Model.*'head'"):
        region(Model(), {"heads": "full"})


def test_a_policy_with_module_rules_needs_a_model() -> None:
    with pytest.raises(mezzo.PolicyError, match="model=model"):
        region(None, {"head": "full"})


def test_a_disabled_region_needs_no_model() -> None:
    with region(None, {"head": "full"}, enabled=False):
        pass


def test_data_parallel_raises() -> None:
    wrapped = nn.DataParallel(Model())
    with pytest.raises(mezzo.UnsupportedError, match="DataParallel"):
        region(wrapped, {"*.head": "full"})


def test_promote_and_refuse_raise_for_modules() -> None:
    with pytest.raises(mezzo.PolicyError, match="refuse"):
        region(Model(), {"head": "refuse"})


def adding(number: float):
    def make(function, bound):
        def forward(self_, *args, **kwargs):
            return (
                function(*args, **kwargs) if bound else function(self_, *args, **kwargs)
            ) + number

        return forward

    return make


def test_a_forward_with_the_same_mark_is_replaced_and_another_is_kept():
    module = nn.Identity()
    replace_forward(module, "first", adding(1))
    undo = replace_forward(module, "first", adding(10))
    assert module(torch.zeros(())) == 10
    undo()
    assert module(torch.zeros(())) == 1
    replace_forward(module, "second", adding(100))
    assert module(torch.zeros(())) == 101


def test_a_forward_set_on_the_instance_is_called_and_restored():
    module = nn.Identity()
    module.forward = own = lambda inputs: inputs * 2
    undo = replace_forward(module, "mark", adding(1))
    assert module(torch.ones(())) == 3
    undo()
    assert module.forward is own


def test_a_deep_copy_runs_its_own_forward():
    module = nn.Linear(1, 1, bias=False)
    replace_forward(module, "mark", adding(0))
    other = copy.deepcopy(module)
    nn.init.zeros_(other.weight)
    assert other(torch.ones(1, 1)) == 0
