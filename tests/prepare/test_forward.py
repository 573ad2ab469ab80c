"""The forward wrapper of a decorated model: casts, the policy's region, copies and pickles."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.prepare import forward


class Recorder(nn.Module):
    """Records its inputs and intermediate results."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x, *more, **named):
        self.inputs = x, more, named
        self.linear_out = self.linear(x["x"] if isinstance(x, dict) else x)
        self.norm_out = self.norm(self.linear_out)
        return {"out": self.norm_out, "more": [self.linear_out, 3], "ids": torch.arange(2)}


def decorated(level="O2", **options):
    model = Recorder()
    return mezzo.decorate(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        level,
        **{"dtype": "bfloat16", **options},
    )[0]


X = torch.ones(2, 4)


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


@dataclass
class Holder:
    value: torch.Tensor


def test_inputs_are_not_cast_at_o2():
    model = decorated("O2")
    model({"x": X})
    assert model.inputs[0]["x"] is X
    assert model.linear_out.dtype is torch.bfloat16


def test_nested_floating_point_inputs_are_cast_at_o3():
    model = decorated("O3")
    holder = Holder(X)
    model(
        {"x": X, "ids": torch.arange(3)},
        [X.half(), (X.double(), "text")],
        pair=Pair(X, X.bool()),
        flag=True,
        holder=holder,
    )
    first, more, named = model.inputs
    assert first["x"].dtype is torch.bfloat16
    assert first["ids"].dtype is torch.int64
    assert more[0][0].dtype is torch.bfloat16
    assert more[0][1][0].dtype is torch.float64
    assert more[0][1][1] == "text"
    assert isinstance(named["pair"], Pair)
    assert [one.dtype for one in named["pair"]] == [torch.bfloat16, torch.bool]
    assert named["flag"] is True
    assert named["holder"].value.dtype is torch.bfloat16
    assert holder.value is X


def test_inputs_are_not_cast_at_o1():
    model = decorated("O1")
    model(X, [X], key=X)
    first, more, named = model.inputs
    assert first is X
    assert more[0][0] is X
    assert named["key"] is X
    assert model.linear_out.dtype is torch.bfloat16


def test_a_surrounding_autocast_has_no_effect_at_o0():
    model = decorated("O0")
    with torch.autocast("cpu", torch.bfloat16):
        model(X)
    assert model.linear_out.dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: mezzo.autocast("cpu", dtype="float16"),
        lambda: mezzo.autocast("cpu", enabled=False),
        lambda: mezzo.autocast("O2", device_type="cpu", dtype="float16"),
    ],
    ids=["torch", "torch float16", "torch off", "mezzo", "mezzo off", "mezzo O2"],
)
def test_a_surrounding_autocast_does_not_change_the_result(level, around):
    model = decorated(level).eval()
    alone = model(X)
    with around():
        inside = model(X)
    assert inside["out"].dtype is alone["out"].dtype
    assert torch.equal(inside["out"], alone["out"])


def test_the_autocast_state_is_restored_when_the_model_raises():
    model = decorated()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.mm(X, X.t()).dtype is torch.float32


@pytest.mark.parametrize("output", ["float32", "float16"])
def test_nested_outputs_are_cast(output):
    result = decorated(output_dtype=output)(X)
    assert result["out"].dtype is result["more"][0].dtype is getattr(torch, output)
    assert result["more"][1] == 3
    assert result["ids"].dtype is torch.int64


def test_outputs_are_not_cast_by_default():
    assert decorated()(X)["more"][0].dtype is torch.bfloat16


def test_a_model_output_keeps_its_class():
    class Output(OrderedDict):
        def __getattr__(self, name):
            return self[name]

    class Model(nn.Linear):
        def forward(self, x):
            return Output(logits=super().forward(x))

    model = Model(4, 4)
    mezzo.decorate(model.eval(), dtype="bfloat16", output_dtype="float32")
    result = model(X)
    assert type(result) is Output
    assert result.logits.dtype is torch.float32


def test_gradients_flow_through_the_casts():
    model = decorated(output_dtype="float32")
    x = X.clone().requires_grad_()
    model(x)["out"].sum().backward()
    assert x.grad.dtype is torch.float32
    assert model.linear.weight.grad.dtype is torch.bfloat16
    assert model.norm.weight.grad.dtype is torch.float32


def test_a_norm_in_float32_computes_in_float32():
    class Norm(nn.LayerNorm):
        pass

    model = nn.Sequential(Norm(256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, dtype="bfloat16")
    assert model[0].weight.dtype is torch.float32
    x = torch.randn(8, 256).bfloat16()
    expected = nn.functional.layer_norm(x.float(), (256,))
    # Rounded once at the end, not in between.
    assert (model(x).float() - expected).abs().max() <= 2.0**-7 * expected.abs().max()


def test_op_rules_of_the_policy_apply():
    model = decorated(full={"linear"})
    model(X)
    assert model.linear_out.dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_module_rules_apply_until_undecorate(level):
    model = decorated(level, modules={"linear": "full"})
    model(X)
    assert model.linear.weight.dtype is torch.float32
    assert model.linear_out.dtype is torch.float32
    assert "forward" in model.linear.__dict__
    mezzo.undecorate(model)
    assert "forward" not in model.linear.__dict__
    assert "forward" not in model.__dict__


class Checkpointed(nn.Module):
    """A layer that is checkpointed inside a block."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x):
        return (
            self.block(x)
            if self.reentrant is None
            else checkpoint(self.block, x, use_reentrant=self.reentrant)
        )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(
    "modules", [{"0.block": "full"}, {"0": "full", "0.block": "half"}], ids=["one", "nested"]
)
def test_activation_checkpointing_recomputes_with_module_rules(modules, level, reentrant):
    results = []
    for use_reentrant in (None, reentrant):
        model = nn.Sequential(Checkpointed(use_reentrant))
        mezzo.decorate(model, None, level, dtype="bfloat16", modules=modules, master=None)
        x = X.clone().requires_grad_()
        (model(x).float() * X).tanh().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


def test_module_rules_apply_in_every_thread_and_those_of_a_region_in_one():
    model = decorated("O1", modules={"linear": "full"})

    def dtype():
        model(X)
        return model.linear_out.dtype

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(dtype).result() is torch.float32
        with mezzo.autocast("cpu", dtype="bfloat16", modules={"linear": "half"}, model=model):
            assert dtype() is torch.bfloat16
            assert pool.submit(dtype).result() is torch.float32
        assert dtype() is torch.float32
        mezzo.undecorate(model)
        with mezzo.autocast("cpu", dtype="bfloat16"):
            assert dtype() is torch.bfloat16


def test_a_rule_for_the_model_itself_applies_inside_the_wrapper():
    model = decorated(modules={"": "full"}, output_dtype="float16")
    result = model(X)
    assert model.linear_out.dtype is torch.float32
    assert result["out"].dtype is torch.float16
    mezzo.undecorate(model)
    assert "forward" not in model.__dict__


def test_module_rules_of_a_surrounding_autocast_leave_the_wrapper_in_place():
    model = decorated(output_dtype="float16")
    with mezzo.autocast(
        "O1", device_type="cpu", dtype="bfloat16", modules={"": "keep"}, model=model
    ):
        assert model(X)["out"].dtype is torch.float16
    assert model(X)["out"].dtype is torch.float16


def test_a_forward_replaced_before_runs_inside_the_wrapper_and_is_restored():
    model = nn.Linear(4, 4)
    own = model.forward
    replaced = lambda x: own(x) + 1  # noqa: E731
    model.forward = replaced
    mezzo.decorate(model.eval(), dtype="bfloat16")
    plain = nn.functional.linear(X.bfloat16(), model.weight, model.bias)
    assert torch.equal(model(X), plain + 1)
    mezzo.undecorate(model)
    assert model.forward is replaced


def test_a_deep_copy_has_its_own_wrapper():
    model = decorated()
    copied = copy.deepcopy(model)
    copied(X)
    assert copied.linear_out.dtype is torch.bfloat16
    assert not hasattr(model, "linear_out")


def test_hooks_of_the_model_run_outside_the_wrapper():
    model = decorated(output_dtype="float32")
    dtypes = []
    model.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    model.register_forward_hook(lambda module, args, result: dtypes.append(result["out"].dtype))
    model(X)
    assert dtypes == [torch.float32, torch.float32]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("options", [{}, {"full": {"linear"}}, {"modules": {"0": "full"}}], ids=str)
def test_a_compiled_model_computes_the_same(level, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, level, dtype="bfloat16", output_dtype="float32", **options)
    eager = model(X)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    result = compiled(X)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, eager, rtol=0.02, atol=0.02)
    result.sum().backward()
    assert model[2].weight.grad is not None


def wide_linear(width):
    return mezzo.decorate(nn.Linear(4, width).eval(), None, "O2", dtype="bfloat16")


def test_more_models_than_dynamos_recompile_limit_compile_in_one_process():
    torch._dynamo.reset()
    assert torch._dynamo.config.recompile_limit < 12
    for model in map(wide_linear, range(1, 13)):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), model(X))
    torch._dynamo.reset()


def test_sizes_of_one_compiled_model_do_not_make_those_of_another_dynamic():
    torch._dynamo.reset()
    sizes = []

    def record(graph, inputs):
        sizes.extend(one for one in inputs if isinstance(one, torch.SymInt))
        return graph

    for batch, cls in ((2, Returning), (3, Recorder)):
        model = cls(lambda value: value) if cls is Returning else cls()
        mezzo.decorate(model.eval(), None, "O2", dtype="bfloat16")
        torch.compile(model, backend=record)(torch.ones(batch, 4))
    assert not sizes
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_recomputes_in_the_same_precision(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(4, 4)
            self.dtypes = []

        def run(self, x):
            result = self.part(x)
            self.dtypes.append(result.dtype)
            return result.sin().sin()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=reentrant)

    model = Net()
    mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", dtype="bfloat16")
    model(X.clone().requires_grad_()).sum().backward()
    assert model.dtypes == [torch.bfloat16, torch.bfloat16]


def test_decorating_a_copy_replaces_its_wrapper():
    copied = copy.deepcopy(decorated(output_dtype="float16"))
    mezzo.decorate(copied, torch.optim.SGD(copied.parameters(), lr=0.1), dtype="bfloat16")
    assert copied(X)["more"][0].dtype is torch.bfloat16


def test_with_defer_to_autocast_a_surrounding_region_is_used():
    model = decorated(defer_to_autocast=True)
    with mezzo.autocast("O1", device_type="cpu", dtype="bfloat16", full={"linear"}):
        out = model(X)
    assert model.inputs[0].dtype is torch.float32
    assert model.linear_out.dtype is out["more"][0].dtype is torch.float32


@pytest.mark.parametrize("around", [None, {"enabled": False}], ids=["nothing", "switched off"])
def test_with_defer_to_autocast_the_own_policy_is_used_outside_regions(around):
    model = decorated(defer_to_autocast=True)
    with nullcontext() if around is None else mezzo.autocast("cpu", dtype=torch.bfloat16, **around):
        model(X)
    assert model.inputs[0].dtype is torch.float32
    assert model.linear_out.dtype is torch.bfloat16


def test_with_defer_to_autocast_outputs_are_still_cast():
    model = decorated(defer_to_autocast=True, output_dtype="float32")
    with mezzo.autocast("cpu", dtype=torch.bfloat16):
        assert model(X)["more"][0].dtype is torch.float32


def test_a_plan_shows_defer_to_autocast():
    model = Recorder()
    line = "an autocast region around the model is used instead of its own policy"
    assert line in str(mezzo.plan(model, None, "O2", dtype="bfloat16", defer_to_autocast=True))
    assert line not in str(mezzo.plan(model, None, "O2", dtype="bfloat16"))


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


POLICIES = {
    "O1": {"level": "O1"},
    "O2": {},
    "O2 op rules": {"preset": "paddle", "half": {"add"}},
    "O2 exact": {"save_dtype": "float32", "output_dtype": "float32"},
    "O3": {"level": "O3"},
}


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(
    "copied",
    [
        saved_and_loaded,
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
    ],
    ids=["file", "deep", "both"],
)
def test_a_copy_or_pickle_of_a_model_is_an_independent_model(copied, options):
    model = decorated(**options)
    copy_ = copied(model)
    expected, actual = model(X), copy_(X)
    assert torch.equal(actual["out"], expected["out"])
    assert actual["out"].dtype is expected["out"].dtype
    assert copy_.linear.weight.dtype is model.linear.weight.dtype
    copy_.linear.weight.data.zero_()
    assert model.linear.weight.any()
    # It has no masters: it may be loaded, moved, saved again and decorated again.
    copy_.load_state_dict(model.state_dict())
    assert torch.equal(saved_and_loaded(copy_)(X)["out"], expected["out"])
    mezzo.decorate(copy_.float(), None, "O3", dtype="float16")
    assert copy_(X)["out"].dtype is torch.float16


def test_a_decorated_submodule_is_pickled_with_the_model():
    whole = nn.Sequential(nn.Identity(), decorated())
    assert saved_and_loaded(whole)(X)["out"].dtype is whole(X)["out"].dtype


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: saved_and_loaded(copy.deepcopy(model))]
)
def test_a_graph_module_is_copied_and_pickled(copied, level, is_part):
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    model = nn.Sequential(traced, nn.Tanh()) if is_part else traced
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mezzo.decorate(model, optimizer, level, dtype="bfloat16")
    copy_ = copied(model)
    assert copy_(X).dtype is torch.bfloat16
    assert torch.equal(copy_(X), model(X))
    copy_.float()
    if level == "O2":
        with pytest.raises(mezzo.UnsupportedError, match="cannot be moved"):
            model.float()
    mezzo.undecorate(model)
    assert copy.deepcopy(model)(X).dtype is saved_and_loaded(model)(X).dtype is torch.float32


def test_a_pickle_is_read_in_another_process(tmp_path):
    model = nn.Linear(4, 4)
    mezzo.decorate(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", dtype="bfloat16", half={"tanh"}
    )
    torch.save(model, tmp_path / "model.pt")
    program = (
        f"import torch; print(torch.load({str(tmp_path / 'model.pt')!r},"
        " weights_only=False)(torch.ones(1, 4)).dtype)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "torch.bfloat16\n"
    )


def test_a_replaced_forward_is_pickled():
    model = decorated()
    mezzo.undecorate(model)
    model.forward = nn.functional.relu
    mezzo.decorate(model, None, "O3", dtype="bfloat16")
    assert torch.equal(saved_and_loaded(model)(X - 2), torch.zeros(2, 4, dtype=torch.bfloat16))


def test_module_rules_cannot_be_pickled():
    model = decorated(modules={"linear": "full"})
    assert torch.equal(copy.deepcopy(model)(X)["out"], model(X)["out"])
    with pytest.raises(
        mezzo.UnsupportedError,
        match=r"has module rules \(linear\).*state_dict\(\), or call mezzo\.undecorate",
    ):
        pickle.dumps(model)


def test_undecorating_leaves_no_attributes():
    model = Recorder()
    before = set(model.__dict__)
    assert (
        set(mezzo.undecorate(mezzo.decorate(model, None, "O3", dtype="bfloat16")).__dict__)
        == before
    )


def test_a_pickle_is_read_without_its_device(monkeypatch):
    model = decorated(half={"tanh"})
    saved = pickle.dumps(model)

    def missing(*_, **__):
        raise mezzo.UnsupportedError("no such device")

    monkeypatch.setattr(forward, "region_for", missing)
    loaded = pickle.loads(saved).float()
    monkeypatch.undo()
    assert loaded.linear.weight.dtype is torch.float32
    assert not loaded.forward.mezzo_wrapper.region.enabled


def test_a_pickle_keeps_the_dtype_that_was_chosen_by_the_hardware():
    model = Recorder()
    mezzo.decorate(model, None, "O3", dtype="auto", half={"tanh"})
    chosen = model.linear.weight.dtype
    assert saved_and_loaded(model).forward.mezzo_wrapper.region.dtype is chosen


# -- O2 leaves explicit float32 alone --------------------------------------------------------------


class Explicit(nn.Module):
    """Makes float32 in the ways that users do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), 1e5))
        self.register_buffer("square", torch.eye(4) * 1e5)

    def forward(self, x):
        h = self.linear(x)
        return {
            "float": h.float().abs().add(1e5).sum() / x.numel(),
            "to": h.to(torch.float32) * 1e5,
            "dtype": h.sum(dtype=torch.float32) + 1e5,
            "constant": h + torch.full((4,), 1e5),
            "buffer": h + self.table,
            "normalized": nn.functional.normalize(h * 0, eps=1e-12),
            "disabled": self.without_autocast(h),
            "half": self.linear(h.float()),
            "half too": h.relu() + h,
        }

    def without_autocast(self, h):
        with torch.autocast("cpu", enabled=False):
            return h.float() @ self.square


def run_eager(model, x):
    return model(x)


def run_compiled(model, x, *, fullgraph=True):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=fullgraph)(x)


def run_compiled_with_containers(model, x):
    # Before torch 2.13, dynamo breaks the graph where a container is copied.
    return run_compiled(model, x, fullgraph=torch.__version__ >= "2.13")


def run_exported(model, x):
    return torch.export.export(model, (x,)).module()(x)


@pytest.mark.parametrize("preset", ["torch-cpu", "torch-cuda"])
@pytest.mark.parametrize("run", [run_eager, run_compiled, run_exported])
def test_float32_that_the_model_makes_stays_float32_until_an_op_of_the_half_list(run, preset):
    model = mezzo.decorate(Explicit().eval(), None, "O2", dtype="float16", preset=preset)
    result = run(model, torch.randn(3, 4))
    if preset == "torch-cpu":
        # torch's list for CPUs does not have the norm: its eps of 1e-12 is zero in float16.
        del result["normalized"]
    dtypes = {name: value.dtype for name, value in result.items()}
    assert dtypes.pop("half") is dtypes.pop("half too") is torch.float16
    assert set(dtypes.values()) == {torch.float32}
    assert all(bool(value.isfinite().all()) for value in result.values())


# -- outputs of any kind, and the signature --------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """An output as models return it."""

    logits: torch.Tensor
    nested: Pair
    name: str = "out"


class StrictOutput(OrderedDict):
    """A dictionary with attributes that cannot be updated, as transformers' outputs."""

    def update(self, *_args, **_kwargs):
        raise AttributeError("You cannot use ``update`` here")

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x, labels=None, *, scale: float = 1.0):
        """Return what `make` makes."""
        return self.make(self.linear(x) * scale)


def strict_output(value):
    output = StrictOutput()
    output["logits"] = value
    return output


def test_outputs_of_any_kind_are_cast_and_come_back_as_what_they_were():
    made = Returning(lambda value: Output(value, Pair(value, value)))
    output = mezzo.decorate(made.eval(), dtype="bfloat16", output_dtype="float32")(X)
    assert type(output) is Output
    assert output.name == "out"
    assert type(output.nested) is Pair
    assert output.logits.dtype is output.nested.other.dtype is torch.float32
    strict = mezzo.decorate(
        Returning(strict_output).eval(), dtype="bfloat16", output_dtype="float32"
    )(X)
    assert type(strict) is StrictOutput
    assert strict.logits is strict["logits"]
    assert strict.logits.dtype is torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of dynamo, after a break
@pytest.mark.parametrize("run", [run_compiled_with_containers, run_exported])
def test_outputs_of_any_kind_are_cast_in_compiled_and_exported_code(run):
    makes = [lambda value: {"logits": value, "more": [Pair(value, value)]}]
    if run is not run_exported:
        # torch.export takes containers that are registered with it only.
        makes += [strict_output, lambda value: Output(value, Pair(value, value))]
    for make in makes:
        model = Returning(make)
        mezzo.decorate(model.eval(), dtype="bfloat16", output_dtype="float32")
        expected, result = model(X), run(model, X)
        assert type(result) is type(expected)
        logits = result.logits if isinstance(result, Output) else result["logits"]
        assert logits.dtype is torch.float32


def test_a_decorated_model_has_the_signature_of_its_forward():
    model = Returning(lambda value: value)
    before = inspect.signature(model.forward)
    mezzo.decorate(model.eval(), dtype="bfloat16")
    assert inspect.signature(model.forward) == before
    assert model.forward.__doc__ == "Return what `make` makes."
    bound = Returning(lambda value: value)
    bound.forward = bound.linear.forward
    mezzo.decorate(bound.eval(), dtype="bfloat16")
    assert list(inspect.signature(bound.forward).parameters) == ["input"]
    assert bound(X).dtype is torch.bfloat16
