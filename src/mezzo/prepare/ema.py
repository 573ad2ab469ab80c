"""`mezzo.EMA`: an exponential moving average of float32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo._errors import CheckpointError, PolicyError, UnsupportedError
from mezzo._torch import foreach_lerp_, fsdp_shards, reshard
from mezzo.autocasting.regions import clear_weight_cache
from mezzo.optim.master_weights import MasterWeights
from mezzo.prepare.arguments import Optimizer, models_of, unwrapped
from mezzo.prepare.decoration import Decoration
from mezzo.prepare.master_params import ModelMasters, is_narrow, widened
from mezzo.scaling.mesh import local_tensors, placed_like

_get: Callable[[Any, Any], Any] = dict.get
_MAX_GROUP_ELEMENTS = 2**24
"""Elements whose float32 values are reconstructed at a time, which takes 20 bytes for each."""


class EMA:
    """An exponential moving average of a model's weights, in float32.

    Each `update()` computes `average = decay * average + (1 - decay) * weight`, from the float32
    master weights and never from rounded 16-bit ones; at O1 and for a plain model from the float32
    parameters. The average starts from the weights that the model has now. Call `update()` after
    each optimizer step, also with a captured `TrainStep`: it does not synchronize. A skipped step
    does not change the weights, which are then averaged once more. With float32 masters an update
    is a few launches, with split masters about one launch for each parameter.

    Create it before or after `decorate`. Save `ema.state_dict()` in a checkpoint as an extra value.

    Args:
        model: The model whose weights are averaged.
        decay: How much of the average an update keeps, from 0 to 1.
        use_buffers: Whether to average floating-point buffers too, such as the statistics of batch
            norm. Other buffers are never averaged: evaluation uses those of the model.

    >>> import mezzo
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loss_fn = nn.functional.mse_loss
    >>> step = mezzo.TrainStep(model, loss_fn, optimizer, "O2", dtype="bfloat16")
    >>> ema = mezzo.EMA(model, decay=0.9)
    >>> for _ in range(3):
    ...     loss = step(torch.ones(8, 4), torch.zeros(8, 1))
    ...     ema.update()
    >>> with torch.no_grad(), ema.applied():
    ...     averaged = model(torch.ones(1, 4))
    >>> bool((averaged == model(torch.ones(1, 4))).all())
    False
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.999, *, use_buffers: bool = False
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay <= 1.0:
            raise PolicyError(f"decay={decay!r}: it must be a number from 0 to 1, such as 0.999.")
        models = models_of(model)
        if len(models) != 1:
            raise PolicyError(f"EMA averages one model, got {len(models)}. Create an EMA for each.")
        self.model = unwrapped(models[0])
        self.decay = decay
        """How much of the average an update keeps."""
        self._places = list(_find_places(self.model, buffers=use_buffers))
        self._averages: dict[str, torch.Tensor] = {}
        """Name → average, in float32 or the dtype of the tensor if that is wider."""
        self._averaged = _Averaged(self.model, self._places, self._averages)

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average. Does not synchronize."""
        self._current().update(1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Use the averaged weights in the model inside a `with`; afterwards restore its own.

        Parameters, masters and buffers are written in place and restored to the bit. Captured
        evaluation steps, `model.state_dict()`, `mezzo.master_params` and `mezzo.save_checkpoint`
        use the averaged weights meanwhile. A training step inside raises an error; other changes of
        weights or buffers are undone. All ranks of a sharded model do this together.
        """
        averaged = self._current()
        with ExitStack() as undo:
            # An autocast region around the `with` may have cached 16-bit copies of the weights.
            undo.callback(clear_weight_cache)
            # Nor may a sharded model keep weights that it gathered before, or gathers inside.
            undo.callback(reshard, self.model)
            refusal = _RefuseSteps(averaged.tensors)
            undo.callback(register_optimizer_step_pre_hook(refusal).remove)
            for decoration in averaged.decorations:
                undo.enter_context(decoration.holding_averages())
            averaged.write_to_model(self._averages, undo)
            reshard(self.model)
            clear_weight_cache()
            yield self.model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages by name. The tensors are live, as those of a model's state dict."""
        self._current()
        return dict(self._averages)

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Continue from saved averages. A state that does not fit raises before any change."""
        self._current()
        _check_state_fits(self._averages, state_dict)
        for name, average in self._averages.items():
            average.copy_(placed_like(average, state_dict[name]))

    def _current(self) -> _Averaged:
        """Return the averaged tensors, found again if the model was decorated, moved or cast."""
        if not self._averaged.is_current():
            self._averaged = _Averaged(self.model, self._places, self._averages)
        return self._averaged


class _Place(NamedTuple):
    """Where a tensor is in a model."""

    name: str
    """Its qualified name."""
    tensors: dict[str, Any]
    """The parameters or buffers of its module."""
    key: str
    """Its name there."""


class _Averaged:
    """The tensors of a model that are averaged, with their averages and masters."""

    def __init__(
        self, model: nn.Module, places: Sequence[_Place], averages: dict[str, torch.Tensor]
    ) -> None:
        self._model, self._masters = model, ModelMasters(model)
        self.decorations: list[Decoration] = self._masters.decorations
        self._shards = fsdp_shards(model)
        self.tensors: list[torch.Tensor] = [
            self._shard(place.tensors[place.key]) for place in places
        ]
        self._names = [place.name for place in places]
        self._dicts, self._keys = (
            [place.tensors for place in places],
            [place.key for place in places],
        )
        self._addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        masters = list(map(self._masters.masters, self.tensors))
        self._generations = [
            (master, master.generation) for master in dict.fromkeys(masters) if master is not None
        ]
        for name, tensor in zip(self._names, self.tensors, strict=True):
            averages[name] = _average_for(tensor, averages.get(name), self._masters)
        self._groups = _group(self.tensors, masters, [averages[name] for name in self._names])

    def _shard(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shard of a parameter that FSDP2 holds gathered; other tensors as they are."""
        return self._shards.get(id(tensor), tensor)

    def is_current(self) -> bool:
        """Return whether the model still has these tensors, at their addresses, and masters.

        Loops run in C, because every update calls this.
        """
        return (
            all(map(is_, map(_get, self._dicts, self._keys), self.tensors))
            and list(map(torch.Tensor.data_ptr, self.tensors)) == self._addresses
            and all(masters.generation == generation for masters, generation in self._generations)
        )

    def update(self, weight: float) -> None:
        """Interpolate from the averages to the current float32 values by a weight."""
        for averages, read in self._groups:
            foreach_lerp_(local_tensors(averages), local_tensors(read()), weight)

    @torch.no_grad()
    def write_to_model(self, averages: dict[str, torch.Tensor], undo: ExitStack) -> None:
        """Write the averages to the model; `undo` gets what restores all parameters and buffers."""
        parameters = map(self._shard, self._model.parameters())
        tensors = dict.fromkeys([*self.tensors, *parameters, *self._model.buffers()])
        for tensor in tensors:
            masters = self._masters.masters(tensor)
            undo.callback(_backup(tensor) if masters is None else masters.backup(tensor))
        for name, tensor in zip(self._names, self.tensors, strict=True):
            masters = self._masters.masters(tensor)
            if masters is None:
                tensor.copy_(averages[name])
            else:
                masters.write(tensor, averages[name])


class _RefuseSteps:
    """A step hook of all optimizers that raises if they would update averaged weights."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._averaged = set(map(id, tensors))

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise if a parameter of the optimizer holds an averaged weight."""
        if any(
            id(parameter) in self._averaged
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise UnsupportedError(averages_refusal(f"{type(optimizer).__name__}.step()"))


def averages_refusal(what: str) -> str:
    """Return the message of the error for training inside `EMA.applied()`."""
    return (
        f"{what} was called inside `with ema.applied()`: the model holds averaged weights, and its"
        " own are restored afterwards. Train outside of the `with`."
    )


def _find_places(model: nn.Module, *, buffers: bool) -> Iterator[_Place]:
    """Yield the places of floating-point parameters, and of buffers if wanted; tied ones once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers) if buffers else (module._parameters,):
            for key, tensor in tensors.items():
                if (
                    tensor is not None
                    and id(tensor) not in seen
                    and (tensor.is_floating_point() or tensor.is_complex())
                    # The adjacency of a graph is a constant.
                    and tensor.layout is torch.strided
                ):
                    seen.add(id(tensor))
                    yield _Place(f"{prefix}.{key}" if prefix else key, tensors, key)


def _average_for(
    tensor: torch.Tensor, average: torch.Tensor | None, masters: ModelMasters
) -> torch.Tensor:
    """Return an average with the device and strides of its tensor, as foreach ops need it."""
    if average is None:
        return masters.current(tensor).clone()
    if average.stride() == tensor.stride() and average.device == tensor.device:
        return average
    return torch.empty_like(tensor, dtype=average.dtype, requires_grad=False).copy_(average)


class _Group(NamedTuple):
    """Averages of one device and dtype, and a function that reads the values to add to them."""

    averages: list[torch.Tensor]
    read: Callable[[], list[torch.Tensor]]


def _group(
    tensors: list[torch.Tensor], masters: list[MasterWeights | None], averages: list[torch.Tensor]
) -> list[_Group]:
    pairs_by_key: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    sizes: dict[Any, int] = {}
    for tensor, of_tensor, average in zip(tensors, masters, averages, strict=True):
        key = (of_tensor, tensor.device, tensor.dtype, average.dtype)
        sizes[key] = sizes.get(key, 0) + tensor.numel()
        # Live tensors are read in place, all at once; others are reconstructed in parts, to limit
        # the memory.
        part = 0 if of_tensor is None else sizes[key] // _MAX_GROUP_ELEMENTS
        pairs_by_key.setdefault((key, part), []).append((tensor, average))
    groups = []
    for ((of_group, *_), _), pairs in pairs_by_key.items():
        group_tensors = [tensor for tensor, _ in pairs]
        read = _reader(group_tensors) if of_group is None else of_group.reader(group_tensors)
        groups.append(_Group([average for _, average in pairs], read))
    return groups


def _reader(tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Return a function that reads tensors without masters; 16-bit ones as float32 copies."""
    return (lambda: list(map(widened, tensors))) if is_narrow(tensors[0]) else (lambda: tensors)


def _backup(tensor: torch.Tensor) -> Callable[[], Any]:
    value = tensor.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            tensor.copy_(value)

    return restore


def _check_state_fits(averages: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    if not isinstance(state, dict) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise CheckpointError(
            "This is not the state of an EMA, which is a dictionary of tensors. Pass what"
            " ema.state_dict() returned."
        )
    missing = [name for name in averages if name not in state]
    unexpected = [name for name in state if name not in averages]
    if missing or unexpected:
        raise CheckpointError(
            f"The saved average is of another model: it lacks {missing[:5] or 'nothing'} and also"
            f" has {unexpected[:5] or 'nothing'}. Create the EMA of the model that was saved, with"
            " the same use_buffers."
        )
    for name, average in averages.items():
        if state[name].shape != average.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(state[name].shape)} in the saved average and"
                f" {tuple(average.shape)} in this model. Create the EMA of the model that was"
                " saved."
            )
