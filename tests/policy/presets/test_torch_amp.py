"""torch's own lists, and mezzo's for the levels that torch does not have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import support.autocast_rules

from mezzo.policy.op_names import canonical
from mezzo.policy.presets.torch_amp import (
    AUTOCAST_KEYS,
    DEVICES,
    is_listed,
    level_lists,
    torch_entries,
)
from mezzo.policy.registry import registry
from mezzo.policy.types import Level, Rule

EVERY = [(level, device) for level in Level for device in ("cpu", "cuda", "xpu", "npu")]


CUDNN = {"cudnn_rnn"}
"""An internal op of cuDNN's layers, for which a build with CUDA has an autocast kernel."""


@pytest.fixture(scope="module")
def torch_casts():
    """Return the casts of torch's autocast for each op, in a process without mezzo."""
    program = Path(support.autocast_rules.__file__)
    keys = json.dumps({device: AUTOCAST_KEYS[device] for device in DEVICES})
    return json.loads(
        subprocess.run(
            [sys.executable, program, keys], check=True, capture_output=True, text=True
        ).stdout
    )


@pytest.mark.parametrize("device", DEVICES)
def test_the_lists_match_the_casts_of_every_autocast_kernel_of_this_torch(device, torch_casts):
    from_kernels: dict[str, set[str]] = {}
    for overload, rule in torch_casts[device].items():
        from_kernels.setdefault(canonical(overload.partition(".")[0]), set()).add(rule)
    ours = {name: {entry.rule.value} for name, entry in torch_entries(device).items()}
    assert ours == {name: rules for name, rules in from_kernels.items() if name not in CUDNN}


def test_the_lists_follow_the_version_of_torch():
    versions = [f"2.{minor}.0" for minor in range(11, 16)]
    named = {
        name: [version for version in versions if is_listed(name, version)]
        for name in ("rms_norm", "linalg_matrix_sqrth", "qr", "cholesky", "linear")
    }
    assert named == {
        "rms_norm": versions[1:],
        "linalg_matrix_sqrth": versions[3:],
        "qr": versions[:3],
        "cholesky": versions[:3],
        "linear": versions,
    }


@pytest.mark.parametrize("device", DEVICES)
def test_no_op_is_in_two_groups(device):
    named = [name for _, _, names in DEVICES[device] for name in names.split()]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(("level", "device"), EVERY)
def test_every_entry_names_an_op_and_has_a_reason(level, device):
    lists = level_lists(level, device)
    assert (lists.entries.keys() | lists.exempt_args.keys()) - registry().names == set()
    assert all(entry.reason for entry in (*lists.entries.values(), lists.default_rule))


@pytest.mark.parametrize(
    ("op", "cuda", "cpu"),
    [
        ("softmax", Rule.FULL, None),
        ("layer_norm", Rule.FULL, None),
        ("exp", Rule.FULL, None),
        ("sum", Rule.FULL, None),
        ("linear", Rule.HALF, Rule.HALF),
        ("matmul", Rule.HALF, Rule.HALF),
        ("conv2d", Rule.HALF, Rule.HALF),
        ("scaled_dot_product_attention", Rule.HALF, Rule.HALF),
        ("einsum", Rule.HALF, None),
        ("lstm_cell", Rule.HALF, None),
        ("mse_loss", Rule.FULL, Rule.FULL),
        ("cross_entropy", None, Rule.FULL),
        ("cat", None, Rule.PROMOTE),
        ("addcmul", Rule.PROMOTE, None),
        ("grid_sample", Rule.PROMOTE, Rule.FULL),
        ("linalg_qr", None, Rule.FULL),
        ("binary_cross_entropy", Rule.REFUSE, Rule.FULL),
        ("relu", None, None),
        ("add", None, None),
    ],
)
def test_the_lists_differ_between_cuda_and_cpu(op, cuda, cpu):
    for device, rule in (("cuda", cuda), ("cpu", cpu)):
        entry = level_lists(Level.O1, device).entries.get(op)
        assert (entry and entry.rule) is rule


def test_the_reason_of_a_refused_op_names_the_replacement():
    assert (
        "use binary_cross_entropy_with_logits"
        in torch_entries("cuda")["binary_cross_entropy"].reason
    )


@pytest.mark.parametrize("device", ["xpu", "mps", "npu", "privateuseone"])
def test_an_accelerator_without_a_list_uses_the_cuda_list(device):
    assert torch_entries(device) == torch_entries("cuda")


def test_od_runs_ops_in_float32_unless_they_are_half():
    lists = level_lists(Level.OD, "cuda")
    assert lists.default_rule.rule is Rule.FULL
    assert {entry.rule for entry in lists.entries.values()} == {Rule.HALF, Rule.REFUSE}
    assert lists.entries.keys() >= {"linear", "conv2d", "binary_cross_entropy"}


def test_o2_has_the_lists_of_o1():
    for device in ("cpu", "cuda"):
        assert level_lists(Level.O2, device) == level_lists(Level.O1, device)


def test_o3_is_16_bit_except_views_and_ops_without_a_kernel():
    lists = level_lists(Level.O3, "cpu")
    assert lists.default_rule.rule is Rule.HALF
    assert lists.entries["view"].rule is Rule.KEEP
    assert lists.entries["linalg_qr"].rule is Rule.FULL
    assert lists.exempt_args["batch_norm"] == ("weight", "bias", "running_mean", "running_var")


@pytest.mark.parametrize("level", [Level.O2, Level.O3])
def test_no_level_casts_views(level):
    def is_view(overload):
        return any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in overload._schema.returns
        )

    views = {
        op.name
        for op in registry()
        if any(is_view(overload) for overload in registry().overloads(op.name))
    }
    assert {
        name
        for name in views
        if level_lists(level, "cuda")
        .entries.get(name, level_lists(level, "cuda").default_rule)
        .rule
        is not Rule.KEEP
    } == set()


def test_o2_keeps_delicate_ops_in_float32_and_o3_does_not():
    for op in ("softmax", "layer_norm", "exp", "sum", "nll_loss", "cosine_similarity"):
        assert level_lists(Level.O2, "cuda").entries[op].rule is Rule.FULL
        assert op not in level_lists(Level.O3, "cuda").entries


def test_o0_lists_nothing():
    assert (
        level_lists(Level.O0, "cuda").entries,
        level_lists(Level.O0, "cuda").default_rule.rule,
    ) == ({}, Rule.KEEP)


def test_lists_are_cached():
    assert level_lists(Level.O1, "cuda") is level_lists(Level.O1, "cuda")
    assert torch_entries("cpu") is torch_entries("cpu")
