"""`mezzo.master_params`: the exact float32 weights of a model or an optimizer, by name."""

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


class MasterParams(dict[str, torch.Tensor]):
    """Exact weights by name. `AveragedModel.update_parameters` takes it in the place of the model."""

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], buffers: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__(tensors)
        self._buffers = list(buffers)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The weights in the order of the model's parameters."""
        return iter(self.values())

    def buffers(self) -> Iterator[torch.Tensor]:
        """The model's buffers, those that were made 16-bit in float32."""
        return iter(self._buffers)


def master_params(source: nn.Module | Optimizer) -> MasterParams:
    """Return the exact float32 weights by name: for logging, weight statistics, averages and the values of regularisers.

    Names are those of `model.named_parameters()`, tied weights once. An optimizer gives its own
    parameters, by the names that they have in the models that were decorated with it
    (`models[0].weight` where there are several); those of a plain optimizer have the names that it
    was given, or numbers.

    With float32 masters the tensors are the live masters: they change with the next step; clone
    what you keep. With split masters (and Kahan compensation, or 16-bit weights without masters)
    they are copies, made at every call. Parameters that stayed float32 are given as they are,
    detached. Do not write to them: load_state_dict sets exact weights. Does not synchronize.

    `torch.optim.swa_utils.AveragedModel`, made before `decorate`, averages them:
    `averaged.update_parameters(mezzo.master_params(model))`.

    >>> import mezzo
    >>> model = nn.Linear(1, 1, bias=False)
    >>> nn.init.ones_(model.weight).requires_grad
    True
    >>> model, optimizer = mezzo.decorate(model, torch.optim.SGD(model.parameters(), lr=0.001), dtype="bfloat16")
    >>> model(torch.ones(1, 1)).sum().backward()
    >>> optimizer.step()
    >>> model.weight.item(), mezzo.master_params(model)["weight"]  # bfloat16 has no number between 1.0 and 0.996
    (1.0, tensor([[0.9990]]))
    """
    if isinstance(source, Optimizer):
        return _of_optimizer(source)
    if not isinstance(source, nn.Module):
        raise PolicyError(
            f"master_params takes a model or an optimizer, got {type(source).__name__}. Pass the"
            " torch.nn.Module or torch.optim.Optimizer itself."
        )
    masters = Exact(source)
    return MasterParams(
        ((name, masters.current(one)) for name, one in source.named_parameters()),
        (masters.current(one) for one in source.buffers()),
    )


class Exact:
    """The masters of a model's tensors, wherever it was decorated."""

    def __init__(self, model: nn.Module) -> None:
        self.decorations = decorations_of(model)

    def masters(self, tensor: torch.Tensor) -> MasterWeights | None:
        """The masters of a tensor; None where it was not made 16-bit."""
        return next(
            (one.weights.masters(tensor) for one in self.decorations if tensor in one.weights), None
        )

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """The exact value of a tensor, see `master_params`."""
        return _current(tensor, self.masters(tensor))


def _of_optimizer(optimizer: Optimizer) -> MasterParams:
    bound, names = optimizer_binding(optimizer), _names(optimizer)
    found, number = MasterParams(()), 0
    for group in optimizer.param_groups:
        given = group.get(
            "param_names", [str(number + place) for place in range(len(group["params"]))]
        )
        number += len(group["params"])
        for parameter, name in zip(group["params"], given, strict=True):
            masters = bound.masters if bound is not None and parameter in bound.masters else None
            found[names.get(id(parameter), name)] = _current(parameter, masters)
    return found


def _names(optimizer: Optimizer) -> dict[int, str]:
    """The names of an optimizer's parameters in the models that it was decorated with."""
    decoration = decoration_of(optimizer)
    models = () if decoration is None else decoration.models
    return {
        id(parameter): f"models[{index}].{name}" if len(models) > 1 else name
        for index, model in reversed(list(enumerate(models)))
        for name, parameter in model.named_parameters()
    }


def _current(tensor: torch.Tensor, masters: MasterWeights | None) -> torch.Tensor:
    return widened(tensor) if masters is None else masters.current(tensor)


def is_narrow(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds fewer bits than float32."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float32 at least, detached: a copy where it is narrower, else the same memory."""
    return cast(tensor.detach(), torch.float32) if is_narrow(tensor) else tensor.detach()
