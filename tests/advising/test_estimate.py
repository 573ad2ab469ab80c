"""`mezzo.estimate`: bytes equal those of real tensors; sizes, strategies and errors."""

from dataclasses import FrozenInstanceError
from functools import partial

import pytest
import torch
from torch import nn

import mezzo
from mezzo.optim.companion import KEYS

pytestmark = pytest.mark.slow

MASTERS = {
    torch.bfloat16: ("float32", "split", "kahan", "stochastic", "none"),
    torch.float16: ("float32", "kahan", "stochastic", "none"),
}
POLICIES = [
    {"policy": "O0"},
    {"policy": "O1", "dtype": "bfloat16"},
    {"policy": "O1", "dtype": "float16"},
    {"policy": "O3", "dtype": "bfloat16"},
    {"policy": "O2", "dtype": "bfloat16", "grad_dtype": "float32"},
    {"policy": "O2", "dtype": "bfloat16", "keep_full": {"head", *mezzo.NORMS}},
    {"policy": "O2", "dtype": "bfloat16", "preset": "apex"},
    *(
        {"policy": "O2", "dtype": dtype, "master": master}
        for dtype, masters in MASTERS.items()
        for master in masters
    ),
]


class Network(nn.Module):
    """An embedding, two blocks, a head that is tied to nothing, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 20)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 20)) for _ in range(2)
        )
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.norm = nn.BatchNorm1d(20)
        self.head = nn.Linear(20, 7)

    def forward(self, tokens):
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(self.norm(self.frozen(h)))


def split_optimizers(model):
    matrices = [p for p in model.parameters() if p.dim() == 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(others, amsgrad=True)]


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def measured(model, optimizers):
    """Bytes of the tensors that exist after a step, by part."""
    model(torch.arange(12)).float().square().mean().backward()
    for one in optimizers:
        one.step()
    states = [item for one in optimizers for state in one.state.values() for item in state.items()]
    sizes = [(name, value.nbytes) for name, value in states if isinstance(value, torch.Tensor)]
    return {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "buffers": sum(b.nbytes for b in model.buffers()),
        "masters": sum(size for name, size in sizes if name in KEYS),
        "optimizer_states": sum(size for name, size in sizes if name not in KEYS),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
    }


def parts(estimate, names):
    return {name: getattr(estimate, name) for name in names}


OPTIMIZERS = {
    "AdamW": lambda model: (torch.optim.AdamW(trained(model)), "AdamW"),
    "instances": lambda model: (split_optimizers(model),) * 2,
    "SGD": lambda model: (torch.optim.SGD(trained(model)), torch.optim.SGD),
    "momentum": lambda model: (
        torch.optim.SGD(trained(model), momentum=0.9),
        partial(torch.optim.SGD, momentum=0.9),
    ),
    "Lion": lambda model: (mezzo.Lion(trained(model)), "lion"),
    "Adafactor": lambda model: (torch.optim.Adafactor(trained(model)), "Adafactor"),
    "on a device": lambda model: (torch.optim.AdamW(trained(model), lr=torch.tensor(0.1)),) * 2,
}
CASES = [
    *((name, options) for name in ("AdamW", "instances") for options in POLICIES),
    *((name, options) for name in list(OPTIMIZERS)[2:] for options in (POLICIES[0], POLICIES[-3])),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_bytes_equal_those_of_the_tensors_after_a_step(name, options):
    model = Network()
    optimizers, argument = OPTIMIZERS[name](model)
    found = mezzo.estimate(model, **options, optimizer=argument)
    mezzo.decorate(model, optimizers, **options)
    expected = measured(model, optimizers if isinstance(optimizers, list) else [optimizers])
    assert parts(found, expected) == expected
    assert found.memory == sum(expected.values()) + found.weight_copies
    assert found.wire == 0


def parts_of(*args, **options):
    found = mezzo.estimate(*args, **options)
    return {
        name: value
        for name, value in vars(found).items()
        if isinstance(value, int)
        and value
        and name not in ("numel", "ranks", "shard_ranks", "groups")
    }


def test_float32_values_of_cast_buffers_are_masters():
    model = nn.BatchNorm1d(8)
    model.register_buffer("table", torch.zeros(16))
    optimizer = torch.optim.SGD(model.parameters())
    options = {"policy": "O2", "dtype": "bfloat16", "preset": "paddle", "keep_full": ()}
    plan = mezzo.plan(model, optimizer, **options)
    assert any(row.kind == "buffer" and row.master for row in plan.rows)
    found = mezzo.estimate(model, **options)
    assert found.masters == plan.master_bytes
    assert found.parameters + found.buffers == plan.bytes_after + model.num_batches_tracked.nbytes


@pytest.mark.parametrize("master", ["float32", "none"])
def test_16_bit_parameters_are_counted_with_the_states_that_they_get(master):
    model = nn.Linear(8, 8, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    found = mezzo.estimate(model, "O2", master=master)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master)
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    assert found.optimizer_states + found.masters == sum(one.nbytes for one in state.values())
    assert (found.parameters, found.masters) == (128, 256 if master == "float32" else 0)


def test_tied_parameters_are_counted_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    found = mezzo.estimate(model, "O1")
    assert (found.numel, found.parameters) == (40, 160)
    # The head computes in 16 bits.
    assert found.weight_copies == 80


def test_muon_by_name_has_the_matrices_and_adamw_the_rest():
    model = Network()
    matrices = [p for p in trained(model) if p.dim() == 2]
    others = [p for p in trained(model) if p.dim() != 2]
    pair = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    for name in ("Muon", torch.optim.Muon):
        found = mezzo.estimate(model, "O2", optimizer=name)
        assert (
            found.optimizer_states == mezzo.estimate(model, "O2", optimizer=pair).optimizer_states
        )
    assert mezzo.estimate(1000, "O2", optimizer="Muon").optimizer_states == 4000


def test_parameters_in_no_optimizer_have_no_master_and_no_states():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model[0].parameters(), momentum=0.9)
    assert parts_of(model, "O2", optimizer=optimizer) == {
        "parameters": 64,
        "masters": 64,
        "optimizer_states": 64,
        "gradients": 64,
    }


# -- strategies ------------------------------------------------------------------------------------

N = 1_000_000


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({"policy": "O0"}, 16),
        ({"policy": "O1"}, 16 + 2),
        ({"policy": "O2"}, 2 + 4 + 8 + 2),
        ({"policy": "O2", "master": "split"}, 14),
        ({"policy": "O2", "master": "kahan", "dtype": "float16"}, 14),
        ({"policy": "O2", "master": "stochastic"}, 12),
        ({"policy": "O2", "master": "none"}, 12),
        ({"policy": "O2", "grad_dtype": "float32"}, 18),
        ({"policy": "O3"}, 12),
        ({"policy": "O2", "optimizer": "Lion"}, 12),
        ({"policy": "O2", "optimizer": "SGD"}, 8),
        ({"policy": "O2", "strategy": "ddp", "ranks": 8}, 16 + 2),
    ],
)
def test_bytes_a_parameter(options, bytes_each):
    assert mezzo.estimate(N, **options).memory == bytes_each * N


@pytest.mark.parametrize("options", [{"policy": "O0"}, {"policy": "O1"}, {"policy": "O2"}])
def test_shards_are_float32_and_have_no_other_masters(options):
    found = mezzo.estimate(N, **options, ranks=10, strategy="fsdp")
    sharded = (found.parameters, found.masters, found.optimizer_states, found.gradients)
    assert tuple(size * 10 // N for size in sharded) == (4, 0, 8, 4)


SIZES = {"": N, "layers.0": 2 * N, "layers.1": 4 * N, "layers.2": 3 * N}


def test_the_root_and_the_two_largest_groups_are_gathered_at_a_time():
    assert mezzo.estimate(SIZES, "O2", 4).gathered == 2 * (1 + 4 + 3) * N
    assert mezzo.estimate(SIZES, "O1", 4).gathered == 4 * (1 + 4 + 3) * N
    assert mezzo.estimate(SIZES, "O2", 4, reshard_after_forward=False).gathered == 2 * 10 * N
    # The gradients of the largest group, and what is reduced of it.
    assert mezzo.estimate(SIZES, "O2", 4).gradient_buffers == (2 + 4) * 4 * N
    found = mezzo.estimate(SIZES, "O2", 4, reduce_dtype="bfloat16")
    assert found.gradient_buffers == (2 + 2) * 4 * N


def test_bytes_on_the_wire():
    found = mezzo.estimate(SIZES, "O2", 4, "fsdp")
    gathers = (found.all_gather_forward, found.all_gather_backward, found.reduce_scatter)
    assert gathers == (2 * 10 * N * 3 // 4, 2 * 9 * N * 3 // 4, 4 * 10 * N * 3 // 4)
    assert found.all_reduce == 0
    resharded = mezzo.estimate(SIZES, "O2", 4, reshard_after_forward=True)
    assert resharded.all_gather_backward == 2 * 10 * N * 3 // 4
    assert mezzo.estimate(SIZES, "O2", 4, reshard_after_forward=False).all_gather_backward == 0
    for options in ({"reduce_dtype": "bfloat16"}, {"grad_dtype": "bfloat16"}):
        assert mezzo.estimate(SIZES, "O2", 4, **options).reduce_scatter == 15 * N
    ddp = mezzo.estimate(SIZES, "O2", 4, "ddp")
    assert (ddp.all_reduce, ddp.wire) == (2 * 10 * N * 2 * 3 // 4,) * 2
    assert mezzo.estimate(SIZES, "O2", 4, "ddp", reduce_dtype="float32").all_reduce == 60 * N


def test_hybrid_sharding_reduces_shards_between_replicas():
    found = mezzo.estimate(SIZES, "O2", 8, "hsdp", shard_ranks=4)
    inside = mezzo.estimate(SIZES, "O2", 4, "fsdp")
    assert found.memory == inside.memory
    assert found.all_reduce == 4 * 10 * N // 4
    assert found.wire - found.all_reduce == inside.wire


def test_shards_are_padded_to_the_largest():
    model = nn.Linear(3, 5)
    found = mezzo.estimate(model, "O0", 2, "fsdp")
    assert found.parameters == (3 * 3 + 3) * 4
    assert found.all_gather_forward == found.parameters
    many = mezzo.estimate(model, "O0", 8, "fsdp")
    assert many.parameters == (3 + 1) * 4


def test_groups_are_the_elements_of_lists_or_those_selected():
    model = Network()
    # The seven rows of the head are padded to eight, and the batch norm is gathered apart.
    embedding, block, others = 50 * 20, 20 * 20 + 20 + 40, 20 * 20 + 20 + 8 * 20 + 8
    assert mezzo.estimate(model, "O2", 2).gathered == 2 * (embedding + others + 2 * block)
    chosen = mezzo.estimate(model, "O2", 2, groups=["layers.*.1", nn.Embedding])
    assert chosen.gathered == 2 * (others + 2 * 40 + embedding + block - 40)
    assert mezzo.estimate(nn.Linear(4, 4, bias=False), "O2", 2).gathered == 32


def test_norms_are_gathered_in_16_bits_unless_they_are_a_group_or_keep_full_names_them():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.LayerNorm(4)})
    assert mezzo.estimate(model, "O2", 2).all_gather_forward == 2 * (16 + 8) // 2
    for options in ({"groups": "b"}, {"keep_full": {"b"}}):
        assert mezzo.estimate(model, "O2", 2, **options).all_gather_forward == (32 + 32) // 2


def test_keep_full_names_groups_of_sizes():
    found = mezzo.estimate({"norms": 10, "layers": 100}, "O2", keep_full={"norms"})
    assert (found.parameters, found.masters) == (40 + 200, 400)


def test_a_model_on_the_meta_device_gives_the_same():
    with torch.device("meta"):
        model = Network()
    for options in ({"policy": "O2"}, {"policy": "O1", "ranks": 2}):
        assert mezzo.estimate(model, **options) == mezzo.estimate(Network(), **options)


def test_a_wrapped_model_gives_the_same():
    model = Network()
    assert mezzo.estimate(nn.DataParallel(model), "O2") == mezzo.estimate(model, "O2")


def test_nothing_is_allocated_and_the_model_is_unchanged():
    model = Network()
    before = {name: (value.data_ptr(), value.dtype) for name, value in model.state_dict().items()}
    assert mezzo.estimate(2**46, "O2", 512, "fsdp").parameters == 2**39
    mezzo.estimate(model, "O2", 2)
    assert before == {
        name: (value.data_ptr(), value.dtype) for name, value in model.state_dict().items()
    }
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_table_lists_the_parts_and_what_is_not_included():
    found = mezzo.estimate(SIZES, "O2", 8, "hsdp", shard_ranks=4, dtype="float16")
    assert (
        str(found)
        == """\
10,000,000 parameters at O2 in float16 (master='float32') with AdamW, hsdp on 8 ranks (4 a replica)

memory of a rank:
  parameters                     9.5 MiB
  optimizer states              19.1 MiB
  gradients                      9.5 MiB
  gradients being reduced       22.9 MiB
  gathered parameters           15.3 MiB
  total                         76.3 MiB

sent by a rank in a step:
  all-gather in forward         14.3 MiB
  all-gather in backward        12.9 MiB
  reduce-scatter                28.6 MiB
  all-reduce                     9.5 MiB
  total                         65.3 MiB

Computed from sizes. Not included: activations, temporary tensors of ops and of the update, and
what the allocator and the communication library keep."""
    )
    assert "sent by" not in str(mezzo.estimate(SIZES, "O0"))
    assert "one group" not in str(found)
    assert "one group" in str(mezzo.estimate(7e9, "O2", 8))
    assert "one group" not in str(mezzo.estimate(7e9, "O2", 8, "ddp"))
    with pytest.raises(FrozenInstanceError):
        found.parameters = 0


# -- errors ----------------------------------------------------------------------------------------


class Unusual(torch.optim.Optimizer):
    def __init__(self, params, rank):
        super().__init__(params, {"rank": rank})


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((N, "O2", 2, "dp"), {}, "Unknown strategy 'dp'.*single, ddp, fsdp, hsdp"),
        ((N, "O2", 0), {}, "ranks=0 should be a number of processes"),
        ((N, "O2", 2.0), {}, "ranks=2.0 should be a number of processes"),
        ((N, "O2", 2, "single"), {}, "'single' is one process, got ranks=2. Pass strategy='ddp'"),
        ((N, "O2", 2, "fsdp"), {"shard_ranks": 2}, "shard_ranks=2 is for strategy='hsdp'"),
        ((N, "O2", 8, "hsdp"), {}, "divides ranks=8; got shard_ranks=None"),
        ((N, "O2", 8, "hsdp"), {"shard_ranks": 3}, "divides ranks=8; got shard_ranks=3"),
        ((N, "O5"), {}, "O5"),
        ((N, "O2"), {"dtype": "float16", "master": "split"}, "'split' needs bfloat16"),
        ((N, "O2"), {"keepfull": ()}, "keepfull"),
        ((N, "O2"), {"keep_full": {"head"}}, "keep_full='head' matches nothing"),
        ((N, "O2"), {"reduce_dtype": "int8"}, "reduce_dtype='int8' is not a dtype"),
        ((N, "O2"), {"optimizer": "AdanW"}, "Unknown optimizer 'AdanW'.*Did you mean 'AdamW'"),
        ((N, "O2"), {"optimizer": []}, "has no parameters"),
        ((N, "O2"), {"optimizer": [1]}, "optimizer has 1, which is not"),
        ((N, "O2"), {"optimizer": split_optimizers(Network())}, "Muon has parameters that are not"),
        ((N, "O2"), {"optimizer": 3}, "optimizer=3 is not an optimizer"),
        ((N, "O2"), {"optimizer": nn.Linear}, "optimizer=Linear"),
        ((N, "O2"), {"optimizer": list}, "optimizer=list returned list"),
        ((N, "O2"), {"optimizer": Unusual}, "optimizer=Unusual cannot be made.*partial"),
        ((N, "O2"), {"optimizer": "LBFGS"}, "states of LBFGS cannot be counted"),
        ((N, "O2"), {"groups": "blocks.*"}, "groups='blocks.*' matches no module"),
        ((N, "O2", 2, "ddp"), {"grad_dtype": "float32"}, "reduce_dtype='float32'"),
        ((N, "O2", 2), {"master": "none"}, "master='none' trains 16-bit parameters without"),
        ((N, "O3", 2), {}, "O3 trains 16-bit parameters without.*Use policy 'O2'"),
        ((N, "O2", 2), {"preset": "paddle"}, "preset='paddle' casts parameters in another way"),
        ((0,), {}, "0 is not a number of parameters"),
        ((0.5,), {}, "0.5 is not a number of parameters"),
        ((float("nan"),), {}, "nan is not a number of parameters"),
        (({},), {}, "sizes are empty"),
        (({"a": -1},), {}, "-1 is not a number of parameters"),
        (("llama",), {}, "'llama' is not a number of parameters. Pass a model"),
        ((nn.ReLU(),), {}, "ReLU has no floating-point parameters"),
        ((nn.LazyLinear(4),), {}, "'weight' is lazy"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(arguments, options, message):
    with pytest.raises(mezzo.MezzoError, match=message):
        mezzo.estimate(*arguments, **options)


def test_a_decorated_model_is_refused():
    model = nn.Linear(4, 4)
    mezzo.decorate(model.eval(), None, "O3", dtype="bfloat16")
    with pytest.raises(mezzo.PolicyError, match=r"mezzo.undecorate\(model\) first"):
        mezzo.estimate(model, "O2")
