"""`mezzo.master_params`: the float32 master weights of a model or an optimizer, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from mezzo._casting import cast
from mezzo._errors import PolicyError
from mezzo.optim.binding import optimizer_binding
from mezzo.optim.master_weights import MasterWeights
from mezzo.prepare.arguments import Optimizer
from mezzo.prepare.decoration import decoration_of
from mezzo.prepare.model_state_dict import decorations_of
from mezzo.scaling.mesh import named_shards


class MasterParams(dict[str, torch.Tensor]):
    """Float32 weights by name.

    `torch.optim.swa_utils.AveragedModel.update_parameters` accepts it instead of a model.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], buffers: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__(tensors)
        self._buffers = list(buffers)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return the weights in the order of the model's parameters."""
        return iter(self.values())

    def buffers(self) -> Iterator[torch.Tensor]:
        """Return the model's buffers, in float32 if `decorate` has cast them."""
        return iter(self._buffers)


def master_params(source: nn.Module | Optimizer) -> MasterParams:
    """Return float32 weights by name: for logging, statistics, averages and regularizers.

    With float32 masters the tensors are the live masters, which change with the next step: clone
    what you keep. With split masters, Kahan compensation or no masters they are copies, made at
    every call. Parameters that stayed float32 are returned themselves, detached. Do not write to
    these tensors; load exact weights with `model.load_state_dict`. Does not synchronize.

    An `AveragedModel` of torch that was created before `decorate` can average them:
    `averaged.update_parameters(mezzo.master_params(model))`.

    Args:
        source: A model or an optimizer, decorated or not.

    Returns:
        A dictionary. The names for a model are those of `model.named_parameters()`, with tied
        weights once. The parameters of a decorated optimizer have their names in the models that
        were decorated with it (`models[0].weight` if there are several); those of a plain optimizer
        have the names that it was created with, or numbers.

    >>> import mezzo
    >>> model = nn.Linear(1, 1, bias=False)
    >>> nn.init.ones_(model.weight).requires_grad
    True
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    >>> model, optimizer = mezzo.decorate(model, optimizer, dtype="bfloat16")
    >>> model(torch.ones(1, 1)).sum().backward()
    >>> optimizer.step()
    >>> model.weight.item()  # bfloat16 has no number between 1.0 and 0.996
    1.0
    >>> mezzo.master_params(model)["weight"]
    tensor([[0.9990]])
    """
    if isinstance(source, Optimizer):
        return _of_optimizer(source)
    if not isinstance(source, nn.Module):
        raise PolicyError(
            f"master_params takes a model or an optimizer, got {type(source).__name__}. Pass the"
            " torch.nn.Module or torch.optim.Optimizer itself."
        )
    masters = ModelMasters(source)
    return MasterParams(
        ((name, masters.current(parameter)) for name, parameter in named_shards(source)),
        (masters.current(buffer) for buffer in source.buffers()),
    )


class ModelMasters:
    """The masters of a model's tensors, of all decorations that these belong to."""

    def __init__(self, model: nn.Module) -> None:
        self.decorations = decorations_of(model)

    def masters(self, tensor: torch.Tensor) -> MasterWeights | None:
        """Return the masters of a tensor; None if `decorate` has not cast it."""
        return next(
            (
                decoration.weights.masters(tensor)
                for decoration in self.decorations
                if tensor in decoration.weights
            ),
            None,
        )

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a tensor, as `master_params` does."""
        return _current(tensor, self.masters(tensor))


def _of_optimizer(optimizer: Optimizer) -> MasterParams:
    binding, model_names = optimizer_binding(optimizer), _names_in_models(optimizer)
    masters = None if binding is None else binding.masters
    values, count = MasterParams(()), 0
    for group in optimizer.param_groups:
        numbers = [str(count + index) for index in range(len(group["params"]))]
        count += len(group["params"])
        group_names = group.get("param_names", numbers)
        for parameter, name in zip(group["params"], group_names, strict=True):
            has_master = masters is not None and parameter in masters
            value = _current(parameter, masters if has_master else None)
            values[model_names.get(id(parameter), name)] = value
    return values


def _names_in_models(optimizer: Optimizer) -> dict[int, str]:
    """Return the names of an optimizer's parameters in the models it was decorated with."""
    decoration = decoration_of(optimizer)
    models = () if decoration is None else decoration.models
    return {
        id(parameter): f"models[{index}].{name}" if len(models) > 1 else name
        for index, model in reversed(list(enumerate(models)))
        for name, parameter in named_shards(model)
    }


def _current(tensor: torch.Tensor, masters: MasterWeights | None) -> torch.Tensor:
    return widened(tensor) if masters is None else masters.current(tensor)


def is_narrow(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a floating-point dtype of fewer bits than float32."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor detached and at least in float32: a copy if it is narrower."""
    return cast(tensor.detach(), torch.float32) if is_narrow(tensor) else tensor.detach()
