"""`oneflow.nn.Graph`: training, evaluation, its configuration, saving, errors."""

import math

import pytest
import torch
from torch import nn

from mezzo import EvalStep, Policy
from mezzo.compat.oneflow import amp
from mezzo.compat.oneflow.nn import Graph
from mezzo.compat.oneflow.nn.graph import (
    BuildModule,
    EvaluationSpec,
    GraphConfig,
    TrainingSpec,
    make_runner,
)
from mezzo.prepare.decoration import decoration_of
from mezzo.step.function_step import FunctionStep


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Training(Graph):
    def __init__(
        self, model, optimizer=None, *, mode=True, dtype=torch.float16, scaler=None, lr_sch=None
    ):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer or torch.optim.SGD(model.parameters(), lr=0.1), lr_sch=lr_sch)
        self.config.enable_amp(mode, dtype=dtype)
        self.records = []
        if scaler is not None:
            self.set_grad_scaler(scaler)

    def build(self, x, factor=None):
        out = self.model(x)
        self.records.append(out.dtype)
        loss = out.float().square().mean() * (1.0 if factor is None else factor)
        loss.backward()
        return {"out": out, "loss": loss}


class Evaluation(Graph):
    def __init__(self, model, **amp_kwargs):
        super().__init__()
        self.model = model
        self.records = []
        if amp_kwargs:
            self.config.enable_amp(**amp_kwargs)

    def build(self, x):
        out = self.model(x)
        self.records.append((out.dtype, out.requires_grad, self.model.training))
        return out


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_graph_trains_in_16_bits_and_returns_float32(dtype):
    graph = Training(make_model(), dtype=dtype)
    results = [graph(X) for _ in range(10)]
    assert set(graph.records) == {dtype}
    assert results[0]["out"].dtype is torch.float32
    assert results[-1]["loss"] < 0.5 * results[0]["loss"]
    assert all(
        parameter.dtype is torch.float32 and parameter.grad is None
        for parameter in graph.model.parameters()
    )


def test_without_amp_the_graph_is_a_float32_training_step():
    graph, plain = Training(make_model(), mode=False), make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        graph(X)
        plain(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(graph.records) == {torch.float32}
    assert all(
        torch.equal(one, other)
        for one, other in zip(graph.model.parameters(), plain.parameters(), strict=True)
    )


def test_without_a_grad_scaler_nothing_is_scaled():
    graph = Training(make_model())
    graph(X)
    assert (graph.mezzo_step.scaler, graph.mezzo_step.scale) == (None, 1.0)


def test_a_scaler_skips_a_non_finite_step_backs_off_and_grows():
    graph = Training(make_model(), scaler=amp.GradScaler(init_scale=64.0, growth_interval=2))
    before = [parameter.detach().clone() for parameter in graph.model.parameters()]
    graph(X, torch.tensor(math.inf))
    assert (graph.mezzo_step.skipped, graph.mezzo_step.scale) == (True, 32.0)
    assert all(
        torch.equal(one, other) for one, other in zip(graph.model.parameters(), before, strict=True)
    )
    graph(X)
    graph(X)
    assert (graph.mezzo_step.skipped, graph.mezzo_step.scale) == (False, 64.0)


@pytest.mark.parametrize(
    "reduce",
    [lambda out: nn.functional.cross_entropy(out, torch.zeros(16, dtype=torch.int64)), torch.mean],
    ids=["loss", "mean"],
)
def test_losses_are_float32_so_that_the_initial_scale_does_not_overflow(reduce):
    model, dtypes = make_model(), []

    class Reduced(Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            self.config.enable_amp(True)
            self.set_grad_scaler(amp.GradScaler())

        def build(self, x):
            out = self.model(x)
            loss = reduce(out) / 64
            dtypes.append((out.dtype, loss.dtype))
            loss.backward()

    graph = Reduced()
    graph(X)
    assert dtypes == [(torch.float16, torch.float32)]
    assert (graph.mezzo_step.skipped, graph.mezzo_step.scale) == (False, 65536.0)


def test_the_scale_stays_at_least_one():
    graph = Training(make_model(), scaler=amp.GradScaler(init_scale=2.0))
    with pytest.warns(UserWarning, match="floor of 1"):
        graph(X, torch.tensor(math.nan))
    graph(X, torch.tensor(math.nan))
    assert graph.mezzo_step.scale == 1.0


def test_several_graphs_keep_their_own_scales():
    settings = amp.GradScaler(init_scale=8.0, growth_interval=1)
    skipping, growing = (Training(make_model(), scaler=settings) for _ in range(2))
    for _ in range(2):
        skipping(X, torch.tensor(math.inf))
        growing(X, torch.tensor(1.0))
    assert (skipping.mezzo_step.scale, growing.mezzo_step.scale) == (2.0, 32.0)


def test_a_static_scale_does_not_change_the_updates():
    graph, other = (
        Training(make_model(), scaler=amp.StaticGradScaler(128.0)),
        Training(make_model()),
    )
    graph(X)
    other(X)
    assert graph.mezzo_step.scale == 128.0
    for scaled, plain in zip(graph.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(scaled, plain, rtol=1e-3, atol=1e-5)


def test_a_scheduler_advances_with_every_step():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = Training(
        model, optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    )
    graph(X)
    graph(X)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_one_graph_steps_two_optimizers():
    model, head = make_model(), nn.Linear(2, 1)

    class Both(Graph):
        def __init__(self):
            super().__init__()
            self.model, self.head = model, head
            for module in (model, head):
                self.add_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
            self.config.enable_amp()

        def build(self, x):
            loss = self.head(self.model(x)).float().square().mean()
            loss.backward()
            return loss

    before = [parameter.detach().clone() for parameter in (*model.parameters(), *head.parameters())]
    Both()(X)
    assert all(
        not torch.equal(one, old)
        for one, old in zip((*model.parameters(), *head.parameters()), before, strict=True)
    )


def test_graphs_can_share_an_undecorated_model_and_optimizer():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (
        Training(model, optimizer, dtype=torch.bfloat16),
        Training(model, optimizer, scaler=amp.GradScaler()),
    )
    evaluation = Evaluation(model, dtype=torch.bfloat16)
    for _ in range(2):
        first(X)
        second(X)
        evaluation(X)
    assert (set(first.records), set(second.records)) == ({torch.bfloat16}, {torch.float16})
    assert model(X).dtype is torch.float32


@pytest.mark.parametrize(
    ("kwargs", "dtype"),
    [({"mode": True}, torch.float16), ({}, torch.float32)],
    ids=["amp", "plain"],
)
def test_a_graph_without_an_optimizer_evaluates(kwargs, dtype):
    model = nn.Sequential(make_model(), nn.Dropout(0.5))
    graph = Evaluation(model, **kwargs)
    out = graph(X)
    assert graph.records == [(dtype, False, False)]
    assert model.training
    assert out.dtype is torch.float32
    assert torch.allclose(out, model.eval()(X), atol=1e-2)
    assert (graph.training, graph.is_compiled) == (False, True)


def test_a_graph_without_parameters_runs():
    class Product(Graph):
        def __init__(self):
            super().__init__()
            self.config.enable_amp(True)

        def build(self, x):
            product = x @ x.T
            return product, product.dtype is torch.float16

    out, half = Product()(X)
    assert (out.dtype, half) == (torch.float32, True)


def test_a_saved_graph_resumes_bit_for_bit():
    uninterrupted = Training(
        make_model(), scaler=amp.GradScaler(init_scale=64.0, growth_interval=3)
    )
    halfway = Training(make_model(), scaler=amp.GradScaler(init_scale=64.0, growth_interval=3))
    for graph in (uninterrupted, halfway):
        graph(X)
        graph(X)
    resumed = Training(make_model(), scaler=amp.GradScaler())
    resumed.load_state_dict(halfway.state_dict())
    uninterrupted(X)
    resumed(X)
    assert resumed.mezzo_step.scale == uninterrupted.mezzo_step.scale == 128.0
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            uninterrupted.model.parameters(), resumed.model.parameters(), strict=True
        )
    )


def test_a_state_with_other_parts_needs_strict_false():
    graph, evaluation = Training(make_model()), Evaluation(make_model())
    with pytest.raises(
        RuntimeError, match=r"\['model'\], the graph has \['model', 'optimizer.0'\]"
    ):
        graph.load_state_dict(evaluation.state_dict())
    evaluation.load_state_dict(graph.state_dict(), strict=False)


def test_names_are_numbered_by_class():
    first, second = Evaluation(make_model()), Evaluation(make_model())
    assert first.name.rpartition("_")[0] == "Evaluation"
    assert int(second.name.rpartition("_")[2]) == int(first.name.rpartition("_")[2]) + 1


def test_a_graph_without_build_raises_as_in_oneflow():
    with pytest.raises(
        NotImplementedError,
        match=r"nn.Graph.build\(\) method must be overridden when subclassing the nn.Graph",
    ):
        Graph()(X)


def test_invalid_optimizers_schedulers_and_scalers_raise_as_in_oneflow():
    model = make_model()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    graph = Evaluation(model)
    with pytest.raises(AssertionError, match="must be an instance of Optimizer, got Linear"):
        graph.add_optimizer(nn.Linear(1, 1))
    with pytest.raises(AssertionError, match="must be the same optimizer"):
        graph.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(AssertionError, match="must be an LRScheduler, got float"):
        graph.add_optimizer(optimizer, lr_sch=0.1)
    groups = [{"params": [nn.Parameter(torch.ones(1))], "clip_grad_max_norm": 1.0}]
    with pytest.raises(ValueError, match=r"Leave it out, and use clip_norm= of mezzo.TrainStep"):
        graph.add_optimizer(torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(AssertionError, match=r"amp.StaticGradScaler, got GradScaler"):
        graph.set_grad_scaler(torch.amp.GradScaler("cpu"))


def test_changes_after_the_first_call_raise():
    graph = Evaluation(make_model())
    graph(X)
    model = make_model()
    for late in (
        lambda: graph.set_grad_scaler(amp.GradScaler()),
        lambda: graph.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: graph.config.enable_amp(True),
    ):
        with pytest.raises(RuntimeError, match="after the graph's first call"):
            late()


def test_modules_need_super_init_first():
    class Early(Graph):
        def __init__(self):
            self.model = make_model()

    with pytest.raises(AttributeError, match=r"before super\(\).__init__\(\) was called"):
        Early()


def test_an_optimizer_without_modules_raises_with_a_remedy():
    model = make_model()

    class Hidden(Graph):
        def __init__(self):
            super().__init__()
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def build(self, x):
            return model(x)

    with pytest.raises(ValueError, match="Set the modules as attributes"):
        Hidden()(X)


# -- configuration ---------------------------------------------------------------------------------


GRAPH_END_OPS = {"cross_entropy", "nll_loss", "log_softmax", "mean", "sum"}


@pytest.mark.parametrize(
    ("kwargs", "policy"),
    [
        ({}, Policy("O1", "float16", preset="oneflow", full=GRAPH_END_OPS)),
        (
            {"mode": True, "dtype": torch.bfloat16},
            Policy("O1", "bfloat16", preset="oneflow", full=GRAPH_END_OPS),
        ),
        ({"mode": False}, Policy("O0")),
    ],
    ids=["plain", "bfloat16", "off"],
)
def test_enable_amp_defines_the_policy(kwargs, policy):
    config = GraphConfig()
    assert config.policy() == Policy("O0")
    config.enable_amp(**kwargs)
    assert config.policy() == policy


@pytest.mark.parametrize("mode", [1, "yes", None], ids=repr)
def test_a_mode_other_than_bool_raises_as_in_oneflow(mode):
    with pytest.raises(AssertionError, match="takes True or False"):
        GraphConfig().enable_amp(mode)


def test_other_dtypes_raise_as_in_oneflow():
    with pytest.raises(AssertionError, match=r"takes float16 or bfloat16, got torch.float32"):
        GraphConfig().enable_amp(True, dtype=torch.float32)


def test_compiler_hints_are_accepted_and_other_settings_raise():
    GraphConfig().allow_fuse_model_update_ops(True)
    GraphConfig().enable_straighten_algorithm("MemoryFirst")
    with pytest.raises(AttributeError, match=r"Use accumulate= of mezzo.TrainStep"):
        GraphConfig().set_gradient_accumulation_steps(4)
    with pytest.raises(AttributeError, match=r"not support 'enable_apm'. Available: enable_amp"):
        GraphConfig().enable_apm(True)


# -- printing --------------------------------------------------------------------------------------


def printed_graph():
    return Training(nn.Linear(4, 2), scaler=amp.GradScaler(init_scale=2**12))


def test_a_printed_graph_lists_settings_and_modules_and_after_a_call_inputs_and_outputs():
    graph = printed_graph()
    before = repr(graph)
    assert before.startswith(f"(GRAPH:{graph.name}:Training): (")
    for line in (
        "(CONFIG:config:GraphConfig(amp=float16), training=True)",
        "(OPTIMIZER:SGD)",
        "(SCALER:GradScaler(init_scale=4096",
        "(MODULE:model:Linear(in_features=4, out_features=2, bias=True))",
    ):
        assert line in before
    assert "INPUT" not in before
    graph(torch.ones(8, 4))
    assert "(INPUT:tensor(..., device='cpu', size=(8, 4), dtype=torch.float32))" in repr(graph)
    assert "(OUTPUT:tensor(..., device='cpu', size=(), dtype=torch.float32))" in repr(graph)


def test_debug_prints_the_stages_of_the_first_call_and_minus_one_disables_it(capsys):
    graph = printed_graph()
    graph.debug(1)
    graph(torch.ones(8, 4))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(") ", 1)[1] for line in lines] == [
        "start building graph.",
        "(MODULE:model:Linear()) is part of the graph.",
        "end building graph, first call done: training in float16.",
    ]
    quiet = printed_graph()
    quiet.debug()
    quiet.debug(-1)
    quiet(torch.ones(8, 4))
    other_rank = printed_graph()
    other_rank.debug(ranks=[1])
    other_rank(torch.ones(8, 4))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("level", "ranks"), [(4, None), ("1", None), (0, "all")])
def test_debug_rejects_other_levels_and_ranks(level, ranks):
    with pytest.raises((AssertionError, ValueError), match=r"takes -1|int or List"):
        printed_graph().debug(level, ranks=ranks)


def test_a_method_that_only_oneflow_has_names_what_to_use():
    with pytest.raises(AttributeError, match=r"no runtime_state_dict\(\) here. Use state_dict"):
        printed_graph().runtime_state_dict()
    assert not hasattr(printed_graph(), "modle")


# -- runners ---------------------------------------------------------------------------------------


HALF = Policy("O1", "bfloat16", preset="oneflow")


def test_outputs_are_float32_unless_amp_is_disabled():
    half = torch.ones(1, dtype=torch.float16)
    assert BuildModule(lambda: {"out": [half, 3]}, HALF, {})()["out"][0].dtype is torch.float32
    assert BuildModule(lambda: half, Policy("O0"), {})() is half


def test_a_training_step_leaves_modules_and_optimizers_undecorated():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = make_runner(
        TrainingSpec(lambda x: model(x).sum(), HALF, (optimizer,), (), None), {"model": model}
    )
    assert isinstance(runner, FunctionStep)
    assert decoration_of(model) is decoration_of(optimizer) is None


def test_an_evaluation_of_modules_is_an_eval_step():
    model = nn.Linear(2, 1)
    runner = make_runner(EvaluationSpec(lambda x: model(x), HALF), {"model": model})
    assert isinstance(runner, EvalStep)
    assert runner(torch.ones(3, 2)).shape == (3, 1)


def test_an_optimizer_without_a_module_is_rejected():
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no module with parameters"):
        make_runner(TrainingSpec(torch.sum, HALF, (optimizer,), (), None), {})


def test_an_evaluation_passes_dictionaries_to_build_whole():
    model = nn.Linear(2, 1)
    runner = make_runner(EvaluationSpec(lambda batch: model(batch["x"]), HALF), {"model": model})
    assert runner({"x": torch.ones(3, 2)}).shape == (3, 1)
