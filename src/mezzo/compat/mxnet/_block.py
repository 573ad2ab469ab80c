"""Converted networks: convert on the first call, run, save, load."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from mezzo._casting import cast, map_tensors
from mezzo._errors import ConversionError, UnsupportedError
from mezzo._torch import pytree
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.compat.mxnet._ndarray import as_tensor, on_arrays
from mezzo.compat.mxnet._params import write_params
from mezzo.conversion.convert import convert
from mezzo.conversion.converted import Converted
from mezzo.policy.policy import Policy
from mezzo.policy.types import Rule

_MODULE_OPS: Mapping[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.MultiheadAttention: "linear",
}
"""The op whose rule decides the stored dtype of a module's parameters, for a network that is not
converted yet."""


@dataclass(frozen=True)
class ConvertRequest:
    """Options of a conversion."""

    policy: Policy
    excluded: list[str] = field(default_factory=list)
    """Names or globs of modules or graph nodes that stay float32."""
    cast_params: bool = False
    """Whether parameters are stored in 16 bits instead of cast at every call."""


def expected_params(network: nn.Module, request: ConvertRequest) -> dict[str, torch.Tensor]:
    """Return parameters and buffers in the dtypes that a conversion will store them in.

    Before the first example this is known for the modules of `_MODULE_OPS`.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> request = ConvertRequest(Policy("O1", "float16", preset="mxnet"), cast_params=True)
    >>> stored = expected_params(net, request)
    >>> stored["0.weight"].dtype, stored["1.weight"].dtype
    (torch.float16, torch.float32)
    """
    half = {
        f"{path}.{name}" if path else name
        for path, module in network.named_modules()
        if request.cast_params and _is_stored_in_half(request, path, module)
        for name, _ in module.named_parameters(recurse=False)
    }
    dtype = request.policy.dtype or torch.float16
    state = {name: value.detach() for name, value in network.state_dict().items()}
    return {
        name: cast(value, dtype) if name in half and value.dtype is torch.float32 else value
        for name, value in state.items()
    }


def _is_stored_in_half(request: ConvertRequest, path: str, module: nn.Module) -> bool:
    op = next((op for cls, op in _MODULE_OPS.items() if isinstance(module, cls)), None)
    if op is None or any(
        fnmatchcase(path, name) or path.startswith(f"{name}.") for name in request.excluded
    ):
        return False
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    return request.policy.explain(op, device=device).rule is Rule.HALF


_log = logging.getLogger()


class Block(nn.Module):
    """A network that `mezzo.convert` converts on its first call, or by `prepare` for an example.

    Inputs of a new shape are converted for as well. It is a module: `state_dict` has the float32
    network under `network.`, and after `to` or `load_state_dict` the next call converts again. It
    stays in evaluation mode, since a converted network is for inference. Takes arrays of MXNet too.
    """

    def __init__(self, network: nn.Module, request: ConvertRequest, device: Any = None) -> None:
        super().__init__()
        # A copy: the original network may be trained further.
        self.network = copy.deepcopy(network).to(device)
        self._request = request
        self._reset()
        self.eval()
        self.register_load_state_dict_post_hook(_reset_after_load)

    def _reset(self) -> None:
        """Forget the converted programs, which contain the parameters."""
        self._examples: list[tuple[Any, ...]] = []
        self._converted: Converted | None = None
        self._any_batch = True

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: a converted network is for inference."""
        return super().train(mode=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._reset()
        applied: Self = super()._apply(fn, recurse)
        return applied

    @property
    def converted(self) -> Converted | None:
        """The converted model with its `plan` and `casts`; None before the first example."""
        return self._converted

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, in their stored dtypes."""
        if self._converted is not None:
            return dict(self._converted._converted.programs[0].exported.state_dict)
        return expected_params(self.network, self._request)

    def collect_params(self) -> dict[str, torch.Tensor]:
        """Return `params`, under gluon's name."""
        return self.params

    def save_parameters(self, filename: str | os.PathLike[str]) -> None:
        """Write `params` to a `.params` file of MXNet, as gluon does."""
        write_params(filename, self.params)

    def forward(self, *args: Any) -> Any:
        """Run the network; convert again for inputs of a new shape."""
        return on_arrays(self._run)(*args)

    def _run(self, *args: Any) -> Any:
        if self._converted is not None:
            try:
                return _run(self._converted, args)
            except ConversionError as error:
                if isinstance(error.__cause__, AssertionError):
                    # torch exported a dynamic batch dimension, but the program fails for other
                    # batch sizes: convert for fixed sizes from here on.
                    if not self._any_batch:
                        raise
                    self._any_batch = False
        return _run(self.prepare(*args), args)

    def prepare(self, *args: Any) -> Converted:
        """Convert for inputs of these shapes as well.

        The first dimension is the batch; it stays dynamic if the network allows that.
        """
        examples = [*self._examples, map_tensors(args, as_tensor)]
        self._converted = self._convert(examples)
        self._examples = examples
        return self._converted

    def save(self, path: str | os.PathLike[str], *, remove_amp_cast: bool = False) -> None:
        """Save the converted network, or with `remove_amp_cast=True` the float32 network."""
        if self._converted is None:
            raise UnsupportedError(
                "The network is not converted yet, so there is no graph to save. Call it once on"
                " inputs of its size, or pass data_example."
            )
        if remove_amp_cast:
            with _autocast_disabled():
                _convert_network(
                    self.network, self._examples, {"policy": "O0"}, any_batch=self._any_batch
                ).save(path)
        else:
            self._converted.save(path)

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = False) -> str:
        """Save under the file name of gluon's `export`; return the name."""
        name = file_name(path, epoch)
        self.save(name, remove_amp_cast=remove_amp_cast)
        return name

    # `mxnet.mod.Module` calls it so.
    save_checkpoint = export

    def _convert(self, examples: list[tuple[Any, ...]]) -> Converted:
        names = self._request.excluded
        paths = [name for name, _ in self.network.named_modules()]
        modules = [name for name in names if any(fnmatchcase(path, name) for path in paths)]
        converted = self._convert_excluding(examples, modules)
        if len(modules) == len(names):
            return converted
        # Other names may be graph nodes, which are known after the first conversion.
        graph_nodes = {row.node for plan in converted.plans for row in plan}
        nodes = [
            name
            for name in names
            if name not in modules and any(fnmatchcase(node, name) for node in graph_nodes)
        ]
        missing = sorted({*names} - {*modules, *nodes})
        if missing:
            _log.warning(
                "excluded_sym_names are not present in the network. Missing nodes: %s", missing
            )
        return self._convert_excluding(examples, [*modules, *nodes]) if nodes else converted

    def _convert_excluding(self, examples: list[tuple[Any, ...]], excluded: list[str]) -> Converted:
        with _autocast_disabled():
            options = {
                "policy": self._request.policy,
                "exclude": excluded,
                "cast_params": self._request.cast_params,
            }
            return _convert_network(self.network, examples, options, any_batch=self._any_batch)


def _reset_after_load(block: Block, _: Any) -> None:
    # Not a lambda, which could not be pickled.
    block._reset()


class LoadedBlock:
    """A converted network loaded from a file; runs for the input shapes it was saved with."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.converted = Converted.load(path)

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return dict(self.converted._converted.programs[0].exported.state_dict)

    def __call__(self, *args: Any) -> Any:
        """Run the network."""
        return on_arrays(lambda *tensors: _run(self.converted, tensors))(*args)

    forward = __call__


def _convert_network(
    network: nn.Module, examples: list[tuple[Any, ...]], options: dict[str, Any], *, any_batch: bool
) -> Converted:
    """Convert with a dynamic batch dimension if possible, otherwise for the examples' shapes."""
    if not any_batch:
        return convert(network, examples, **options)
    dynamic_shapes = pytree.tree_map(
        lambda value: (
            {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) and value.dim() else None
        ),
        examples[0],
    )
    try:
        return convert(network, examples, dynamic_shapes=dynamic_shapes, **options)
    except ConversionError:
        return convert(network, examples, **options)


def _run(converted: Converted, args: tuple[Any, ...]) -> Any:
    with _autocast_disabled():
        return converted(*args)


def _autocast_disabled() -> autocast_all_devices:
    """Disable the casts of `amp.init`: a converted network has its own."""
    return autocast_all_devices(enabled=False)


def file_name(prefix: str | os.PathLike[str], epoch: int) -> str:
    """Return the file name of a prefix and an epoch.

    >>> file_name("model", 3)
    'model-0003.pt2'
    """
    if not isinstance(epoch, int):
        raise TypeError(f"epoch should be an integer, got {epoch!r}.")
    return f"{Path(prefix)}-{epoch:04d}.pt2"
