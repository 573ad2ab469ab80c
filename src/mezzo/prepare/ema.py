"""`mezzo.EMA`: an exponential moving average of exact float32 weights, which it lends to the model for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo._errors import CheckpointError, PolicyError, UnsupportedError
from mezzo._torch import foreach_lerp_
from mezzo.autocasting.regions import clear_weight_cache
from mezzo.optim.master_weights import MasterWeights
from mezzo.prepare.arguments import Optimizer, models_of, unwrapped
from mezzo.prepare.decoration import Decoration
from mezzo.prepare.master_params import Exact, is_narrow, widened

_held: Callable[[Any, Any], Any] = dict.get
_SOME = 2**24
"""Elements whose float32 values are reconstructed at a time, which takes 20 bytes for each."""


class EMA:
    """An exponential moving average of a model's weights: `average = decay * average + (1 - decay) * weight` at each `update()`.

    It averages the float32 master weights, never the rounded 16-bit ones; at O1 and for a plain
    model the float32 parameters. It starts from the weights that the model has when it is made.
    Call `update()` after each optimizer step. A skipped step leaves the weights as they are, and
    they are averaged once more. With a captured `TrainStep` nothing changes: an update does not
    synchronize. With float32 masters it is a few launches, with split ones about one a parameter.

    With `use_buffers=True` floating-point buffers, such as the statistics of batch norm, are
    averaged too; without, and for other buffers, evaluation uses the model's own. It may be made
    before or after `decorate`. `state_dict()` goes into a checkpoint as any other value.

    >>> import mezzo
    >>> model = nn.Linear(4, 1)
    >>> step = mezzo.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), "O2", dtype="bfloat16")
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
            raise PolicyError(f"EMA averages one model, got {len(models)}. Make an EMA for each.")
        self.model = unwrapped(models[0])
        self.decay = decay
        """How much of the average is left by an update."""
        self._places = list(_places(self.model, buffers=use_buffers))
        self._averages: dict[str, torch.Tensor] = {}
        """Name → average: float32, or the tensor's own dtype where that is wider."""
        self._averaged = _Averaged(self.model, self._places, self._averages)

    @torch.no_grad()
    def update(self) -> None:
        """Average the current weights. Does not synchronize."""
        self._look().update(1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Let the model hold the averaged weights for as long as the `with` lasts; then it has its own back, to the bit.

        Parameters, masters and buffers are written in place, so that captured evaluation sees them
        too, and `model.state_dict()`, `mezzo.master_params` and `mezzo.save_checkpoint` give the
        averaged weights meanwhile. A training step inside is refused; whatever else writes weights
        or buffers is undone.
        """
        averaged = self._look()
        with ExitStack() as undo:
            # A region around the loop may hold 16-bit copies of the weights.
            undo.callback(clear_weight_cache)
            undo.callback(register_optimizer_step_pre_hook(_Refusal(averaged.tensors)).remove)
            for decoration in averaged.decorations:
                undo.callback(setattr, decoration, "lent", decoration.lent)
                decoration.lent = True
            averaged.lend(self._averages, undo)
            clear_weight_cache()
            yield self.model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages by name; live tensors, as those of a model's state."""
        self._look()
        return dict(self._averages)

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Go on from saved averages. What does not fit is refused before anything changes."""
        self._look()
        _refuse_misfits(self._averages, state_dict)
        for name, average in self._averages.items():
            average.copy_(state_dict[name])

    def _look(self) -> _Averaged:
        """What is averaged; found anew where the model was decorated, moved or laid out otherwise."""
        if not self._averaged.stands():
            self._averaged = _Averaged(self.model, self._places, self._averages)
        return self._averaged


Place = tuple[str, dict[str, Any], str]
"""A tensor of a model: its name, the dictionary of the module that holds it, and its name there."""


class _Averaged:
    """The tensors of a model that are averaged, as they are now, with what their exact values are read from."""

    def __init__(
        self, model: nn.Module, places: Sequence[Place], averages: dict[str, torch.Tensor]
    ) -> None:
        exact = Exact(model)
        self.decorations: list[Decoration] = exact.decorations
        self.tensors: list[torch.Tensor] = [own[name] for _, own, name in places]
        self._model, self._names = model, [name for name, _, _ in places]
        self._dicts, self._keys = [own for _, own, _ in places], [key for _, _, key in places]
        self._addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self._exact = exact
        masters = list(map(exact.masters, self.tensors))
        self._generations = [
            (one, one.generation) for one in dict.fromkeys(masters) if one is not None
        ]
        for name, tensor in zip(self._names, self.tensors, strict=True):
            averages[name] = _placed(averages.get(name), tensor, exact)
        self._groups = _grouped(self.tensors, masters, [averages[name] for name in self._names])

    def stands(self) -> bool:
        """Whether the tensors are still these, where they were, with the same masters. In loops that run in C: this is asked at every update."""
        return (
            all(map(is_, map(_held, self._dicts, self._keys), self.tensors))
            and list(map(torch.Tensor.data_ptr, self.tensors)) == self._addresses
            and all(masters.generation == generation for masters, generation in self._generations)
        )

    def update(self, weight: float) -> None:
        """Move the averages by a part of the way to the exact values."""
        for averages, read in self._groups:
            foreach_lerp_(averages, read(), weight)

    @torch.no_grad()
    def lend(self, averages: dict[str, torch.Tensor], undo: ExitStack) -> None:
        """Write the averages into the model; the stack gets what writes back every parameter and buffer as it was."""
        tensors = dict.fromkeys([*self.tensors, *self._model.parameters(), *self._model.buffers()])
        for tensor in tensors:
            masters = self._exact.masters(tensor)
            undo.callback(_hold(tensor) if masters is None else masters.backup(tensor))
        for name, tensor in zip(self._names, self.tensors, strict=True):
            masters = self._exact.masters(tensor)
            if masters is None:
                tensor.copy_(averages[name])
            else:
                masters.write(tensor, averages[name])


class _Refusal:
    """A hook of all optimizers while averaged weights are lent: those that would step them are refused."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._lent = set(map(id, tensors))

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step of lent weights."""
        if any(
            id(parameter) in self._lent
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise UnsupportedError(refused_while_lent(f"{type(optimizer).__name__}.step()"))


def refused_while_lent(what: str) -> str:
    """Why something that trains is refused."""
    return (
        f"{what} was called inside `with ema.applied()`: the model holds averaged weights, and goes"
        " back to its own afterwards. Train outside of the `with`."
    )


def _places(model: nn.Module, *, buffers: bool) -> Iterator[Place]:
    """Where the floating-point parameters of a model are, and its buffers if wanted; tied ones once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers) if buffers else (module._parameters,):
            for key, tensor in own.items():
                if (
                    tensor is not None
                    and id(tensor) not in seen
                    and (tensor.is_floating_point() or tensor.is_complex())
                ):
                    seen.add(id(tensor))
                    yield (f"{prefix}.{key}" if prefix else key), own, key


def _placed(average: torch.Tensor | None, tensor: torch.Tensor, exact: Exact) -> torch.Tensor:
    """An average on the device of its tensor and in its layout, for one launch takes many of them side by side."""
    if average is None:
        return exact.current(tensor).clone()
    if average.stride() == tensor.stride() and average.device == tensor.device:
        return average
    return torch.empty_like(tensor, dtype=average.dtype, requires_grad=False).copy_(average)


Group = tuple[list[torch.Tensor], Callable[[], list[torch.Tensor]]]
"""Averages of one device and dtype, and what reads the values that belong to them."""


def _grouped(
    tensors: list[torch.Tensor], masters: list[MasterWeights | None], averages: list[torch.Tensor]
) -> list[Group]:
    sorted_: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    sizes: dict[Any, int] = {}
    for tensor, keeper, average in zip(tensors, masters, averages, strict=True):
        kind = (keeper, tensor.device, tensor.dtype, average.dtype)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel()
        # Live tensors are read where they are, all at once; others are reconstructed some at a
        # time.
        part = 0 if keeper is None else sizes[kind] // _SOME
        sorted_.setdefault((kind, part), []).append((tensor, average))
    groups: list[Group] = []
    for ((keeper, *_), _), pairs in sorted_.items():
        own = [tensor for tensor, _ in pairs]
        groups.append(
            (
                [average for _, average in pairs],
                _reader(own) if keeper is None else keeper.reader(own),
            )
        )
    return groups


def _reader(tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """What reads tensors that have no masters: themselves, or float32 copies of 16-bit ones."""
    return (lambda: list(map(widened, tensors))) if is_narrow(tensors[0]) else (lambda: tensors)


def _hold(tensor: torch.Tensor) -> Callable[[], Any]:
    value = tensor.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            tensor.copy_(value)

    return restore


def _refuse_misfits(own: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    if not isinstance(state, dict) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise CheckpointError(
            "This is no state of an EMA, which is a dictionary of tensors. Pass what"
            " ema.state_dict() gave."
        )
    missing, unexpected = (
        [name for name in own if name not in state],
        [name for name in state if name not in own],
    )
    if missing or unexpected:
        raise CheckpointError(
            f"The saved average is of another model: it lacks {missing[:5] or 'nothing'} and also"
            f" has {unexpected[:5] or 'nothing'}. Make the EMA of the model that was saved, with"
            " the same use_buffers."
        )
    for name, average in own.items():
        if state[name].shape != average.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(state[name].shape)} in the saved average and"
                f" {tuple(average.shape)} in this model. Make the EMA of the model that was saved."
            )
