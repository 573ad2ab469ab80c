"""`mezzo.estimate` against the tensors and collectives of two processes, with DDP and FSDP2."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mezzo
from mezzo.optim.binding import optimizer_binding

RANKS = 2
COLLECTIVES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
}
HALF = torch.bfloat16


class Network(nn.Module):
    """Odd sizes, so that shards are padded; norms, a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 11)
        self.layers = nn.ModuleList(nn.Linear(11, 11) for _ in range(3))
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.norm = nn.LayerNorm(11)
        self.head = nn.Linear(11, 5)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, tokens):
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(self.norm(self.frozen(h)) + 0 * self.shift.sum().to(h.dtype))


class Recorder(TorchDispatchMode):
    """Records the collectives of a step, and the bytes of their larger buffer."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = COLLECTIVES.get(function._schema.name)
        if name is not None:
            sizes = [one.nbytes for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            # Of a gather the output, and of a reduce-scatter the input.
            self.calls.append((name, max(sizes)))
        return function(*args, **(kwargs or {}))


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_step(model, optimizer, region=None):
    """Run a step; return the calls in forward and in backward, and the bytes of all tensors."""
    copies = {}

    def keep_copy(tensor):
        # No activation has as many elements as a weight.
        if tensor.dtype is HALF and tensor.numel() in (11 * 11, 11 * 5):
            copies[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep_copy, lambda tensor: tensor)
    with Recorder() as forward, saved, region or nullcontext():
        loss = model(torch.arange(12)).float().square().mean()
    with Recorder() as backward:
        loss.backward()
    optimizer.step()
    states = [one for state in optimizer.state.values() for one in state.items()]
    sizes = [(name, local(value).nbytes) for name, value in states if torch.is_tensor(value)]
    binding = optimizer_binding(optimizer)
    masters = () if binding is None else binding.masters
    companions = [get(one) for one in masters for get in (masters.companion_tensor, masters.sample)]
    parameters = list(model.parameters())
    return {
        "forward": forward.calls,
        "backward": backward.calls,
        "weight_copies": sum(one.nbytes for one in copies.values()),
        "parameters": sum(local(one).nbytes for one in parameters),
        "gradients": sum(local(one.grad).nbytes for one in parameters if one.grad is not None),
        "buffers": sum(one.nbytes for one in model.buffers()),
        "masters": sum(one.nbytes for one in companions if one is not None),
        "optimizer_states": sum(size for name, size in sizes if not name.startswith("mezzo_")),
    }


def run_ddp(options, **ddp_options):
    model = Network()
    optimizer = torch.optim.AdamW(trained(model))
    mezzo.decorate(model, optimizer, **options)
    return run_step(DistributedDataParallel(model, **ddp_options), optimizer)


def sharded(param_dtype=None, reduce_dtype=None, mesh=None, reshard=None, *, norm=False):
    """Shard a model as O2 does, if `norm` with the norm in a group of its own, in float32."""
    model = Network()
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    if norm:
        fully_shard(model.norm, mp_policy=MixedPrecisionPolicy(None, reduce_dtype), **options)
        model.norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        model.norm.register_forward_hook(lambda *args: args[2].to(param_dtype))
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def run_fsdp(region=None, **options):
    model = sharded(**options)
    groups = mezzo.estimate(model, "O2", ranks=RANKS)
    found = run_step(model, torch.optim.AdamW(trained(model)), region)
    return found | {"estimated": {name: getattr(groups, name) for name in WIRE}}


def run_decorated(options):
    """Run a model that was sharded without a precision, which `decorate` then sets."""
    model = sharded()
    optimizer = torch.optim.AdamW(trained(model))
    mezzo.decorate(model, optimizer, dtype="bfloat16", **options)
    return run_step(model, optimizer)


WIRE = ("all_gather_forward", "all_gather_backward", "reduce_scatter", "all_reduce", "broadcast")


def measure(rank):
    """Run every scenario; return what was measured by its name."""
    half = {"param_dtype": HALF, "reduce_dtype": torch.float32}
    replicated = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    return {
        "ddp O0": run_ddp({"policy": "O0"}),
        "ddp O1": run_ddp({"policy": "O1", "dtype": "bfloat16"}),
        "ddp O2": run_ddp({"policy": "O2", "dtype": "bfloat16", "master": "split"}),
        "fsdp O0": run_fsdp(),
        "fsdp O1": run_fsdp(torch.autocast("cpu", HALF)),
        "fsdp O2": run_fsdp(**half),
        "fsdp O2 with a norm of its own": run_fsdp(**half, norm=True),
        "fsdp O2 reduced in 16 bits": run_fsdp(param_dtype=HALF, reduce_dtype=HALF),
        "fsdp O2 resharded": run_fsdp(**half, reshard=True),
        "fsdp O2 kept": run_fsdp(**half, reshard=False),
        "hsdp O2": run_fsdp(**half, mesh=replicated),
        **{name: run_decorated(options) for name, options in DECORATED.items()},
    }


DECORATED = {
    "decorated O1": {"policy": "O1"},
    "decorated O2": {"policy": "O2"},
    "decorated O2 reduced in 16 bits": {"policy": "O2", "grad_dtype": "bfloat16"},
    "decorated O2 split": {"policy": "O2", "master": "split"},
    "decorated O2 kahan": {"policy": "O2", "master": "kahan"},
    "decorated O2 stochastic": {"policy": "O2", "master": "stochastic"},
}
SCENARIOS = {
    "ddp O0": {"policy": "O0", "strategy": "ddp"},
    "ddp O1": {"policy": "O1", "strategy": "ddp"},
    "ddp O2": {"policy": "O2", "strategy": "ddp", "master": "split"},
    "fsdp O0": {"policy": "O0"},
    "fsdp O1": {"policy": "O1"},
    "fsdp O2": {"policy": "O2"},
    "fsdp O2 with a norm of its own": {"policy": "O2", "groups": ["layers.*", "norm"]},
    "fsdp O2 reduced in 16 bits": {"policy": "O2", "reduce_dtype": "bfloat16"},
    "fsdp O2 resharded": {"policy": "O2", "reshard_after_forward": True},
    "fsdp O2 kept": {"policy": "O2", "reshard_after_forward": False},
    "hsdp O2": {"policy": "O2", "strategy": "hsdp", "shard_ranks": 1},
    **DECORATED,
}


@pytest.fixture(scope="module")
def measurements():
    """What the first rank measured, which has the largest shards, by scenario."""
    return run_ranks(RANKS, measure)[0]


def estimated(name):
    return mezzo.estimate(Network().to("meta"), ranks=RANKS, **SCENARIOS[name])


def sent(calls, *names):
    """Return the bytes that a rank of two sends: half of the buffer, for an all-reduce twice."""
    factors = {"all_reduce": 2, "broadcast": 2}
    return sum(factors.get(name, 1) * size // RANKS for name, size in calls if name in names)


@pytest.mark.parametrize("name", SCENARIOS)
def test_memory_equals_that_of_the_tensors_of_a_rank(measurements, name):
    found, expected = estimated(name), measurements[name]
    parts = ["parameters", "gradients", "buffers", "optimizer_states", "masters"]
    assert {one: getattr(found, one) for one in parts} == {one: expected[one] for one in parts}


@pytest.mark.parametrize("name", SCENARIOS)
def test_bytes_on_the_wire_equal_those_of_the_collectives(measurements, name):
    found, calls = estimated(name), measurements[name]
    forward, backward = calls["forward"], calls["backward"]
    assert {one: getattr(found, one) for one in WIRE} == {
        "all_gather_forward": sent(forward, "all_gather"),
        "all_gather_backward": sent(backward, "all_gather"),
        "reduce_scatter": sent(backward, "reduce_scatter"),
        "all_reduce": sent(backward, "all_reduce"),
        "broadcast": sent(forward, "broadcast"),
    }
    assert found.wire == sent([*forward, *backward], *COLLECTIVES.values())


@pytest.mark.parametrize(("master", "saved"), [("split", 2), ("kahan", 2), ("stochastic", 4)])
def test_16_bit_shards_take_2_or_4_bytes_less_for_each_parameter(master, saved):
    n = 1_000_000
    float32 = mezzo.estimate(n, ranks=4, strategy="fsdp")
    found = mezzo.estimate(n, ranks=4, strategy="fsdp", master=master)
    parts = ("parameters", "masters", "gradients", "optimizer_states")
    assert sum(getattr(float32, one) for one in parts) * 4 == 16 * n
    assert sum(getattr(found, one) for one in parts) * 4 == (16 - saved) * n
    assert found.wire == float32.wire


@pytest.mark.parametrize("name", ["ddp O0", "ddp O1", "fsdp O0", "fsdp O1"])
def test_autocast_keeps_16_bit_copies_of_whole_weights_until_backward(measurements, name):
    assert estimated(name).weight_copies == measurements[name]["weight_copies"]
    assert (estimated(name).weight_copies > 0) == ("O1" in name)


@pytest.mark.parametrize("name", ["ddp O0", "ddp O2"])
def test_buckets_have_the_size_of_the_reduced_gradients(measurements, name):
    buckets = sum(size for one, size in measurements[name]["backward"] if one == "all_reduce")
    assert estimated(name).gradient_buffers == buckets
    viewed = mezzo.estimate(Network(), ranks=RANKS, gradient_as_bucket_view=True, **SCENARIOS[name])
    assert viewed.gradient_buffers == 0


def test_two_groups_are_gathered_at_a_time_beside_the_root(measurements):
    calls = measurements["fsdp O2"]
    root, held, most = calls["forward"][0][1], [], 0
    for name, size in calls["backward"]:
        held = [*held, size] if name == "all_gather" else held[1:]
        most = max(most, sum(held))
    assert estimated("fsdp O2").gathered == root + most


@pytest.mark.parametrize("name", ["fsdp O2", "fsdp O2 with a norm of its own"])
def test_the_groups_of_a_sharded_model_are_those_of_fully_shard(measurements, name):
    expected = {one: getattr(estimated(name), one) for one in WIRE}
    assert measurements[name]["estimated"] == expected
