"""Converted Gluon blocks and what was asked of their conversion."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezzo._casting import cast
from mezzo._errors import ConversionError, UnsupportedError
from mezzo._torch import pytree
from mezzo.autocasting.autocast import autocast_all_devices
from mezzo.conversion.convert import convert
from mezzo.conversion.converted import Converted
from mezzo.policy.policy import Policy
from mezzo.policy.types import Rule

_OPS: Mapping[type[nn.Module], str] = {
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
"""The op whose list decides over a module's parameters, as far as that can be said before an
example was seen."""


@dataclass(frozen=True)
class ConvertRequest:
    """How a network is to be converted."""

    policy: Policy
    excluded: list[str] = field(default_factory=list)
    """Modules, or nodes of the graph, that stay float32."""
    cast_params: bool = False
    """Whether parameters are stored in 16 bits, and not cast at every call."""


def expected(network: nn.Module, wishes: ConvertRequest) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, in the dtypes that they will be stored in. Layers that the lists decide over alone can be told before an example was seen.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> stored = expected(net, ConvertRequest(Policy("O1", "float16", preset="mxnet"), cast_params=True))
    >>> stored["0.weight"].dtype, stored["1.weight"].dtype
    (torch.float16, torch.float32)
    """
    half = {
        f"{path}.{own}" if path else own
        for path, module in network.named_modules()
        if wishes.cast_params and _is_half(wishes, path, module)
        for own, _ in module.named_parameters(recurse=False)
    }
    dtype = wishes.policy.dtype or torch.float16
    state = {name: value.detach() for name, value in network.state_dict().items()}
    return {
        name: cast(value, dtype) if name in half and value.dtype is torch.float32 else value
        for name, value in state.items()
    }


def _is_half(wishes: ConvertRequest, path: str, module: nn.Module) -> bool:
    op = next((op for kind, op in _OPS.items() if isinstance(module, kind)), None)
    if op is None or any(
        fnmatchcase(path, name) or path.startswith(f"{name}.") for name in wishes.excluded
    ):
        return False
    device = next((one.device.type for one in module.parameters()), "cpu")
    return wishes.policy.explain(op, device=device).rule is Rule.HALF


_log = logging.getLogger()


class Block:
    """A network that is converted at the first call for inputs of a size, and for an example at once.

    `forward` and the call itself run it; `params` are its parameters and buffers as they are
    stored.
    """

    def __init__(self, network: nn.Module, wishes: ConvertRequest, device: Any = None) -> None:
        # A copy: the network itself may go on being trained.
        self._network, self._wishes = copy.deepcopy(network).eval().to(device), wishes
        self._examples: list[tuple[Any, ...]] = []
        self._converted: Converted | None = None
        self._any_batch = True

    @property
    def converted(self) -> Converted | None:
        """What `mezzo.convert` made of the examples so far: its `plan` and `casts`. None before the first."""
        return self._converted

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, in the dtypes in which they are stored."""
        if self._converted is not None:
            return dict(self._converted._converted.programs[0].exported.state_dict)
        return expected(self._network, self._wishes)

    def collect_params(self) -> dict[str, torch.Tensor]:
        """`params`, by gluon's name."""
        return self.params

    def __call__(self, *args: Any) -> Any:
        """Run the network; inputs of a size that no program takes are another example."""
        if self._converted is not None:
            try:
                return _run(self._converted, args)
            except ConversionError as error:
                if isinstance(error.__cause__, AssertionError):
                    # A network that torch took for one of any batch, and that found out when it
                    # ran.
                    if not self._any_batch:
                        raise
                    self._any_batch = False
        return _run(self.prepare(*args), args)

    forward = __call__

    def prepare(self, *args: Any) -> Converted:
        """Convert for inputs like these too. The first dimension is the batch, which may have any size where the network lets it."""
        examples = [*self._examples, args]
        self._converted = self._convert(examples)
        self._examples = examples
        return self._converted

    def save(self, path: str | os.PathLike[str], *, remove_amp_cast: bool = False) -> None:
        """Write the network to a file, with its casts. `remove_amp_cast=True`, the default of MXNet, drops the conversion and writes a float32 network."""
        if self._converted is None:
            raise UnsupportedError(
                "A network without an example has no graph to save yet. Call it once on inputs of"
                " its size, or pass data_example."
            )
        if remove_amp_cast:
            with _nothing_else():
                _convert(
                    self._network, self._examples, {"policy": "O0"}, any_batch=self._any_batch
                ).save(path)
        else:
            self._converted.save(path)

    # MXNet's call shape.
    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = False) -> str:
        """`save` under the name that gluon's `export` gives; the name comes back."""
        name = file_name(path, epoch)
        self.save(name, remove_amp_cast=remove_amp_cast)
        return name

    # A Module's name for the same.
    save_checkpoint = export

    def _convert(self, examples: list[tuple[Any, ...]]) -> Converted:
        names = self._wishes.excluded
        paths = [name for name, _ in self._network.named_modules()]
        known = [name for name in names if any(fnmatchcase(path, name) for path in paths)]
        converted = self._once(examples, known)
        if len(known) == len(names):
            return converted
        # What is no module may be a node, which the first conversion has named.
        nodes = {row.node for plan in converted.plans for row in plan}
        more = [
            name
            for name in names
            if name not in known and any(fnmatchcase(node, name) for node in nodes)
        ]
        missing = sorted({*names} - {*known, *more})
        if missing:
            _log.warning(
                "excluded_sym_names are not present in the network. Missing nodes: %s", missing
            )
        return self._once(examples, [*known, *more]) if more else converted

    def _once(self, examples: list[tuple[Any, ...]], excluded: list[str]) -> Converted:
        with _nothing_else():
            words = {
                "policy": self._wishes.policy,
                "exclude": excluded,
                "cast_params": self._wishes.cast_params,
            }
            return _convert(self._network, examples, words, any_batch=self._any_batch)


class Loaded:
    """A network from a file: it runs for the sizes it was saved with."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.converted = Converted.load(path)

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return dict(self.converted._converted.programs[0].exported.state_dict)

    def __call__(self, *args: Any) -> Any:
        """Run the network."""
        return _run(self.converted, args)

    forward = __call__


def _convert(
    network: nn.Module, examples: list[tuple[Any, ...]], words: dict[str, Any], *, any_batch: bool
) -> Converted:
    """Convert for a batch of any size, or for the examples' own where that cannot be."""
    if not any_batch:
        return convert(network, examples, **words)
    batched = pytree.tree_map(
        lambda value: (
            {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) and value.dim() else None
        ),
        examples[0],
    )
    try:
        return convert(network, examples, dynamic_shapes=batched, **words)
    except ConversionError:
        return convert(network, examples, **words)


def _run(converted: Converted, args: tuple[Any, ...]) -> Any:
    with _nothing_else():
        return converted(*args)


def _nothing_else() -> autocast_all_devices:
    """No other casts: `amp.init` may be in force, and a converted network has its own."""
    return autocast_all_devices(enabled=False)


def file_name(prefix: str | os.PathLike[str], epoch: int) -> str:
    """The file of a prefix and an epoch.

    >>> file_name("model", 3)
    'model-0003.pt2'
    """
    return f"{Path(prefix)}-{epoch:04d}.pt2"
