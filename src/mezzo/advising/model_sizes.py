"""Sizes of the tensors of a model under a policy, by sharding group, without reading values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mezzo._dtypes import HALF_DTYPES
from mezzo._errors import PolicyError, UnsupportedError
from mezzo._torch import BatchOrInstanceNorm
from mezzo.advising.optimizer_states import OptimizerStates
from mezzo.policy.parse import Selectors, selectors
from mezzo.policy.policy import Policy
from mezzo.policy.types import NORMS, Level, Master, Selector
from mezzo.prepare.arguments import Targets, models_of, unwrapped
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.keep_full import KeepFull, read_keep_full
from mezzo.prepare.plan import PolicyArg, plan_tensors
from mezzo.prepare.plan_rows import PlannedTensor
from mezzo.scaling.gradients import parameters

SizesArg = nn.Module | float | Mapping[str, float]
"""A model, a number of parameters, or numbers of parameters by the name of their group."""

ROOT = ""
"""Name of the group of all parameters that are in no other group."""
_NOT_CAST = (nn.Embedding, nn.EmbeddingBag, *NORMS)
"""Modules whose weights autocast leaves in float32."""
_MATRIX = 2


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter: its shape, and its dtypes under the policy."""

    parameter: nn.Parameter
    name: str
    shape: tuple[int, ...]
    before: torch.dtype
    """Its dtype in the model that was passed."""
    after: torch.dtype
    """Its dtype when decorated in one process."""
    gathered: torch.dtype
    """The dtype in which FSDP2 gathers it."""
    has_master: bool
    is_matrix: bool
    """Whether 16-bit ops take it, of which autocast makes 16-bit copies."""
    group: str
    """The group with which FSDP2 gathers it: the name of a module."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def shard(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of the largest shard, to which FSDP2 pads the others.

        >>> weight, half = nn.Parameter(torch.empty(5, 3)), torch.bfloat16
        >>> Weight(weight, "weight", (5, 3), half, half, half, True, True, "").shard(2)
        (3, 3)
        """
        if ranks == 1:
            return self.shape
        rows, *rest = self.shape or (1,)
        return -(-rows // ranks), *rest


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """The tensors of a model under a policy."""

    policy: Policy
    dtype: torch.dtype | None
    """The 16-bit dtype; None at O0."""
    half: torch.dtype | None
    """The dtype that parameters are cast to; None if they are not."""
    master: Master
    weights: tuple[Weight, ...]
    buffers: int
    """Bytes of all buffers."""
    buffer_masters: int
    """Bytes of the float32 values of buffers that were cast."""
    has_tensors: bool
    """Whether a model was passed, so that small tensors besides each parameter are counted too."""

    @property
    def group_count(self) -> int:
        """Number of groups that FSDP2 gathers."""
        return len({weight.group for weight in self.weights})


def read_sizes(
    argument: SizesArg,
    policy: PolicyArg,
    overrides: dict[str, Any],
    states: OptimizerStates,
    groups: Selectors | None,
) -> ModelSizes:
    """Read a model or numbers of parameters; raise an error for what cannot be estimated."""
    is_model = isinstance(argument, nn.Module)
    model = _checked(argument) if isinstance(argument, nn.Module) else _sized_model(argument)
    _refuse_other_parameters(states, model)
    trained = [parameter for parameter in model.parameters() if states.updates(parameter)]
    # An optimizer without states stands for one that is known by its name only.
    stand_in = (torch.optim.SGD(trained, lr=0.0),) if trained else ()
    targets = Targets((model,), states.optimizers or stand_in)
    chosen, keep_full = read_keep_full(policy, overrides, targets.models)
    dtype = None if chosen.level is Level.O0 else chosen.dtype or torch.bfloat16
    planned = plan_tensors(targets, chosen, keep_full, dtype)
    group_of = _groups(model, None if groups is None else _selected(model, groups))
    weights = _gathered(
        list(_weights(model, planned.tensors, group_of)),
        planned.half,
        _required(model, keep_full),
        is_sharded=_is_fully_sharded(model),
    )
    buffers = [tensor for tensor in planned.tensors if tensor.info.is_buffer]
    others = [
        buffer
        for buffer in model.buffers()
        if not (buffer.is_floating_point() or buffer.is_complex())
    ]
    return ModelSizes(
        chosen,
        dtype,
        planned.half,
        planned.master,
        tuple(weights),
        sum(buffer.row.numel * buffer.row.after.itemsize for buffer in buffers)
        + sum(tensor.nbytes for tensor in others),
        sum(buffer.row.numel * torch.float32.itemsize for buffer in buffers if buffer.row.master),
        is_model,
    )


def _weights(
    model: nn.Module, tensors: tuple[PlannedTensor, ...], group_of: dict[int, str]
) -> Iterator[Weight]:
    matrices = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, _NOT_CAST)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= _MATRIX
    }
    for planned in tensors:
        tensor, row = planned.info.tensor, planned.row
        if isinstance(tensor, nn.Parameter):
            yield Weight(
                tensor,
                row.name,
                row.shape,
                row.before,
                row.after,
                row.after,
                row.master,
                id(tensor) in matrices,
                group_of[id(tensor)],
            )


# -- models ----------------------------------------------------------------------------------------


def _checked(argument: nn.Module) -> nn.Module:
    model = unwrapped(models_of(argument)[0])
    if any(decoration_of(module) is not None for module in model.modules()):
        raise PolicyError(
            "The model is decorated. Pass it before mezzo.decorate, or call"
            " mezzo.undecorate(model) first: the policy is applied to the plain model."
        )
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise PolicyError(
            f"{type(model).__name__} has no floating-point parameters. Pass a model with"
            " parameters, or their number: mezzo.estimate(8_000_000_000, ...)."
        )
    dimensions = 1 if _is_fully_sharded(model) else 0
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UnsupportedError(
                f"The parameter {name!r} is lazy and has no shape yet. Run the model on one batch"
                " first."
            )
        if _shards(parameter) > dimensions:
            raise UnsupportedError(
                f"The parameter {name!r} is sharded by tensor parallel, which is not estimated."
                " Pass the model before it was parallelized, or one that only fully_shard has"
                " sharded."
            )
    return model


def _refuse_other_parameters(states: OptimizerStates, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in states.optimizers:
        if any(id(parameter) not in own for parameter in parameters(optimizer)):
            raise PolicyError(
                f"{type(optimizer).__name__} has parameters that are not the model's. Pass the"
                " optimizers of this model, created after it was sharded, or a name such as"
                " 'AdamW'."
            )


def _sized_model(argument: Any) -> nn.Module:
    """Return a model on the meta device with one parameter for each number."""
    sizes = argument if isinstance(argument, Mapping) else {ROOT: argument}
    model = nn.Module()
    for name, count in sizes.items():
        if not _is_count(count):
            raise PolicyError(
                f"{count!r} is not a number of parameters. Pass a model, a whole number above 0, or"
                " such numbers by name: {'': 1_000_000, 'layers.0': 5_000_000}."
            )
        module = model
        for part in str(name).split(".") if name else ():
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        weight = torch.empty(int(count), 1, device="meta")
        module.register_parameter("weight", nn.Parameter(weight))
    if not sizes:
        raise PolicyError("The sizes are empty. Pass the number of parameters by name.")
    return model


def _is_count(value: Any) -> bool:
    """Return whether a value is a whole number above 0; 7e9 is one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 1 and float(value).is_integer()


# -- groups ----------------------------------------------------------------------------------------


def _groups(model: nn.Module, selected: dict[str, nn.Module] | None) -> dict[int, str]:
    """Return the name of the group of each parameter, by its id.

    The groups are those of `fully_shard` if it was called, else those selected, else the elements
    of the outermost lists of modules.
    """
    if _is_fully_sharded(model):
        modules = {
            name: module for name, module in model.named_modules() if _is_fsdp_module(module)
        }
    elif selected is not None:
        modules = selected
    else:
        modules = dict(_blocks(model))
    group_of: dict[int, str] = {}
    # Inner groups first, as with fully_shard.
    for name, module in reversed(modules.items()):
        for parameter in module.parameters():
            group_of.setdefault(id(parameter), name)
    for parameter in model.parameters():
        group_of.setdefault(id(parameter), ROOT)
    return group_of


def _blocks(module: nn.Module, name: str = ROOT) -> Iterator[tuple[str, nn.Module]]:
    """Yield the elements of the outermost lists of modules, by name.

    >>> layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    >>> [name for name, _ in _blocks(nn.ModuleDict({"head": nn.Linear(1, 1), "layers": layers}))]
    ['layers.0', 'layers.1']
    """
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    # The modules of sizes have a parameter each and no type.
    is_sized = type(module) is nn.Module
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if is_list and not isinstance(child, nn.ModuleList):
            yield path, child
        else:
            if is_sized and next(child.parameters(recurse=False), None) is not None:
                yield path, child
            yield from _blocks(child, path)


def _gathered(
    weights: list[Weight], half: torch.dtype | None, required: set[str], *, is_sharded: bool
) -> Iterator[Weight]:
    """Yield the weights with the groups and the dtypes in which O2 gathers them.

    FSDP2 gathers a group in one dtype: 16 bits, unless everything in it stays float32. Layer, group
    and RMS norms compute in float32 from 16-bit weights too; what else stays float32 has to be
    sharded by itself.
    """
    if half is None:
        yield from weights
        return
    if not is_sharded:
        mixed = {weight.group for weight in weights if weight.name not in required}
        weights = [
            replace(weight, group=weight.name.rpartition(".")[0])
            if weight.name in required and weight.group in mixed
            else weight
            for weight in weights
        ]
    in_half = {weight.group for weight in weights if weight.after in HALF_DTYPES}
    for weight in weights:
        yield replace(weight, gathered=half if weight.group in in_half else weight.after)


def _required(model: nn.Module, keep_full: KeepFull) -> set[str]:
    """Return the names of the parameters that have to be gathered in float32."""
    plain = {Selector.parse(kind) for kind in NORMS if kind is not BatchOrInstanceNorm}
    selectors = tuple(selector for selector in keep_full.selectors if selector not in plain)
    return set(replace(keep_full, selectors=selectors).reasons(model))


def _selected(model: nn.Module, groups: Selectors) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for selector in selectors(groups):
        matched = {
            name: module for name, module in model.named_modules() if selector.matches(name, module)
        }
        if not matched:
            raise PolicyError(
                f"groups={selector.text!r} matches no module of {type(model).__name__}. Pass names"
                " ('layers.*') or classes of the modules that fully_shard is called on."
            )
        found |= matched
    return {name: module for name, module in model.named_modules() if name in found}


def _is_fully_sharded(model: nn.Module) -> bool:
    return any(_is_fsdp_module(module) for module in model.modules())


def _is_fsdp_module(module: nn.Module) -> bool:
    # By name: importing torch.distributed.fsdp takes a second.
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _shards(parameter: nn.Parameter) -> int:
    """Return over how many dimensions of a mesh a DTensor is sharded; 0 for a plain tensor."""
    return sum(placement.is_shard() for placement in getattr(parameter, "placements", ()))
