"""What each rank of `tests/parallel/test_fsdp.py` does: scenarios by name, with plain results."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
from support import half_shards
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import mezzo
from mezzo._torch import fsdp_groups
from mezzo.scaling import gradients, mesh

STEPS = 4
LEARNING_RATE = 1e-2
_REDUCE_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")


class Block(nn.Module):
    """Two linear layers that tensor parallelism can split, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Two blocks and a head, whose five rows shard unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def split(model: nn.Module, device_mesh: Any) -> nn.Module:
    """Split the linear layers of the blocks over the ranks of a mesh."""
    for block in model.blocks:
        parallelize_module(block, device_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=generator), torch.randn(8, 5, generator=generator))
        for _ in range(STEPS)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def scaler(dtype: str | None = "float16") -> Any:
    return mezzo.GradScaler("cpu", init_scale=1024.0) if dtype == "float16" else None


def part(batch: Any, index: int, count: int) -> Any:
    """Return the share of one of `count` data-parallel ranks of a batch."""
    return [one.chunk(count)[index] for one in batch]


def mean_over(loss: torch.Tensor) -> float:
    total = loss.detach().double().reshape(1)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


def full_values(model: nn.Module) -> list[torch.Tensor]:
    return [
        (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for one in model.parameters()
    ]


# -- training --------------------------------------------------------------------------------------


def train(
    model: nn.Module, level: str, dtype: str | None, index: int, count: int, **options: Any
) -> dict[str, Any]:
    """Train with `TrainStep` on this rank's share; return the global losses and norms."""
    optimizer = adamw(model)
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        optimizer,
        level,
        dtype=dtype,
        scaler=scaler(dtype),
        grad_norm=True,
        **options,
    )
    losses, norms = [], []
    for batch in make_batches():
        losses.append(mean_over(step(*part(batch, index, count))))
        norms.append(float(mezzo.grad_norm(optimizer)))
    return {"losses": losses, "norms": norms, "weights": full_values(model)}


def train_by_hand(
    model: nn.Module,
    level: str,
    index: int,
    count: int,
    bad_rank: int,
    corrupt: Any,
    **options: Any,
) -> dict[str, Any]:
    """Train with a loop and a scaler; `corrupt` changes gradients of a rank at the second step."""
    optimizer, grad_scaler = adamw(model), scaler()
    mezzo.decorate(model, optimizer, level, dtype="float16", clip_norm=0.5, **options)
    grad_scaler.register_parameter_names(model)
    record: dict[str, Any] = {"skipped": [], "scales": [], "names": [], "changed": []}
    for number, batch in enumerate(make_batches()):
        x, y = part(batch, index, count)
        grad_scaler.scale(nn.functional.mse_loss(model(x).float(), y)).backward()
        if number == 1 and distributed.get_rank() == bad_rank:
            corrupt(model)
        before = full_values(model)
        result = grad_scaler.step(optimizer)
        grad_scaler.update()
        optimizer.zero_grad()
        record["skipped"].append(result.skipped)
        record["names"].append(result.first_nonfinite)
        record["scales"].append(grad_scaler.get_scale())
        record["changed"].append(not all(map(torch.equal, before, full_values(model))))
    return record


def put_inf(name: str) -> Any:
    """Return a function that makes one element of a local gradient infinite."""

    def corrupt(model: nn.Module) -> None:
        gradient = dict(model.named_parameters())[name].grad
        gradient.to_local().view(-1)[-1] = torch.inf

    return corrupt


def message_of(function: Any) -> str:
    """Return the error of a call, with its type."""
    try:
        function()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- two ranks -------------------------------------------------------------------------------------


def two_ranks(rank: int) -> dict[str, Any]:
    """Run every scenario of two ranks."""
    results: dict[str, Any] = {
        f"train {level} {dtype}": train(
            shard(make_model()),
            level,
            dtype,
            rank,
            2,
            **({} if level == "O1" else {"clip_norm": 0.5}),
        )
        for level in ("O1", "O2")
        for dtype in ("bfloat16", "float16")
    }
    results["train O0"] = train(shard(make_model()), "O0", None, rank, 2, clip_norm=0.5)
    results["one shard"] = train_by_hand(
        shard(make_model()), "O2", rank, 2, 1, put_inf("blocks.1.up.weight")
    )
    results["one 16-bit shard"] = train_by_hand(
        shard(make_model()), "O2", rank, 2, 1, put_inf("blocks.1.up.weight"), master="kahan"
    )
    results["train split"] = train(
        shard(make_model()), "O2", "bfloat16", rank, 2, clip_norm=0.5, master="split"
    )
    results["16-bit shards"] = half_shards.run()
    results["one batch"] = _overflow_of_one_batch(rank)
    results["unscaled"] = _unscaled_by_hand(rank)
    results["accumulate"] = _accumulate(rank)
    results["all-reduces"] = _count_all_reduces(rank)
    results["tensors"] = _unscale_tensors(rank)
    results["partial"] = _partial_gradients(rank)
    results["function"] = _function_step(rank)
    results["orders"] = _orders(rank)
    results["groups"] = _groups()
    results["reductions"] = {
        "default": _reduce({}, "bfloat16"),
        "grad_dtype": _reduce({}, "bfloat16", grad_dtype="bfloat16"),
        "policy without reduce_dtype": _reduce(
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)},
            "bfloat16",
        ),
    }
    results["refused"] = _refused(rank)
    results["batch norm"] = _batch_norm()
    results["undecorate"] = _undecorate(rank)
    results["eval"] = _evaluate(rank)
    results["check"] = _check_numerics(rank)
    results["tensor parallel"] = _tensor_parallel()
    return results


def _overflow_of_one_batch(rank: int) -> dict[str, Any]:
    """The data of rank 1 overflow in float16 at the second call of a `TrainStep`."""
    model = shard(make_model())
    step = mezzo.TrainStep(
        model, nn.functional.mse_loss, adamw(model), "O2", dtype="float16", scaler=scaler()
    )
    skipped, scales = [], []
    for number, batch in enumerate(make_batches()):
        x, y = part(batch, rank, 2)
        step(x, y * 1e6 if number == 1 and rank == 1 else y)
        skipped.append(step.skipped)
        scales.append(step.scaler.get_scale())
    return {
        "skipped": skipped,
        "scales": scales,
    }


def _unscaled_by_hand(rank: int) -> list[Any]:
    """An optimizer that is not decorated: `unscale_`, then torch's clipping, then `step`."""
    model = shard(make_model())
    optimizer, grad_scaler = adamw(model), scaler()
    outcomes = []
    for number, batch in enumerate(make_batches()):
        x, y = part(batch, rank, 2)
        with mezzo.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        grad_scaler.scale(loss).backward()
        if number == 1 and rank == 0:
            put_inf("head.bias")(model)
        grad_scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        outcomes.append((grad_scaler.step(optimizer).skipped, bool(norm.full_tensor().isfinite())))
        grad_scaler.update()
        optimizer.zero_grad()
    return outcomes


def _accumulate(rank: int) -> dict[str, Any]:
    """Weights after one update from two halves of a batch, in four ways."""
    x, y = part(make_batches()[0], rank, 2)
    halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
    weights = {}
    model = shard(make_model())
    optimizer = sgd(model)
    mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    for number, (one, target) in enumerate(halves):
        model.set_requires_gradient_sync(number == 1)
        # Before torch 2.13, mse_loss has no backward pass for a 16-bit and a float32 argument.
        (nn.functional.mse_loss(model(one).float(), target) / 2).backward()
    optimizer.step()
    weights["by hand"] = full_values(model)
    for name, calls in (("step", 2), ("flush", 3)):
        model = shard(make_model())
        step = mezzo.TrainStep(
            model, nn.functional.mse_loss, sgd(model), "O2", dtype="bfloat16", accumulate=calls
        )
        for one, target in halves:
            step(one, target)
        if calls == 3:
            step.flush()
        weights[name] = full_values(model)
    model = shard(make_model())
    mezzo.TrainStep(model, nn.functional.mse_loss, sgd(model), "O2", dtype="bfloat16")(x, y)
    weights["whole"] = full_values(model)
    return weights


def _count_all_reduces(rank: int) -> dict[str, int]:
    """Count the collectives of mezzo in one step, with and without a scaler."""
    counts = {}
    for dtype in ("float16", "bfloat16"):
        model = shard(make_model())
        optimizer, grad_scaler = adamw(model), scaler(dtype)
        mezzo.decorate(model, optimizer, "O2", dtype=dtype, clip_norm=0.5)
        x, y = part(make_batches()[0], rank, 2)
        loss = nn.functional.mse_loss(model(x).float(), y)
        (loss if grad_scaler is None else grad_scaler.scale(loss)).backward()
        with mock.patch.object(
            mesh.distributed, "all_reduce", side_effect=distributed.all_reduce
        ) as all_reduce:
            if grad_scaler is None:
                optimizer.step()
            else:
                result = grad_scaler.step(optimizer)
                grad_scaler.update()
        counts[dtype] = all_reduce.call_count
        if grad_scaler is not None and rank == 0:
            # One rank alone reads these: no collective may be needed.
            counts["read"] = int(result.skipped) + int(result.first_nonfinite is not None)
    return counts


def _unscale_tensors(rank: int) -> list[bool]:
    model = shard(make_model())
    x, y = part(make_batches()[0], rank, 2)
    nn.functional.mse_loss(model(x), y).backward()
    finite = gradients.unscale_tensors(model.parameters(), 2.0)
    if rank == 1:
        put_inf("head.weight")(model)
    return [finite, gradients.unscale_tensors(model.parameters(), 2.0)]


def _partial_gradients(rank: int) -> dict[str, Any]:
    """A replicated parameter whose gradient is a sum that was not added up yet."""
    device_mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(3), device_mesh, [Replicate()]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    results = {}
    for name, value in (("finite", 4.0), ("overflow", 3e38)):
        grad_scaler = mezzo.GradScaler("cpu", init_scale=2.0)
        grad_scaler.scale(torch.zeros(()))
        weight.grad = DTensor.from_local(torch.full((3,), value), device_mesh, [Partial()])
        skipped = grad_scaler.step(optimizer).skipped
        results[name] = (skipped, weight.to_local().tolist())
    return results


def _function_step(rank: int) -> dict[str, Any]:
    """A step over a user's function, several losses, and a step without gradients."""
    x, y = part(make_batches()[0], rank, 2)
    model = shard(make_model())
    optimizer = adamw(model)

    @mezzo.train_step(
        models=model, optimizers=optimizer, policy="O2", dtype="float16", scaler=scaler()
    )
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    losses = [mean_over(step(x, y)) for _ in range(3)]
    model = shard(make_model())
    optimizer = adamw(model)
    mezzo.decorate(model, optimizer, "O2", dtype="float16")
    several = mezzo.GradScaler("cpu", num_losses=2)
    loss = nn.functional.mse_loss(model(x).float(), y)
    unreached = message_of(lambda: several.backward(loss, loss_id=1, optimizers=optimizer))
    grad_scaler = scaler()
    grad_scaler.scale(loss)
    return {
        "falls": losses == sorted(losses, reverse=True),
        "unreached": unreached,
        "no gradients": message_of(lambda: grad_scaler.step(optimizer)),
        "cast": message_of(model.bfloat16),
        "moved": message_of(model.cpu),
    }


def _orders(rank: int) -> dict[str, str]:
    """Every wrong order of sharding, creating the optimizer and decorating."""
    x, y = part(make_batches()[0], rank, 2)
    messages = {}
    for level in ("O1", "O2"):
        # Without norms: torch refuses to shard 16-bit and float32 parameters together.
        model: Any = make_model().head
        optimizer = adamw(model)
        mezzo.decorate(model, optimizer, level, dtype="bfloat16")
        fully_shard(model)
        nn.functional.mse_loss(model(x).float(), y).backward()
        messages[f"decorated before, {level}"] = message_of(optimizer.step)
    model = make_model()
    optimizer = adamw(model)
    shard(model)
    messages["optimizer before"] = message_of(
        lambda: mezzo.decorate(model, optimizer, "O2", dtype="bfloat16")
    )
    model = make_model()
    step = mezzo.TrainStep(model, nn.functional.mse_loss, adamw(model), "O2", dtype="float16")
    shard(model)
    messages["step before"] = message_of(lambda: step(x, y))
    model = shard(make_model())
    model(x).sum().backward()
    messages["forward before"] = message_of(
        lambda: mezzo.decorate(model, adamw(model), "O2", dtype="bfloat16")
    )
    messages["forward before, O1"] = message_of(
        lambda: mezzo.decorate(model, adamw(model), "O1", dtype="bfloat16")
    )
    return messages


def _groups() -> dict[str, Any]:
    """The policies that decorate gives to groups, and the plan of a sharded model."""
    model = make_model()
    for block in model.blocks:
        fully_shard(block.norm)
    shard(model)
    plan = mezzo.plan(model, adamw(model), "O2", dtype="bfloat16")
    untouched = {str(group.policy) for group in fsdp_groups(model)}
    mezzo.decorate(model, adamw(model), "O2", dtype="bfloat16", grad_dtype="bfloat16")
    ours = MixedPrecisionPolicy(
        torch.bfloat16, torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=False
    )
    chosen = shard(make_model(), mp_policy=ours)
    mezzo.decorate(chosen, adamw(chosen), "O2", dtype="bfloat16")
    default = shard(make_model())
    mezzo.decorate(default, adamw(default), "O2", dtype="float16")
    return {
        "rows": {row.name: (row.change, row.reason) for row in plan.rows},
        "untouched": untouched == {str(MixedPrecisionPolicy())},
        "groups": [
            (type(group.module).__name__, group.policy.param_dtype, group.policy.reduce_dtype)
            for group in fsdp_groups(model)
        ],
        "chosen": {group.policy for group in fsdp_groups(chosen)} == {ours},
        "default": {
            (group.policy.param_dtype, group.policy.reduce_dtype, group.policy.cast_forward_inputs)
            for group in fsdp_groups(default)
        },
    }


def _reduce(sharding: dict[str, Any], dtype: str, **options: Any) -> tuple[str, set[str]]:
    """What the plan says of a weight, and the dtypes in which FSDP2 has reduced gradients."""
    model = shard(make_model(), **sharding)
    plan = mezzo.plan(model, adamw(model), "O2", dtype=dtype, **options)
    (reason,) = (row.reason for row in plan.rows if row.name == "head.weight")
    mezzo.decorate(model, adamw(model), "O2", dtype=dtype, **options)
    # The newer of the two names is the one that FSDP2 calls, if torch has it.
    name = next(one for one in _REDUCE_SCATTER if hasattr(distributed, one))
    reduce_scatter = getattr(distributed, name)
    with mock.patch.object(distributed, name, wraps=reduce_scatter) as collective:
        model(make_batches()[0][0]).float().sum().backward()
    given = [{**dict(enumerate(call.args)), **call.kwargs} for call in collective.call_args_list]
    dtypes = {one.dtype for call in given for one in call.values() if torch.is_tensor(one)}
    return reason, {str(one).removeprefix("torch.") for one in dtypes}


def _different_settings(rank: int) -> str:
    """The message of ranks that clip differently."""
    model = shard(make_model())
    step = mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        adamw(model),
        dtype="bfloat16",
        clip_norm=1.0 + rank,
        capture=False,
    )
    return message_of(lambda: step(*part(make_batches()[0], rank, 2)))


def _refused(rank: int) -> dict[str, str]:
    """What a sharded model does not support, and that an error changes nothing."""

    def decorate(model: nn.Module, policy: str = "O2", **options: Any) -> str:
        before = [group.policy for group in fsdp_groups(model)]
        message = message_of(
            lambda: mezzo.decorate(model, adamw(model), policy, dtype="bfloat16", **options)
        )
        assert [group.policy for group in fsdp_groups(model)] == before
        assert "forward" not in model.__dict__
        return message

    partly = make_model()
    fully_shard(partly.blocks[0])
    other = shard(make_model(), mp_policy=MixedPrecisionPolicy(torch.float16))
    convolution = fully_shard(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)))
    return {
        "settings": _different_settings(rank),
        "O3": decorate(shard(make_model()), "O3"),
        "no master": decorate(shard(make_model()), master="none"),
        "no optimizer": message_of(
            lambda: mezzo.decorate(shard(make_model()), None, dtype="bfloat16", master="split")
        ),
        "split in float16": message_of(
            lambda: mezzo.decorate(
                convolution, adamw(convolution), dtype="float16", master="split", keep_full=[]
            )
        ),
        "preset": decorate(shard(make_model()), preset="apex"),
        "partly": decorate(partly),
        "meta device": decorate(shard(make_model().to("meta"))),
        "other dtype": decorate(other),
        "keep_full": decorate(shard(make_model()), keep_full=["blocks.0.up"]),
        "batch norm": decorate(convolution),
        "channels_last": message_of(
            lambda: mezzo.TrainStep(
                convolution, nn.functional.mse_loss, adamw(convolution), channels_last=True
            )
        ),
        "convert": message_of(lambda: mezzo.convert(shard(make_model()), (torch.ones(2, 8),))),
        "advise": message_of(lambda: mezzo.advise(shard(make_model()), torch.ones(2, 8))),
        "capture": message_of(
            lambda: mezzo.TrainStep(
                partly, nn.functional.mse_loss, adamw(partly), dtype="bfloat16", capture=True
            )
        ),
    }


def _check_numerics(rank: int) -> dict[str, Any]:
    """Check the ops of a step of a sharded model, and of one whose shard has an infinity."""
    model = shard(make_model())
    step = mezzo.TrainStep(model, nn.functional.mse_loss, adamw(model), "O2", dtype="bfloat16")
    x, y = part(make_batches()[0], rank, 2)
    with mezzo.check_numerics() as clean:
        step(x, y)
    shards = model.blocks[0].up.weight.to_local().detach()
    shards[0, 0] = math.inf if rank == 1 else 0.0
    with mezzo.check_numerics(model, "record") as broken:
        (model.blocks[0].up.weight * 1.0).sum()
    return {
        "clean": len(clean.findings),
        "broken": [found.op for found in broken.findings],
    }


def _batch_norm() -> list[Any]:
    """A batch norm in a group of its own keeps float32 parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    fully_shard(model[1])
    fully_shard(model)
    step = mezzo.TrainStep(
        model, lambda out: out.square().mean(), adamw(model), "O2", dtype="bfloat16"
    )
    losses = [float(step(torch.ones(2, 1, 4, 4))) for _ in range(2)]
    return [str(model[1].weight.dtype), all(map(math.isfinite, losses))]


def _undecorate(rank: int) -> dict[str, Any]:
    x, _ = part(make_batches()[0], rank, 2)
    model = shard(make_model())
    mezzo.decorate(model, adamw(model), "O2", dtype="bfloat16")
    mezzo.undecorate(model)
    restored = {str(group.policy) for group in fsdp_groups(model)} == {str(MixedPrecisionPolicy())}
    output = model(x)
    model = shard(make_model())
    mezzo.decorate(model, adamw(model), "O2", dtype="bfloat16")
    model(x)
    return {
        "restored": restored,
        "dtype": str(output.dtype),
        "after a forward": message_of(lambda: mezzo.undecorate(model)),
        "still decorated": str(model(x).dtype),
    }


def _evaluate(rank: int) -> dict[str, Any]:
    """Evaluate a sharded model before its first training step."""
    x, y = part(make_batches()[0], rank, 2)
    model = shard(make_model())
    step = mezzo.TrainStep(model, nn.functional.mse_loss, adamw(model), "O2", dtype="bfloat16")
    sharded = mezzo.EvalStep(model)(x)
    whole = mezzo.EvalStep(make_model().eval(), "O2", dtype="bfloat16")(x)
    losses = [float(step(x, y)) for _ in range(2)]
    return {"outputs": (sharded.float(), whole.float()), "falls": losses[1] < losses[0]}


def _tensor_parallel() -> dict[str, Any]:
    device_mesh = init_device_mesh("cpu", (2,))
    model = split(make_model(), device_mesh)
    return {
        "train": train(split(make_model(), device_mesh), "O1", "float16", 0, 1, clip_norm=0.5),
        "one shard": train_by_hand(model, "O1", 0, 1, 1, put_inf("blocks.0.down.weight")),
        "O2": message_of(
            lambda: mezzo.decorate(split(make_model(), device_mesh), None, "O2", dtype="bfloat16")
        ),
    }


# -- four ranks ------------------------------------------------------------------------------------


def four_ranks(rank: int) -> dict[str, Any]:
    """Run every scenario of four ranks: hybrid sharding, and tensor parallelism with FSDP2."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    index = rank // 2

    def split_and_sharded() -> nn.Module:
        return shard(split(make_model(), both["tensor"]), mesh=both["data"])

    def clip(model: nn.Module, level: str, index: int, count: int) -> Any:
        return train(model, level, "float16", index, count, clip_norm=0.5)

    def cast_shards(model: nn.Module, index: int, count: int, master: str) -> Any:
        return train(model, "O2", "bfloat16", index, count, clip_norm=0.5, master=master)

    # Two pairs of ranks that train on their own, as a group within a larger one.
    return {
        "hybrid": clip(shard(make_model(), mesh=hybrid), "O2", rank, 4),
        "hybrid, one shard": train_by_hand(
            shard(make_model(), mesh=hybrid), "O2", rank, 4, 3, put_inf("blocks.0.up.weight")
        ),
        "hybrid, stochastic": cast_shards(shard(make_model(), mesh=hybrid), rank, 4, "stochastic"),
        "both, split": cast_shards(split_and_sharded(), index, 2, "split"),
        "both": clip(split_and_sharded(), "O2", index, 2),
        "both, one shard": train_by_hand(
            split_and_sharded(), "O2", index, 2, 1, put_inf("blocks.1.up.weight")
        ),
        "both, one norm": train_by_hand(
            split_and_sharded(), "O1", index, 2, 2, put_inf("blocks.1.norm.weight")
        ),
        "pairs": train_by_hand(
            shard(make_model(), mesh=both["data"]), "O2", index, 2, 0, put_inf("head.bias")
        )["skipped"],
    }
