"""Checkpoints of several processes carry masters and random states, and resume bit for bit."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.processes import run_ranks
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mezzo
from mezzo.optim.companion import MASTER

pytestmark = pytest.mark.slow

MASTERS = ("float32", "split", "kahan", "stochastic")
WAYS = {
    "nested": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "offloaded": StateDictOptions(cpu_offload=True),
    "broadcast": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 10), nn.LayerNorm(10), nn.Dropout(0.25), nn.Linear(10, 3), nn.Tanh()
    )


def replicated(master: str = "float32", seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master)
    return DistributedDataParallel(model), optimizer


def sharded(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = network(seed)
    for layer in (model[0], model[3], model):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def half_sharded(master: str = "split", seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """Return a pair with 16-bit shards."""
    model = network(seed)
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int = 2) -> None:
    for index in range(updates):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(index))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return all values of a pair as whole tensors, masters included."""
    return copy.deepcopy(whole(get_state_dict(model, optimizer)))


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [whole(one) for one in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if one.dtype is torch.bfloat16:
            # Bits: those of a 16-bit remainder may be a NaN.
            one, other = one.view(torch.int16), other.view(torch.int16)
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# -- scenarios: each runs on every rank ------------------------------------------------------------

Scenario = Callable[[Path], Any]


def state_dicts_are_carried(make: Callable[..., Any], way: str) -> bool:
    """Carry the state of one pair over to a fresh pair; return whether both then train alike."""
    first, second = make(), make(seed=1)
    train(*first)
    model, optimizer = copy.deepcopy(get_state_dict(*first, options=WAYS[way]))
    options = copy.copy(WAYS[way])
    options.broadcast_from_rank0 = way == "broadcast"
    if way == "broadcast" and distributed.get_rank():
        model, optimizer = {}, {}
    options.cpu_offload = False
    set_model_state_dict(second[0], model, options=options)
    set_optimizer_state_dict(*second, optimizer, options=options)
    equal = same(snapshot(*first), snapshot(*second))
    for pair in (first, second):
        torch.manual_seed(7)
        train(*pair)
    return equal and same(snapshot(*first), snapshot(*second))


def masters_are_plain_tensors_in_a_replicated_model(_: Path) -> bool:
    pair = replicated()
    train(*pair)
    states = get_optimizer_state_dict(*pair)["state"]
    return type(states["0.weight"][MASTER]) is torch.Tensor


def a_run_state_keeps_the_random_states_of_each_rank(folder: Path) -> Any:
    _, optimizer = replicated()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = mezzo.GradScaler(init_scale=64.0)
    torch.manual_seed(distributed.get_rank())
    run = mezzo.RunState(scaler=scaler, scheduler=scheduler)
    dcp.save({"run": run}, checkpoint_id=folder)
    drawn = torch.rand(4)
    scheduler.step()
    other = mezzo.GradScaler()
    fresh = mezzo.RunState(scaler=other, scheduler=scheduler)
    dcp.load({"run": fresh}, checkpoint_id=folder)
    own = bool(torch.equal(torch.rand(4), drawn))
    return own, other.get_scale(), scheduler.last_epoch, drawn.tolist()


def a_replicated_pair_is_saved_by_rank_0(folder: Path) -> Any:
    path, pair = folder / "run.pt", replicated("split")
    torch.manual_seed(distributed.get_rank())
    train(*pair)
    mezzo.save_checkpoint(path, *pair, epoch=3)
    train(*pair)
    end, other = snapshot(*pair), replicated("split", seed=1)
    extra = mezzo.load_checkpoint(path, *other)
    train(*other)
    return extra, same(snapshot(*other), end), sorted(one.name for one in folder.iterdir())


def rank_0_alone_may_save(folder: Path) -> Any:
    path, pair = folder / "run.pt", replicated()
    if not distributed.get_rank():
        mezzo.save_checkpoint(path, *pair)
    distributed.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mezzo.load_checkpoint(path, *pair)
    return [str(one.message) for one in caught]


def an_error_of_rank_0_ends_all_ranks(folder: Path) -> str:
    with pytest.raises((mezzo.CheckpointError, FileNotFoundError)) as caught:
        mezzo.save_checkpoint(folder / "none" / "run.pt", *replicated())
    return str(caught.value)


def a_sharded_pair_is_saved_to_a_folder(folder: Path) -> Any:
    pair = sharded()
    torch.manual_seed(distributed.get_rank())
    train(*pair)
    mezzo.save_checkpoint(folder / "run", *pair, epoch=3)
    saved = snapshot(*pair)
    mezzo.save_checkpoint(folder / "run", *pair, epoch=4)
    train(*pair)
    end, other = snapshot(*pair), sharded(seed=1)
    extra = mezzo.load_checkpoint(folder / "run", *other)
    loaded = same(snapshot(*other), saved)
    train(*other)
    names = sorted(one.name for one in folder.iterdir())
    return extra, loaded, same(snapshot(*other), end), names


def another_model_is_refused_and_changes_nothing(folder: Path) -> Any:
    mezzo.save_checkpoint(folder / "run", *sharded())
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    before, messages = snapshot(model, optimizer), []
    for strict in (True, False):
        with pytest.raises(mezzo.CheckpointError) as caught:
            mezzo.load_checkpoint(folder / "run", model, optimizer, strict=strict)
        messages.append(str(caught.value))
    return messages, same(snapshot(model, optimizer), before)


def four_ranks_continue_as_two(folder: Path) -> Any:
    """Load what four ranks have saved: the folder of shards, and the file of replicas."""
    shards, replicas = sharded(seed=1), replicated("split", seed=1)
    halves = {master: half_sharded(master, seed=1) for master in MASTERS[1:]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mezzo.load_checkpoint(folder.parent / "four" / "shards", *shards)
        mezzo.load_checkpoint(folder.parent / "four" / "run.pt", *replicas)
        for master, pair in halves.items():
            mezzo.load_checkpoint(folder.parent / "four" / master, *pair)
    return (
        snapshot(*shards),
        snapshot(*replicas),
        [str(one.message) for one in caught],
        {master: snapshot(*pair) for master, pair in halves.items()},
    )


def whole_averages_after(evaluate: Callable[[nn.Module, mezzo.EMA], Any]) -> Any:
    """Return weights and averages of shards that were evaluated after each update."""
    model, optimizer = half_sharded("split")
    average = mezzo.EMA(model, decay=0.5)
    for _ in range(3):
        train(model, optimizer, 1)
        evaluate(model, average)
        average.update()
    return snapshot(model, optimizer), whole(average.state_dict())


@torch.no_grad()
def output_with_averages(model: nn.Module, average: mezzo.EMA) -> torch.Tensor:
    with average.applied():
        return model.eval()(torch.ones(1, 6))


@torch.no_grad()
def evaluate_twice(model: nn.Module, average: mezzo.EMA) -> None:
    # The root keeps what it has gathered after a pass without gradients.
    model.eval()(torch.ones(1, 6))
    output_with_averages(model, average)
    model.train()


def evaluations_change_no_weight_and_no_average(_: Path) -> bool:
    return same(whole_averages_after(evaluate_twice), whole_averages_after(lambda *_: None))


def what_a_model_holds_gathered_is_read_from_its_shards(_: Path) -> Any:
    """Evaluate a model, then read what optimizers, scalers and checkpoints need of it."""
    model, optimizer = half_sharded("split")
    train(model, optimizer)
    expected = whole(dict(mezzo.master_params(model)))
    names = list(expected)
    with torch.no_grad():
        model(torch.ones(1, 6))
    gathered = [name for name, one in model.named_parameters() if not isinstance(one, DTensor)]
    exact = same(whole(dict(mezzo.master_params(model))), expected)
    mezzo.TrainStep(model, nn.functional.mse_loss, optimizer)
    scaler = mezzo.GradScaler("cpu")
    scaler.register_parameter_names(model)
    scaler.scale(model(torch.full((1, 6), torch.inf)).sum()).backward()
    source = scaler.step(optimizer).first_nonfinite
    return gathered, exact, names, list(mezzo.master_params(optimizer)), source


def other_groups_of_modules_are_loaded(folder: Path) -> dict[str, bool]:
    """Save with norms in a group of their own and load into one with norms, and the reverse."""

    def make(master: str, seed: int, *, apart: bool) -> tuple[Any, torch.optim.Optimizer]:
        model = network(seed)
        for layer in (model[0], model[3], model) if apart else (model,):
            fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master)

    equal = {}
    for master in MASTERS[1:]:
        for apart in (True, False):
            first, second = make(master, 0, apart=apart), make(master, 1, apart=not apart)
            train(*first)
            path = folder / f"{master}-{apart}"
            mezzo.save_checkpoint(path, *first)
            mezzo.load_checkpoint(path, *second)
            loaded = [mezzo.master_params(pair[0])["0.weight"] for pair in (first, second)]
            equal[path.name] = same(*map(whole, loaded))
    return equal


def averages_follow_a_model_that_is_sharded_in_part(_: Path) -> bool:
    """Average plain parameters and shards of tensor parallelism in one model."""
    averages = []
    for is_split in (True, False):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        if is_split:
            mesh = init_device_mesh("cpu", (2,))
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        average = mezzo.EMA(model, decay=0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        average.update()
        averages.append(whole(average.state_dict()))
    return same(*averages)


def averages_are_an_extra_value(folder: Path) -> Any:
    model, optimizer = half_sharded("split")
    average = mezzo.EMA(model, decay=0.5)
    train(model, optimizer)
    average.update()
    extra = {"averages": [average.state_dict(), torch.ones(1)], "epoch": 3}
    mezzo.save_checkpoint(folder / "run", model, optimizer, **extra)
    expected = output_with_averages(model, average)
    other, other_optimizer = half_sharded("split", seed=1)
    average = mezzo.EMA(other)
    loaded = mezzo.load_checkpoint(folder / "run", other, other_optimizer)
    average.load_state_dict(loaded["averages"][0])
    values = {type(one) for one in loaded["averages"][0].values()}
    others = loaded["averages"][1].tolist(), loaded["epoch"]
    return torch.equal(output_with_averages(other, average), expected), values, others


SCENARIOS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        masters_are_plain_tensors_in_a_replicated_model,
        a_run_state_keeps_the_random_states_of_each_rank,
        a_replicated_pair_is_saved_by_rank_0,
        rank_0_alone_may_save,
        an_error_of_rank_0_ends_all_ranks,
        a_sharded_pair_is_saved_to_a_folder,
        another_model_is_refused_and_changes_nothing,
        four_ranks_continue_as_two,
        evaluations_change_no_weight_and_no_average,
        what_a_model_holds_gathered_is_read_from_its_shards,
        averages_are_an_extra_value,
        averages_follow_a_model_that_is_sharded_in_part,
        other_groups_of_modules_are_loaded,
    )
}
KINDS = [*MASTERS, "sharded", *(f"shards of {master}" for master in MASTERS[1:])]
"""Format of the masters of replicas, plain shards, and format of the masters of 16-bit shards."""
CARRIED = [
    f"{kind}-{way}"
    for kind in KINDS
    for way in WAYS
    # Neither gloo nor NCCL sends 16-bit integers.
    if (kind, way) != ("split", "broadcast")
]
"""Kind, and how the state is read and set."""
CHECKED = [
    name
    for name in CARRIED
    if name.startswith(("float32-", "sharded-", "shards of split-")) or name.endswith("-full")
]
"""What `make test` checks: each kind and each way."""


def run_scenarios(_rank: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        path = Path(folder, name)
        path.mkdir(exist_ok=True)
        results[name] = scenario(path)
        distributed.barrier()
    return {**results, **carry(_rank, CHECKED)}


def carry(_rank: int, names: list[str]) -> dict[str, bool]:
    """Return by name whether a kind of state was carried over in one way."""
    results = {}
    for name in names:
        master, _, way = name.partition("-")
        of_shards = master.removeprefix("shards of ")
        make = (
            partial(replicated, master) if of_shards == master else partial(half_sharded, of_shards)
        )
        results[name] = state_dicts_are_carried(sharded if master == "sharded" else make, way)
    return results


def save_with_four_ranks(_rank: int, folder: str) -> Any:
    pairs = sharded(), replicated("split")
    for pair in pairs:
        train(*pair)
    mezzo.save_checkpoint(Path(folder, "shards"), *pairs[0], epoch=3)
    mezzo.save_checkpoint(Path(folder, "run.pt"), *pairs[1])
    for master in MASTERS[1:]:
        pair = half_sharded(master)
        train(*pair)
        mezzo.save_checkpoint(Path(folder, master), *pair)
        pairs = *pairs, pair
    return [snapshot(*pair) for pair in pairs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    (path / "four").mkdir()
    return path


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[Any]:
    """What four ranks have saved: the values of sharded and of replicated weights."""
    return run_ranks(4, save_with_four_ranks, str(folder / "four"))[0]


@pytest.fixture(scope="module")
def results(folder: Path, saved: list[Any]) -> list[dict[str, Any]]:
    """The results of two ranks, by scenario."""
    return run_ranks(2, run_scenarios, str(folder))


def of(results: list[dict[str, Any]], scenario: Scenario) -> list[Any]:
    return [one[scenario.__name__] for one in results]


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKED)
def test_plain_state_dicts_carry_all_values_to_a_fresh_pair(results, name: str):
    assert [one[name] for one in results] == [True, True]


@pytest.mark.exhaustive
def test_every_kind_of_state_is_carried_in_every_way():
    expected = dict.fromkeys(CARRIED, True)
    assert run_ranks(2, carry, CARRIED) == [expected, expected]


def test_masters_of_a_replicated_model_are_plain_tensors(results):
    assert all(of(results, masters_are_plain_tensors_in_a_replicated_model))


def test_a_run_state_restores_the_random_states_of_each_rank(results):
    both = of(results, a_run_state_keeps_the_random_states_of_each_rank)
    assert [one[:3] for one in both] == [(True, 64.0, 0)] * 2
    assert both[0][3] != both[1][3]


def test_rank_0_writes_the_file_of_a_replicated_pair_and_each_rank_resumes(results):
    for extra, resumed, names in of(results, a_replicated_pair_is_saved_by_rank_0):
        assert extra == {"epoch": 3}
        assert resumed
        assert names == ["run.pt", "run.pt.rank1"]


def test_rank_0_alone_may_save(results):
    first, second = of(results, rank_0_alone_may_save)
    assert first == []
    assert "no random states of rank 1 of 2" in second[0]


def test_an_error_of_rank_0_is_raised_on_all_ranks(results):
    first, second = of(results, an_error_of_rank_0_ends_all_ranks)
    assert "there is no directory" in first
    assert "Rank 0 could not write" in second


def test_a_sharded_pair_is_saved_to_a_folder_and_resumes(results):
    for extra, loaded, resumed, names in of(results, a_sharded_pair_is_saved_to_a_folder):
        assert extra == {"epoch": 4}
        assert loaded
        assert resumed
        assert names == ["run"]


def test_the_folder_of_another_model_is_refused_and_changes_nothing(results):
    for messages, unchanged in of(results, another_model_is_refused_and_changes_nothing):
        assert "which this model0 lacks" in messages[0]
        assert "Size mismatch" in messages[1] or "lacks" in messages[1]
        assert unchanged


def test_four_ranks_continue_as_two_bit_for_bit(results, saved):
    for rank, found in enumerate(of(results, four_ranks_continue_as_two)):
        shards, replicas, messages, halves = found
        assert same(shards, saved[0])
        assert same(replicas, saved[1])
        for master, expected in zip(MASTERS[1:], saved[2:], strict=True):
            assert same(halves[master], expected)
        assert ("4 ranks, and there are 2 now" in messages[0]) == (rank == 0)


def test_a_folder_of_shards_is_loaded_by_one_process(saved, folder: Path):
    model = network(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    with pytest.warns(UserWarning, match="4 ranks, and there are 1 now"):
        assert mezzo.load_checkpoint(folder / "four" / "shards", model, optimizer) == {"epoch": 3}
    assert same(dict(mezzo.undecorate(model).state_dict()), saved[0][0])


@pytest.mark.parametrize("master", MASTERS[1:])
def test_a_folder_of_16_bit_shards_is_loaded_by_one_process(saved, folder: Path, master: str):
    model = network(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master=master)
    with pytest.warns(UserWarning, match="4 ranks, and there are 1 now"):
        mezzo.load_checkpoint(folder / "four" / master, model, optimizer)
    expected = saved[2 + MASTERS[1:].index(master)]
    for name in ("0.weight", "3.bias"):
        assert torch.equal(model.state_dict()[name], expected[0][name])


def test_the_file_of_replicas_is_loaded_by_one_process(saved, folder: Path):
    model = network(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16", master="split")
    mezzo.load_checkpoint(folder / "four" / "run.pt", model, optimizer)
    assert same(snapshot(model, optimizer), saved[1])


def test_evaluations_change_no_weight_and_no_average(results):
    assert of(results, evaluations_change_no_weight_and_no_average) == [True, True]


def test_what_a_model_holds_gathered_is_read_from_its_shards(results):
    for gathered, exact, names, of_optimizer, source in of(
        results, what_a_model_holds_gathered_is_read_from_its_shards
    ):
        assert gathered == ["1.weight", "1.bias"]
        assert exact
        assert of_optimizer == names
        assert source == "0.weight"


def test_averages_follow_a_model_that_is_sharded_in_part(results):
    assert of(results, averages_follow_a_model_that_is_sharded_in_part) == [True, True]


def test_other_groups_of_modules_are_loaded(results):
    for equal in of(results, other_groups_of_modules_are_loaded):
        assert equal == dict.fromkeys(equal, True)


def test_averages_are_an_extra_value_of_a_folder_of_shards(results):
    for equal, types, others in of(results, averages_are_an_extra_value):
        assert equal
        assert types == {torch.Tensor}
        assert others == ([1.0], 3)


def test_an_incomplete_folder_is_not_loaded(saved, folder: Path, tmp_path: Path):
    shutil.copytree(folder / "four" / "shards", tmp_path / "10")
    shutil.copytree(folder / "four" / "shards", tmp_path / "20")
    (tmp_path / "20" / ".metadata").unlink()
    with pytest.raises(mezzo.CheckpointError, match="not the folder of a complete checkpoint"):
        mezzo.load_checkpoint(tmp_path / "20", network())
    assert mezzo.latest_checkpoint(tmp_path) == tmp_path / "10"


def test_a_folder_is_found_if_its_replacement_was_interrupted(saved, folder, tmp_path):
    shutil.copytree(folder / "four" / "shards", tmp_path / ".run.old")
    with pytest.warns(UserWarning, match="4 ranks"):
        assert mezzo.load_checkpoint(tmp_path / "run", network()) == {"epoch": 3}
