"""`mezzo.op_stats`: ops by module and dtype, and the casts around them."""

import json
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.observing.op_stats_table import OpRow


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.rest = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x):
        return self.rest(self.first(x).relu())


class LlamaLayer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 32, bias=False) for _ in range(2))
        self.down = nn.Linear(32, width, bias=False)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (
            one(h).unflatten(-1, (2, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def llama():
    return nn.Sequential(nn.Embedding(32, 16), LlamaLayer(), LlamaLayer(), nn.Linear(16, 32))


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return (x + self.norm(self.conv(x))).relu()


def resnet():
    blocks = [ResidualBlock(), ResidualBlock()]
    stem = nn.Conv2d(3, 4, 3, padding=1)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def train(model, x=None):
    x = torch.ones(3, 4) if x is None else x
    with mezzo.autocast("cpu", dtype="bfloat16"):
        loss = model(x).float().square().mean()
    loss.backward()


def by_module(ops, *names):
    found = Counter()
    for row in ops.rows:
        if row.op in names:
            found[row.module, row.op, row.dtype] += row.calls
    return dict(found)


# -- what is counted -------------------------------------------------------------------------------


def test_ops_count_under_their_module_in_forward_and_backward():
    model = Network()
    with mezzo.op_stats(model) as ops:
        train(model)
    assert by_module(ops, "addmm", "mm", "relu", "threshold_backward") == {
        ("first", "addmm", "bfloat16"): 1,
        ("first", "mm", "bfloat16"): 1,
        ("", "relu", "bfloat16"): 1,
        ("", "threshold_backward", "bfloat16"): 1,
        ("rest.1", "addmm", "bfloat16"): 1,
        ("rest.1", "mm", "bfloat16"): 2,
    }


def test_accumulated_gradients_count_under_the_owner_of_the_parameter():
    model = Network()
    train(model)
    with mezzo.op_stats(model) as ops:
        train(model)
    assert by_module(ops, "add_") == {
        ("first", "add_", "float32"): 2,
        ("rest.0", "add_", "float32"): 2,
        ("rest.1", "add_", "float32"): 2,
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_modules_keep_their_paths(reentrant):
    model = Network()
    x = torch.ones(3, 4, requires_grad=True)
    with mezzo.op_stats(model) as ops:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    counts = by_module(ops, "addmm", "mm")
    assert counts["first", "addmm", "float32"] == 2
    # torch stops the other recomputation when it has all inputs of the backward ops.
    assert counts["rest.1", "addmm", "float32"] == (2 if reentrant else 1)
    assert counts["first", "mm", "float32"] == counts["rest.1", "mm", "float32"] == 2


def test_casts_count_with_the_op_before_and_the_op_after():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    with mezzo.op_stats(model) as ops, mezzo.autocast("cpu", full={"layer_norm"}, dtype="bfloat16"):
        model(torch.ones(3, 4))
    rows = {row.op: row for row in ops.rows if row.op != "_to_copy"}
    read_and_written = {"addmm": 6 * (12 + 32 + 8) + 6 * 24, "native_layer_norm": 6 * 24}
    assert (rows["addmm"].casts_in, rows["addmm"].casts_out) == (3, 1)
    assert (rows["native_layer_norm"].casts_in, rows["native_layer_norm"].casts_out) == (1, 0)
    assert {op: rows[op].cast_bytes for op in read_and_written} == read_and_written


def test_a_cast_that_two_ops_read_is_counted_once():
    x, weight = torch.ones(2, 4), torch.ones(4, 4)
    with mezzo.op_stats() as ops:
        half = x.bfloat16()
        half @ weight.bfloat16()
        half + 1
    assert {row.op: row.casts_in for row in ops.rows} == {"_to_copy": 0, "mm": 2, "add": 0}


def test_casts_of_the_users_code_differ_from_those_of_autocast():
    model = Network()
    with mezzo.op_stats(model) as ops:
        train(model)
    casts = [row for row in ops.rows if row.op == "_to_copy"]
    # `.float()` of the output and its backward.
    assert sum(row.casts - row.inserted for row in casts) == 2
    assert sum(row.inserted for row in casts) == 9


def test_copies_and_moves_are_no_casts():
    with mezzo.op_stats() as ops:
        torch.zeros(3).copy_(torch.ones(3))
        torch.zeros(3).copy_(torch.ones(3, dtype=torch.float64))
        torch.arange(3).float()
    rows = {row.op: (row.calls, row.casts, row.cast_bytes) for row in ops.rows}
    assert rows["copy_"] == (2, 1, 3 * (8 + 4))
    assert rows["_to_copy"] == (1, 0, 0)


def test_casts_of_a_policy_with_rules_of_its_own_are_inserted():
    x = torch.ones(4)
    with mezzo.op_stats() as ops, mezzo.autocast("cpu", half={"add"}, dtype="bfloat16"):
        x + x
    assert [(row.op, row.calls, row.inserted) for row in ops.rows] == [
        ("_to_copy", 2, 2),
        ("add", 1, 0),
    ]


def test_ops_with_integer_results_count_under_their_dtype():
    with mezzo.op_stats() as ops:
        torch.ones(3).argmax()
        torch.empty(3)
        torch.ops.aten._unsafe_view(torch.empty(4), [2, 2])
    assert ops.by_dtype() == {"float32": 1, "int64": 1}


def test_time_is_measured_on_request():
    model = Network()
    with mezzo.op_stats(model, time=True) as ops:
        train(model)
    assert all(row.microseconds > 0 for row in ops.rows)
    with mezzo.op_stats(model) as ops:
        train(model)
    assert all(row.microseconds is None for row in ops.rows)


# -- how code runs ---------------------------------------------------------------------------------


def test_a_training_step_counts_as_a_loop_by_hand():
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mezzo.TrainStep(model, F.mse_loss, optimizer, policy="O1", dtype="bfloat16")
    step(torch.ones(3, 4), torch.ones(3, 2))
    with mezzo.op_stats(step) as ops:
        step(torch.ones(3, 4), torch.ones(3, 2))
    assert by_module(ops, "addmm") == {
        ("first", "addmm", "bfloat16"): 1,
        ("rest.1", "addmm", "bfloat16"): 1,
    }
    assert ops.of("mse_loss") == {"float32": 1}


def test_a_compiled_model_counts_the_ops_that_it_is_written_with():
    torch._dynamo.reset()
    model = Network()
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with mezzo.op_stats(compiled) as ops:
        train(compiled)
    with mezzo.op_stats(model) as expected:
        train(model)
    assert ops.rows == expected.rows
    train(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_converted_model_counts_under_the_modules_that_it_was_made_of():
    converted = mezzo.convert(Network(), (torch.ones(1, 4),), dtype="bfloat16")
    for call in (lambda x: converted(x), lambda x: converted(x=x)):
        with mezzo.op_stats(converted) as ops:
            call(torch.ones(1, 4))
        assert by_module(ops, "addmm", "native_layer_norm") == {
            ("first", "addmm", "bfloat16"): 1,
            ("rest.0", "native_layer_norm", "float32"): 1,
            ("rest.1", "addmm", "bfloat16"): 1,
        }
        assert ops.of("_to_copy") == {"bfloat16": 2, "float32": 2}


def test_several_models_count_under_their_index():
    models = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]
    with mezzo.op_stats(models) as ops:
        models[1](models[0](torch.ones(1, 2)))
    assert [row.module for row in ops.rows if row.op == "addmm"] == ["0", "1.0"]


# -- against the profiler --------------------------------------------------------------------------

PROFILED = {
    "aten::addmm": "addmm",
    "aten::mm": "mm",
    "aten::bmm": "bmm",
    "aten::convolution_overrideable": "convolution",
    "aten::convolution_backward": "convolution_backward",
    "aten::native_layer_norm": "native_layer_norm",
    "aten::native_batch_norm": "native_batch_norm",
    "aten::silu": "silu",
    "aten::silu_backward": "silu_backward",
    "aten::embedding_dense_backward": "embedding_dense_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu": (
        "_scaled_dot_product_flash_attention_for_cpu"
    ),
}
DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16"}


def profiled(path, run):
    """Count the ops that torch's profiler recorded, by the dtype of their first float input."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        run()
    recorded.export_chrome_trace(str(path))
    counts = Counter()
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("name") in PROFILED:
            types = event["args"]["Input type"]
            dtype = next((DTYPES[one] for one in types if one in DTYPES), None)
            counts[PROFILED[event["name"]], dtype] += 1
    return counts


@pytest.mark.parametrize("make", [llama, resnet])
def test_counts_are_those_of_the_profiler(make, tmp_path):
    model = make()
    x = torch.arange(16).reshape(2, 8) if make is llama else torch.ones(2, 3, 8, 8)
    expected = profiled(tmp_path / "trace.json", lambda: train(model, x))
    model.zero_grad()
    with mezzo.op_stats(model) as ops:
        train(model, x)
    found = Counter()
    for row in ops.rows:
        if row.op in PROFILED.values():
            found[row.op, row.dtype] += row.calls
    seen = {key[0] for key in expected}
    assert {key: count for key, count in found.items() if key[0] in seen} == dict(expected)
    assert len(seen) >= 3
    products = [row for row in ops.rows if row.op in {"mm", "addmm", "convolution"}]
    assert {row.dtype for row in products} == {"bfloat16"}


# -- the table -------------------------------------------------------------------------------------


def test_the_table_sums_over_modules_and_ends_with_totals():
    model = Network()
    with mezzo.op_stats(model) as ops:
        train(model)
    lines = str(ops).splitlines()
    assert lines[0].split("  ")[0] == "op"
    assert lines[2].startswith("_to_copy")
    assert [line for line in lines if line.startswith("addmm ")] == [
        "addmm                       bfloat16      2         5          1   456 bytes"
    ]
    assert lines[-3:] == [
        f"total: {sum(row.calls for row in ops.rows)} calls",
        "in 16 bits: 5 of 5 matrix products, 11 of 19 floating-point calls without casts",
        "casts: 11, of them 9 inserted by autocast; 840 bytes moved",
    ]
    assert max(map(len, lines)) < 100


def test_the_table_has_rows_for_modules_to_a_depth():
    model = Network()
    with mezzo.op_stats(model) as ops:
        model(torch.ones(1, 4))
    rows = [line.split()[:2] for line in ops.table(depth=1).split("\n\n")[0].splitlines()[2:]]
    assert rows == [
        ["(model)", "ones"],
        ["(model)", "relu"],
        ["first", "addmm"],
        ["rest", "addmm"],
        ["rest", "native_layer_norm"],
    ]
    assert "rest.0" in ops.table(depth=2)


def test_without_ops_the_table_states_that():
    with mezzo.op_stats() as ops:
        pass
    assert str(ops) == "No ops ran."
    assert ops.rows == ()


# -- start and stop --------------------------------------------------------------------------------


def hooks(model):
    return [
        (
            len(one._forward_hooks),
            len(one._forward_pre_hooks),
            len(one._forward_hooks_always_called),
        )
        for one in model.modules()
    ]


def test_no_hook_and_no_count_is_left_after_an_exception():
    model = Network()
    before = hooks(model)
    with pytest.raises(RuntimeError, match="shapes"), mezzo.op_stats(model) as ops:
        model(torch.ones(3, 5))
    assert hooks(model) == before
    counted = ops.rows
    model(torch.ones(3, 4))
    assert ops.rows == counted
    with ops:
        model(torch.ones(3, 4))
    assert by_module(ops, "relu") == {("", "relu", "float32"): 1}


def test_blocks_add_up_and_clear_sets_to_zero():
    model = Network()
    x = torch.ones(3, 4)
    ops = mezzo.op_stats(model)
    for _ in range(2):
        with ops:
            model(x)
    assert ops.of("addmm") == {"float32": 4}
    assert isinstance(ops.rows[0], OpRow)
    ops.clear()
    assert ops.rows == ()


def test_starting_twice_raises():
    ops = mezzo.op_stats()
    with ops, pytest.raises(RuntimeError, match="Call stop"):
        ops.start()
    ops.stop()


def test_counting_changes_neither_results_nor_random_numbers():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4)
    torch.manual_seed(1)
    plain, after = model(x), torch.rand(1)
    torch.manual_seed(1)
    with mezzo.op_stats(model):
        counted = model(x)
    assert torch.equal(plain, counted)
    assert torch.equal(torch.rand(1), after)


def test_an_object_without_modules_is_refused():
    with pytest.raises(mezzo.PolicyError, match="Cannot observe dict"):
        mezzo.op_stats({"a": 1})
