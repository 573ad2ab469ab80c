"""Replays of a batch run what the step ran, and leave the user's tensors as they are."""

from pathlib import Path
from threading import Lock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mezzo

FLOAT16 = {"policy": "O1", "dtype": "float16"}
BFLOAT16 = {"dtype": "bfloat16", "measure": False}


def model_with(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.Linear(16, 4))


def batch():
    torch.manual_seed(1)
    return torch.randn(4, 8), torch.randn(4, 4)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


# -- what runs -------------------------------------------------------------------------------------


def test_in_place_ops_on_integers_run_once():
    seen = []

    def count(h):
        index = torch.zeros(4, dtype=torch.long)
        index += 1
        flags = torch.zeros(4, dtype=torch.bool).logical_xor_(torch.ones(4, dtype=torch.bool))
        seen.append((index.tolist(), flags.tolist()))
        return h[index]

    assert not mezzo.trace_overflow(model_with(Function(count)), batch(), F.mse_loss, **FLOAT16)
    assert seen == [([1] * 4, [True] * 4)]


def test_the_first_result_of_an_op_with_several_is_judged():
    class HalfNorm(nn.Module):
        def forward(self, h):
            # Its mean and its deviation, the other results, are finite.
            return torch.native_layer_norm(
                h.half(), (16,), torch.full((16,), 6e4).half(), None, 1e-5
            )[0].float()

    found = mezzo.trace_overflow(model_with(HalfNorm()), batch(), F.mse_loss, **FLOAT16)
    assert (found.direction, found.op) == ("forward", "layer_norm")
    assert found.reason.startswith("left the range of float16")


def test_statistics_of_a_norm_that_are_zero_but_for_rounding_are_no_finding():
    def balanced(h):
        return torch.cat([h + 100.0, 0.01 - h - 100.0], -1)

    model = nn.Sequential(nn.Linear(8, 8), Function(balanced), nn.LayerNorm(16), nn.Linear(16, 4))
    found = mezzo.trace_overflow(model, batch(), F.mse_loss, policy="O2", dtype="float16")
    assert not found, str(found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_replayed(reentrant):
    def root_at_zero(h):
        return h + (h - h.detach()).abs().sqrt()

    middle = Function(lambda h: checkpoint(root_at_zero, h, use_reentrant=reentrant))
    found = mezzo.trace_overflow(model_with(middle), batch(), F.mse_loss, **FLOAT16)
    assert (found.direction, found.op.lower(), found.precision) == ("backward", "sqrt", False)


def test_code_that_casts_to_float16_and_fails_in_float32_is_traced():
    class Half(nn.Module):
        def forward(self, h):
            squares = h.half() * 1000.0
            return squares * squares @ torch.eye(16).half()

    found = mezzo.trace_overflow(model_with(Half()), batch(), F.mse_loss, **FLOAT16)
    assert (found.op, found.module, found.precision) == ("mul", "1", True)


def test_a_hook_of_a_parameter_is_named_by_its_line():
    model = model_with()
    model[0].weight.register_hook(lambda gradient: gradient / 0.0)
    line = test_a_hook_of_a_parameter_is_named_by_its_line.__code__.co_firstlineno + 2
    found = mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)
    assert (found.direction, found.op, found.module) == ("backward", "div", "0")
    assert found.line == f"test_replay.py:{line}"


def test_infinite_values_that_the_formula_of_a_gradient_leaves_out_are_no_finding():
    # Of 32 points the distances to themselves are zero in float32, and rounding in float64.
    model, x = nn.Linear(16, 16), torch.randn(32, 16)
    assert not mezzo.trace_overflow(model, (x,), lambda h: torch.cdist(h, h).mean(), **FLOAT16)


def test_a_gradient_that_is_multiplied_by_infinity_is_no_mask():
    class Hooked(nn.Module):
        def forward(self, h):
            if h.requires_grad:
                h.register_hook(lambda gradient: gradient * float("inf"))
            return h

    line = Hooked.forward.__code__.co_firstlineno + 2
    found = mezzo.trace_overflow(model_with(Hooked()), batch(), F.mse_loss, **FLOAT16)
    assert (found.direction, found.line) == ("backward", f"test_replay.py:{line}")


def test_what_cannot_be_copied_is_shared():
    model = model_with(nn.Sequential(nn.GELU()))
    model.lock = model[1].lock = Lock()
    model[1][0].names = (name for name in "ab")
    assert not mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)
    assert model.lock is model[1].lock
    assert next(model[1][0].names) == "a"


class KeepsResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.named = [], {}

    def forward(self, h):
        self.heads[:], self.named["h"] = [h * 2], (h + 1,)
        return h


def test_results_that_a_model_keeps_in_lists_and_dictionaries_do_not_hinder():
    model = model_with(KeepsResults())
    model(batch()[0])
    kept = model[1].heads[0]
    assert not mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)
    assert not mezzo.lint(model, policy="O2", sample=batch(), loss_fn=F.mse_loss, **BFLOAT16)
    assert mezzo.advise(model, batch(), F.mse_loss, levels=("O1",), rounds=1, budget=0.1).times
    assert model[1].heads[0] is kept
    assert kept.requires_grad


def test_a_model_that_keeps_results_beside_what_cannot_be_copied_is_traced():
    model = model_with(KeepsResults())
    model[1].lock = Lock()
    model(batch()[0])
    assert not mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)


def test_a_line_of_a_package_whose_name_begins_with_torch_is_named():
    file = Path(torch.__file__).parent.with_name("torchgraph") / "conv.py"
    names = {}
    exec(compile("def propagate(h):\n    return h * 1e4", str(file), "exec"), names)
    model = model_with(Function(names["propagate"]))
    nn.init.constant_(model[0].bias, 100.0)
    found = mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)
    assert (found.op, found.line) == ("mul", "conv.py:2")


@pytest.mark.parametrize("is_buffer", [False, True])
def test_models_with_a_sparse_adjacency_are_traced(is_buffer):
    class Graph(nn.Linear):
        def forward(self, h, adjacency=None):
            h = super().forward(h)
            with torch.autocast("cpu", enabled=False):
                return torch.sparse.mm(self.adjacency if is_buffer else adjacency, h.float())

    model, adjacency = Graph(8, 4), torch.eye(4).to_sparse()
    if is_buffer:
        model.register_buffer("adjacency", adjacency)
    x, y = batch()
    step = mezzo.TrainStep(
        model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), "O2", dtype="float16"
    )
    sample = (x, y) if is_buffer else ((x, adjacency), y)
    assert step(*sample).isfinite()
    assert not mezzo.trace_overflow(step, sample)
    x.mul_(1e6)
    assert mezzo.trace_overflow(step, sample).op == "linear"


# -- what stays ------------------------------------------------------------------------------------


class LearnedTemperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs, y):
        self.calls += 1
        return F.mse_loss(outputs / self.temperature, y)


@pytest.mark.parametrize("tool", ["trace_overflow", "shadow", "record_values"])
@pytest.mark.parametrize("of_step", [True, False])
def test_the_loss_function_keeps_its_gradients_and_buffers(tool, of_step, tmp_path):
    loss = LearnedTemperature()
    gradient = loss.temperature.grad = torch.tensor(3.0)
    path = [tmp_path / "run.jsonl"] if tool == "record_values" else []
    model = model_with()
    if of_step:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments = [mezzo.TrainStep(model, loss, optimizer, "O1", dtype="float16"), batch()]
        getattr(mezzo, tool)(*path, *arguments)
    else:
        getattr(mezzo, tool)(*path, model, batch(), loss, **FLOAT16)
    assert loss.temperature.grad is gradient
    assert float(gradient) == 3.0
    assert float(loss.calls) == 0.0


def test_a_parameter_of_the_loss_function_that_is_not_finite_is_named():
    loss = LearnedTemperature()
    loss.temperature.data.fill_(float("nan"))
    found = mezzo.trace_overflow(model_with(), batch(), loss, **FLOAT16)
    assert (found.direction, found.op) == ("parameters", "loss_fn.temperature")


@pytest.mark.parametrize("has_gradient", [True, False])
def test_tensors_that_only_the_loss_refers_to_keep_their_gradients(has_gradient):
    model, teacher = model_with(), model_with()
    kept = list(model.parameters())
    tensors = [*kept, *teacher.parameters()]
    for one in tensors:
        one.grad = torch.full_like(one, 3.0) if has_gradient else None
    before = [one.grad for one in tensors]
    x, y = batch()

    def loss(outputs, y):
        return F.mse_loss(outputs, teacher(x) + y) + sum(one.square().sum() for one in kept)

    mezzo.trace_overflow(model, (x, y), loss, **FLOAT16)
    assert all(one.grad is old for one, old in zip(tensors, before, strict=True))
    assert not has_gradient or all(bool((one == 3.0).all()) for one in before)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d, nn.SyncBatchNorm])
def test_statistics_that_the_batch_itself_made_nan_are_not_blamed(norm):
    shape = nn.Unflatten(1, (16, 1)) if norm is not nn.InstanceNorm1d else nn.Unflatten(1, (2, 8))
    features = 2 if norm is nn.InstanceNorm1d else 16
    options = {"track_running_stats": True}
    model = model_with(shape, norm(features, **options), nn.Flatten())
    x, y = batch()
    x[1, 2] = float("inf")
    if norm is not nn.SyncBatchNorm:
        model(x)
    else:
        model[2].running_mean.fill_(float("nan"))
    found = mezzo.trace_overflow(model, (x, y), F.mse_loss, **FLOAT16)
    assert (found.direction, found.op) == ("data", "argument 0")


def test_statistics_that_evaluation_reads_are_blamed():
    model = model_with(nn.BatchNorm1d(16)).eval()
    model[1].running_mean[0] = float("nan")
    found = mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)
    assert (found.direction, found.op) == ("parameters", "1.running_mean")


# -- parameters ------------------------------------------------------------------------------------


def test_a_loss_that_is_subtracted_as_a_number_has_lost_no_digits():
    def surrogate(output, target):
        # The value of one loss with the gradient of another, as in stochastic inference.
        loss = F.mse_loss(output, target)
        return loss.detach() + (loss * 300.0 - (loss * 300.0).item())

    assert not mezzo.trace_overflow(model_with(), batch(), surrogate, **FLOAT16)


def test_a_parameter_that_the_model_writes_in_16_bits_is_named_with_its_cure():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Embedding(2, 16).requires_grad_(False)

        def forward(self, h):
            quantized = h + self.codes.weight[0]
            self.codes.weight.data.copy_(torch.full((2, 16), 1e6))
            return quantized

    def trained(**options):
        model = model_with(Codebook())
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
        step = mezzo.TrainStep(model, F.mse_loss, optimizer, "O2", dtype="float16", **options)
        step(*batch())
        return step

    found = mezzo.trace_overflow(trained(), batch())
    assert (found.op, found.cure) == ("1.codes.weight", "keep_full={*mezzo.NORMS, '1.codes'}")
    assert "(not verified: make or load the model again)" in str(found)
    kept = trained(keep_full={*mezzo.NORMS, "1.codes"})
    assert mezzo.trace_overflow(kept, batch()).op != "1.codes.weight"


def test_a_weight_that_leaves_the_range_where_autocast_casts_it_is_named():
    model = model_with()
    model[0].weight.data.mul_(1e6)
    found = mezzo.trace_overflow(model, batch(), F.mse_loss, **FLOAT16)
    assert (found.direction, found.op, found.precision) == ("parameters", "0.weight", True)
    assert "is beyond the range of float16: the run may have diverged" in str(found)
    assert found.verified
