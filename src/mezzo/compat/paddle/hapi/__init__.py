"""`paddle.Model`: prepare, fit, evaluate, predict, save and load."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezzo._errors import nearest
from mezzo._files import atomic_writer
from mezzo.compat.paddle.amp import GradScaler, auto_cast, decorate
from mezzo.compat.paddle.hapi._training_loop import Callback, Passes, inputs_taken, listed, placed
from mezzo.compat.paddle.metric import Metric
from mezzo.compat.paddle.nn import ClipGradByGlobalNorm, ClipGradByNorm

_LEVELS = ("O0", "O1", "O2")
_LISTS = ("custom_white_list", "custom_black_list")
_SCALING = (
    "init_loss_scaling",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "use_dynamic_loss_scaling",
)


@dataclass(frozen=True)
class AmpConfigs:
    """What a model trains in."""

    level: str = "O0"
    lists: dict[str, Any] = field(default_factory=dict)
    """For `auto_cast`."""
    scaling: dict[str, Any] = field(default_factory=dict)
    """For `GradScaler`."""


def read_amp_configs(words: Any, optimizer: Any) -> AmpConfigs:
    """Read a level, or a level and what `auto_cast` and `GradScaler` take."""
    if not words:
        return AmpConfigs()
    if isinstance(words, str):
        if words not in _LEVELS:
            raise ValueError(
                f"The level of amp_configs should be 'O0', 'O1' or 'O2'. It is {words!r}."
            )
        _refuse_clipping(words, optimizer)
        return AmpConfigs(words)
    if not isinstance(words, dict):
        raise TypeError(
            f"amp_configs={words!r} is {type(words).__name__}. It should be 'O0', 'O1' or 'O2', or"
            " a dict with a 'level'."
        )
    level = words.get("level", "O1")
    if level not in _LEVELS:
        raise ValueError(f"amp_configs['level'] should be 'O0', 'O1' or 'O2'. It is {level!r}.")
    if level == "O0":
        return AmpConfigs()
    _refuse_keys(words.keys() - {"level"})
    # Paddle forgets to ask where the level is the only key.
    _refuse_clipping(level, optimizer)
    return AmpConfigs(
        level,
        {key: words[key] for key in _LISTS if key in words},
        {key: words[key] for key in _SCALING if key in words},
    )


def _refuse_keys(keys: set[str]) -> None:
    if "use_pure_fp16" in keys:
        raise ValueError(
            "'use_pure_fp16' is an invalid parameter, the level of mixed precision training only"
            " depends on 'O1' or 'O2'."
        )
    if "use_fp16_guard" in keys:
        raise ValueError(
            "'use_fp16_guard' is supported in static graph mode only, and Model runs eagerly here."
            " Use static.amp.decorate."
        )
    if "custom_black_varnames" in keys:
        raise ValueError(
            "'custom_black_varnames' names variables, which have no names here. Use"
            " custom_black_list."
        )
    strange = sorted(keys - {*_LISTS, *_SCALING})
    if strange:
        raise ValueError(
            "Except for 'level', the keys of 'amp_configs' must be accepted by mixed precision"
            f" APIs, but ({', '.join(map(repr, strange))}) could not be"
            f" recognized.{nearest(strange[0], (*_LISTS, *_SCALING))}"
        )


def _refuse_clipping(level: str, optimizer: Any) -> None:
    clip = getattr(optimizer, "_grad_clip", None)
    if (
        level == "O2"
        and clip is not None
        and not isinstance(clip, ClipGradByGlobalNorm | ClipGradByNorm)
    ):
        raise AssertionError(
            "Only ClipGradByNorm and ClipGradByGlobalNorm are supported in amp training with"
            f" level=O2 currently. It is {clip!r}."
        )


class Model(Passes):
    """A network with what trains it.

    It differs from Paddle's where that surprises: the loss is computed inside `auto_cast`, so that
    a 16-bit output meets the black list; it works on a CPU.

    >>> from mezzo.compat import paddle
    >>> model = Model(nn.Linear(2, 1))
    >>> optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    >>> model.prepare(optimizer, nn.MSELoss(), amp_configs="O1")
    >>> len(model.train_batch([torch.ones(4, 2)], [torch.ones(4, 1)]))
    1
    """

    # Labels are what inputs leave.
    def __init__(self, network: nn.Module, inputs: Any = None, labels: Any = None) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"'network' should be a torch.nn.Module, got {type(network).__name__}.")
        self.network = network
        # Asked now: a decorated network's forward takes anything.
        self._taken = len(listed(inputs)) or inputs_taken(network.forward)
        self._optimizer: Any = None
        self._loss: Any = None
        self._metrics: list[Metric] = []
        self._configs = AmpConfigs()
        self._scaler = GradScaler(enable=False)
        self.stop_training = False

    def prepare(
        self, optimizer: Any = None, loss: Any = None, metrics: Any = None, amp_configs: Any = None
    ) -> None:
        """Take what trains the network. `amp_configs` is a level, or a dictionary of `level` and arguments of `auto_cast` and `GradScaler`; 16 bits are float16."""
        if loss is not None and not callable(loss):
            raise TypeError(
                "'loss' must be a torch.nn.Module or any callable function, got"
                f" {type(loss).__name__}."
            )
        for one in listed(metrics):
            if not isinstance(one, Metric):
                # Paddle's.
                raise AssertionError(
                    f"{type(one).__name__} is not sub class of Metric. Use metric.Accuracy(), or"
                    " your own subclass of metric.Metric."
                )
        configs = read_amp_configs(amp_configs, optimizer)
        # Whatever is refused is refused before the network changes.
        scaler = GradScaler(enable=configs.level != "O0", **configs.scaling)
        auto_cast(**configs.lists)
        if configs.level == "O2":
            decorate(models=self.network, optimizers=optimizer, level="O2")
        self._optimizer, self._loss, self._metrics = optimizer, loss, listed(metrics)
        self._configs, self._scaler = configs, scaler

    # -- batches -----------------------------------------------------------------------------------

    # Paddle's call shape.
    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """Train on a batch; without `update` its gradients are added to those of the next. Gives the loss, and beside it the metrics if there are any."""
        if self._optimizer is None or self._loss is None:
            raise RuntimeError(
                "The model is not prepared for training. Call model.prepare(optimizer, loss) first."
            )
        self.network.train()
        outputs, losses, given = self._computed(inputs, labels)
        self._scaler.scale(sum(losses)).backward()
        if update:
            self._scaler.minimize(self._optimizer, losses[0])
            self._optimizer.zero_grad(set_to_none=True)
        return self._told(outputs, losses, given)

    @torch.no_grad()
    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """The loss of a batch, and the metrics."""
        self.network.eval()
        return self._told(*self._computed(inputs, labels))

    @torch.no_grad()
    def predict_batch(self, inputs: Any) -> list[Any]:
        """The network's outputs, as arrays."""
        self.network.eval()
        with self._region():
            outputs = listed(self.network(*placed(inputs, self._device)))
        return [_array(output) for output in outputs]

    def _computed(
        self, inputs: Any, labels: Any
    ) -> tuple[list[Any], list[torch.Tensor], list[Any]]:
        given = placed(labels, self._device)
        with self._region():
            outputs = listed(self.network(*placed(inputs, self._device)))
            losses = [] if self._loss is None else listed(self._loss(*outputs, *given))
        return outputs, losses, given

    def _told(self, outputs: list[Any], losses: list[torch.Tensor], labels: list[Any]) -> Any:
        values = [float(loss.detach()) for loss in losses]
        metrics = [
            metric.update(*listed(metric.compute(*outputs, *labels))) for metric in self._metrics
        ]
        return (values, metrics) if metrics else values

    def _region(self) -> auto_cast:
        return auto_cast(
            enable=self._configs.level != "O0", level=self._configs.level, **self._configs.lists
        )

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    # -- parameters --------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """The network's parameters."""
        return list(self.network.parameters())

    # Paddle's call shape.
    def save(self, path: str | os.PathLike[str], training: bool = True) -> None:
        """Save the network to `path.pdparams` and the optimizer, masters included, to `path.pdopt`."""
        if not training:
            raise ValueError(
                "save(training=False) writes a program for inference, which is torch.export's work"
                " here: torch.export.save(torch.export.export(...))."
            )
        parts = {".pdparams": self.network, ".pdopt": self._optimizer}
        for ending, part in parts.items():
            if part is not None:
                Path(os.fspath(path)).parent.mkdir(parents=True, exist_ok=True)
                with atomic_writer(os.fspath(path) + ending) as file:
                    torch.save(part.state_dict(), file)

    def load(
        self,
        path: str | os.PathLike[str],
        skip_mismatch: bool = False,
        reset_optimizer: bool = False,
    ) -> None:
        """Load what `save` saved; `skip_mismatch` leaves out what does not fit the network."""
        stem = os.fspath(path).removesuffix(".pdparams")
        state = _loaded(stem + ".pdparams")
        own = self.network.state_dict()
        if skip_mismatch:
            state = {
                name: value
                for name, value in state.items()
                if name in own and own[name].shape == value.shape
            }
        self.network.load_state_dict(state, strict=not skip_mismatch)
        if self._optimizer is not None and not reset_optimizer and Path(stem + ".pdopt").exists():
            self._optimizer.load_state_dict(_loaded(stem + ".pdopt"))


def _loaded(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _array(output: torch.Tensor) -> Any:
    held = output.detach().cpu()
    # numpy has no bfloat16.
    return (held.float() if held.dtype is torch.bfloat16 else held).numpy()


__all__ = ["Callback", "Model"]
