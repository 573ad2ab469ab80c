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
from mezzo.compat.paddle._places import device_of
from mezzo.compat.paddle.amp import GradScaler, auto_cast, decorate
from mezzo.compat.paddle.hapi._training_loop import (
    Callback,
    TrainingLoop,
    count_inputs,
    to_device,
    to_list,
)
from mezzo.compat.paddle.metric import Metric
from mezzo.compat.paddle.nn._clip import ClipGradByGlobalNorm, ClipGradByNorm

__all__ = ["Callback", "Model"]


class Model(TrainingLoop):
    """`paddle.Model`: a network with its optimizer, loss and metrics.

    Differences from Paddle: the loss is computed inside `auto_cast`, so that a 16-bit output meets
    the black list; it works on a CPU.

    >>> from mezzo.compat import paddle
    >>> model = Model(nn.Linear(2, 1))
    >>> optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    >>> model.prepare(optimizer, nn.MSELoss(), amp_configs="O1")
    >>> len(model.train_batch([torch.ones(4, 2)], [torch.ones(4, 1)]))
    1
    """

    def __init__(self, network: nn.Module, inputs: Any = None, labels: Any = None) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"'network' should be a paddle.nn.Layer, got {type(network).__name__}.")
        self.network = network
        if all(parameter.device.type == "cpu" for parameter in network.parameters()):
            # torch's layers are made on the CPU; Paddle's are on the default place already.
            network.to(device_of(None))
        # Counted before `prepare`: the forward of a decorated network has the signature (*args,
        # **kwargs).
        self._num_inputs = len(to_list(inputs)) or count_inputs(network.forward)
        self._optimizer: Any = None
        self._loss: Any = None
        self._metrics: list[Metric] = []
        self._configs = AmpConfigs()
        self._scaler = GradScaler(enable=False)
        self.stop_training = False

    def prepare(
        self, optimizer: Any = None, loss: Any = None, metrics: Any = None, amp_configs: Any = None
    ) -> None:
        """Set the optimizer, loss, metrics and precision.

        `amp_configs` is a level, or a dict of `level` and arguments of `auto_cast` and
        `GradScaler`. The 16-bit dtype is float16.
        """
        if loss is not None and not callable(loss):
            raise TypeError(
                "'loss' must be a paddle.nn.Layer or any callable function, got"
                f" {type(loss).__name__}."
            )
        for metric in to_list(metrics):
            if not isinstance(metric, Metric):
                # Paddle's exception type.
                raise AssertionError(
                    f"{type(metric).__name__} is not sub class of Metric. Use metric.Accuracy(), or"
                    " your own subclass of metric.Metric."
                )
        configs = read_amp_configs(amp_configs, optimizer)
        # Both constructors check their arguments, before the network is changed.
        scaler = GradScaler(enable=configs.level != "O0", **configs.scaling)
        auto_cast(**configs.lists)
        if configs.level == "O2":
            decorate(models=self.network, optimizers=optimizer, level="O2")
        self._optimizer, self._loss, self._metrics = optimizer, loss, to_list(metrics)
        self._configs, self._scaler = configs, scaler

    # -- batches -----------------------------------------------------------------------------------

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """Train on one batch and return the losses, or (losses, metrics) if there are metrics.

        With `update=False` the gradients are accumulated into the next batch's. Synchronizes.
        """
        if self._optimizer is None or self._loss is None:
            raise RuntimeError(
                "The model is not prepared for training. Call model.prepare(optimizer, loss) first."
            )
        self.network.train()
        outputs, losses, labels = self._forward(inputs, labels)
        self._scaler.scale(sum(losses)).backward()
        if update:
            self._scaler.minimize(self._optimizer, losses[0])
            self._optimizer.zero_grad(set_to_none=True)
        return self._losses_and_metrics(outputs, losses, labels)

    @torch.no_grad()
    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """Evaluate one batch and return the losses, or (losses, metrics) if there are metrics."""
        self.network.eval()
        return self._losses_and_metrics(*self._forward(inputs, labels))

    @torch.no_grad()
    def predict_batch(self, inputs: Any) -> list[Any]:
        """Return the network's outputs for one batch, as arrays."""
        self.network.eval()
        with self._region():
            outputs = to_list(self.network(*to_device(inputs, self._device)))
        return [_to_array(output) for output in outputs]

    def _forward(self, inputs: Any, labels: Any) -> tuple[list[Any], list[torch.Tensor], list[Any]]:
        """Return the outputs, the losses, and the labels on the network's device."""
        labels = to_device(labels, self._device)
        with self._region():
            outputs = to_list(self.network(*to_device(inputs, self._device)))
            losses = [] if self._loss is None else to_list(self._loss(*outputs, *labels))
        return outputs, losses, labels

    def _losses_and_metrics(
        self, outputs: list[Any], losses: list[torch.Tensor], labels: list[Any]
    ) -> Any:
        values = [float(loss.detach()) for loss in losses]
        metrics = [
            metric.update(*to_list(metric.compute(*outputs, *labels))) for metric in self._metrics
        ]
        return (values, metrics) if metrics else values

    def _region(self) -> auto_cast:
        return auto_cast(
            enable=self._configs.level != "O0", level=self._configs.level, **self._configs.lists
        )

    @property
    def _device(self) -> torch.device:
        return next(iter(self.network.parameters())).device

    # -- parameters and files ----------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """Return the network's parameters."""
        return list(self.network.parameters())

    def save(self, path: str | os.PathLike[str], training: bool = True) -> None:
        """Save the network to `path.pdparams`, and the optimizer with its masters to `path.pdopt`.

        `training=False`, a program for inference in Paddle, raises: use `torch.export`.
        """
        if not training:
            raise ValueError(
                "save(training=False) writes a program for inference, which this dialect does not"
                " support. Use torch.export.save(torch.export.export(...))."
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
        """Load what `save` wrote; `skip_mismatch` leaves out entries that do not fit."""
        stem = os.fspath(path).removesuffix(".pdparams")
        state = _load_file(stem + ".pdparams")
        current = self.network.state_dict()
        if skip_mismatch:
            state = {
                name: value
                for name, value in state.items()
                if name in current and current[name].shape == value.shape
            }
        self.network.load_state_dict(state, strict=not skip_mismatch)
        if self._optimizer is not None and not reset_optimizer and Path(stem + ".pdopt").exists():
            self._optimizer.load_state_dict(_load_file(stem + ".pdopt"))


def _load_file(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _to_array(output: torch.Tensor) -> Any:
    on_cpu = output.detach().cpu()
    # numpy has no bfloat16.
    return (on_cpu.float() if on_cpu.dtype is torch.bfloat16 else on_cpu).numpy()


# -- amp_configs -----------------------------------------------------------------------------------

_LEVELS = ("O0", "O1", "O2")
_LIST_KEYS = ("custom_white_list", "custom_black_list")
_SCALING_KEYS = (
    "init_loss_scaling",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "use_dynamic_loss_scaling",
)


@dataclass(frozen=True)
class AmpConfigs:
    """Precision of a model: the checked `amp_configs` of `Model.prepare`."""

    level: str = "O0"
    lists: dict[str, Any] = field(default_factory=dict)
    """Arguments of `auto_cast`."""
    scaling: dict[str, Any] = field(default_factory=dict)
    """Arguments of `GradScaler`."""


def read_amp_configs(amp_configs: Any, optimizer: Any) -> AmpConfigs:
    """Read a level, or a dict of a level and arguments of `auto_cast` and `GradScaler`."""
    if not amp_configs:
        return AmpConfigs()
    if isinstance(amp_configs, str):
        if amp_configs not in _LEVELS:
            raise ValueError(
                f"The level of amp_configs should be 'O0', 'O1' or 'O2'. It is {amp_configs!r}."
            )
        _check_clipping(amp_configs, optimizer)
        return AmpConfigs(amp_configs)
    if not isinstance(amp_configs, dict):
        raise TypeError(
            f"amp_configs={amp_configs!r} is {type(amp_configs).__name__}. It should be 'O0', 'O1'"
            " or 'O2', or a dict with a 'level'."
        )
    level = amp_configs.get("level", "O1")
    if level not in _LEVELS:
        raise ValueError(f"amp_configs['level'] should be 'O0', 'O1' or 'O2'. It is {level!r}.")
    if level == "O0":
        return AmpConfigs()
    _check_keys(amp_configs.keys() - {"level"})
    # Paddle omits this check if the level is the only key.
    _check_clipping(level, optimizer)
    return AmpConfigs(
        level,
        {key: amp_configs[key] for key in _LIST_KEYS if key in amp_configs},
        {key: amp_configs[key] for key in _SCALING_KEYS if key in amp_configs},
    )


def _check_keys(keys: set[str]) -> None:
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
    unknown = sorted(keys - {*_LIST_KEYS, *_SCALING_KEYS})
    if unknown:
        raise ValueError(
            "Except for 'level', the keys of 'amp_configs' must be accepted by mixed precision"
            f" APIs, but ({', '.join(map(repr, unknown))}) could not be"
            f" recognized.{nearest(unknown[0], (*_LIST_KEYS, *_SCALING_KEYS))}"
        )


def _check_clipping(level: str, optimizer: Any) -> None:
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
