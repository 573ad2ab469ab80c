"""Tensors that are sharded over processes: their local shards, and sums over a device mesh.

FSDP2 and tensor parallelism make parameters and gradients `DTensor`s. Each process checks, unscales
and updates its own shards as plain tensors; one all-reduce of a sum of squares and a flag then
makes all processes clip and skip alike. Nothing here synchronizes with the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import distributed, nn

from mezzo._torch import foreach_norm, fsdp_shards, set_sharded_data

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_GRADIENT = attrgetter("grad")


def any_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether a tensor is a `DTensor`, as parameters of FSDP2 and tensor parallelism are.

    >>> any_sharded([torch.ones(2)])
    False
    """
    # No DTensor can exist before its module is imported, which takes half a second.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    # By the few types: a check of each of 400 tensors would take as long as checking their values.
    return kind is not None and any(
        issubclass(tensor_type, kind) for tensor_type in set(map(type, tensors))
    )


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether one tensor is a `DTensor`."""
    return any_sharded((tensor,))


def named_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model by name; those that FSDP2 holds gathered as their shards.

    These are what optimizers have. `model.named_parameters()` yields gathered ones after a forward
    pass without a backward pass.
    """
    shards = fsdp_shards(model)
    for name, parameter in model.named_parameters():
        yield name, shards.get(id(parameter), parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of this process, in the tensor's own memory; a plain tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: Any = tensor.to_local()
    # The result of a collective that is still running has a method to wait for it.
    finished: torch.Tensor = shard.wait() if hasattr(shard, "wait") else shard
    return finished


def sharded_like(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like another, with this shard; the shard if that is plain."""
    if not is_sharded(tensor):
        return shard
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import

    return DTensor.from_local(
        shard,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def placed_like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is whole on all ranks sharded like another; a sharded one as it is."""
    if not is_sharded(tensor) or is_sharded(values):
        return values
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - slow to import

    whole = values.to(tensor.device)
    # Without a source each rank takes its own part, and none is sent.
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def set_local(parameter: nn.Parameter, shard: torch.Tensor) -> None:
    """Replace the shard of a parameter, or the data of a plain one, by a tensor of any dtype."""
    if is_sharded(parameter):
        set_sharded_data(parameter, sharded_like(parameter, shard))
    else:
        parameter.data = shard


def first_element(parameter: torch.Tensor) -> int:
    """Return the number of a shard's first element in the whole parameter.

    Exact for FSDP2, which shards the first dimension. With tensor parallelism as well it is not,
    but it differs between shards and is the same for the replicas of a shard.
    """
    if not is_sharded(parameter):
        return 0
    like: Any = parameter
    position, shape = 0, list(parameter.shape)
    coordinates = zip(
        like.placements, like.device_mesh.shape, like.device_mesh.get_coordinate(), strict=True
    )
    for placement, count, coordinate in coordinates:
        if not placement.is_replicate():
            position = position * count + coordinate
            shape[placement.dim] = -(-shape[placement.dim] // count)
    return position * prod(shape)


def local_tensors(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the shards of this process of some tensors; plain tensors as they are."""
    return [local(tensor) for tensor in tensors] if any_sharded(tensors) else tensors


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this process's shards of the gradients of parameters.

    A gradient that is a partial sum, or placed differently from its parameter, is reduced first and
    becomes `parameter.grad`.
    """
    owners = list(parameters)
    gradients = list(map(_GRADIENT, owners))
    if not any_sharded(gradients):
        return gradients
    return [_placed(*pair) for pair in zip(owners, gradients, strict=True)]


def _placed(parameter: torch.Tensor, gradient: Any) -> torch.Tensor:
    if is_sharded(gradient) and is_sharded(parameter):
        placements = parameter.placements
        if gradient.placements != placements:
            gradient = gradient.redistribute(placements=placements)
            parameter.grad = gradient
    return local(gradient)


@dataclass(frozen=True)
class ProcessMesh:
    """The processes that hold a list of parameters, some of which are sharded."""

    size: int
    """Number of processes."""
    groups: tuple[Any, ...]
    """Process groups to add up over, one after the other; None is the default group."""

    def copies(self, parameter: torch.Tensor) -> int:
        """Return how many processes hold each element of a parameter.

        Parameters outside a mesh, or on a smaller one, are replicated over the other processes.
        """
        if not is_sharded(parameter):
            return self.size
        mesh, placements = parameter.device_mesh, parameter.placements
        replicated: list[int] = [
            count
            for count, placement in zip(mesh.shape, placements, strict=True)
            if placement.is_replicate()
        ]
        others: int = self.size // mesh.size()
        return prod(replicated) * others

    def square_sum(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return this process's part of the sum of squares of local gradients, in float64.

        Each element counts once in the sum over all processes, however many hold it.
        """
        by_copies: dict[int, list[torch.Tensor]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            by_copies.setdefault(self.copies(parameter), []).append(gradient)
        parts = [
            torch.stack(foreach_norm(same)).double().square().sum() / copies
            for copies, same in by_copies.items()
        ]
        return torch.stack(parts).sum()

    def reduce(
        self, square_sum: torch.Tensor | None, found_inf: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add up a sum of squares and a flag over all processes, in one all-reduce.

        Returns the sum in float64 and the flag in float32, 0 or 1.
        """
        zero = torch.zeros((), dtype=torch.float64, device=device)
        values = torch.stack(
            [zero if number is None else number.double() for number in (square_sum, found_inf)]
        )
        for group in self.groups:
            distributed.all_reduce(values, group=group)
        return values[0], values[1].clamp(max=1.0).float()


def mesh_of(parameters: Sequence[torch.Tensor]) -> ProcessMesh | None:
    """Return the processes that hold some parameters; None if no parameter is sharded.

    These are the processes of the smallest mesh that holds all parameters, or all processes of the
    default group if no mesh does.
    """
    if not any_sharded(parameters):
        return None
    # By identity: hashing a mesh is slow.
    meshes: dict[int, DeviceMesh] = {
        id(mesh): mesh
        for mesh in (parameter.device_mesh for parameter in parameters if is_sharded(parameter))
    }
    world = distributed.get_world_size()
    largest = max(meshes.values(), key=lambda mesh: mesh.size())
    if largest.size() < world and _holds_all(largest, meshes.values()):
        groups = tuple(largest.get_group(dimension) for dimension in range(largest.ndim))
        return ProcessMesh(largest.size(), groups)
    return ProcessMesh(world, (None,))


def _holds_all(largest: DeviceMesh, meshes: Iterable[DeviceMesh]) -> bool:
    ranks = set(largest.mesh.flatten().tolist())
    return all(mesh is largest or ranks.issuperset(mesh.mesh.flatten().tolist()) for mesh in meshes)
