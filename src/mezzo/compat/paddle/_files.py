"""`paddle.save` and `paddle.load`: torch's files, and Paddle's own files of parameters."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from mezzo._casting import map_tensors
from mezzo._files import atomic_writer
from mezzo.compat.paddle._places import default_device
from mezzo.compat.paddle._tensor import as_tensor, to_tensor

_NAMES = "StructuredToParameterName@@"
"""Entry of Paddle's files with the internal names of parameters, which are not used."""
_ALLOWED = {
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
}
"""What Paddle's files of arrays call, as module and name. None of it can run other code."""


def save(obj: Any, path: str | os.PathLike[str], protocol: int = 4, **configs: Any) -> None:
    """Save a state dict or other tensors in torch's format, which `torch.load` reads too.

    The file is complete or not there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"weight": torch.ones(2)}, f"{folder}/net.pdparams")
    ...     load(f"{folder}/net.pdparams")["weight"].numpy()
    array([1., 1.], dtype=float32)
    """
    target = Path(os.fspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(str(target)) as file:
        torch.save(obj, file)


def load(path: str | os.PathLike[str], return_numpy: bool = False, **configs: Any) -> Any:
    """Load a file of `save`, or a `.pdparams` file that Paddle itself wrote.

    Tensors are on the default place. Nothing in the file is executed: other content raises.
    """
    if not Path(path).is_file():
        raise ValueError(f"The path {os.fspath(path)!r} to load does not exist.")
    if zipfile.is_zipfile(path):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    else:
        loaded = _to_tensors(_load_arrays(path))
    if return_numpy:
        return _map_all(loaded, lambda tensor: as_tensor(tensor).numpy())
    device = default_device()
    return map_tensors(loaded, lambda tensor: as_tensor(tensor.to(device)))


class _ArrayUnpickler(pickle.Unpickler):
    """Reads containers of NumPy arrays, and rejects everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return super().find_class(module, name)


def _load_arrays(path: str | os.PathLike[str]) -> Any:
    try:
        with Path(path).open("rb") as file:
            return _ArrayUnpickler(file).load()
    except Exception as error:
        raise ValueError(
            f"{os.fspath(path)} is neither a file of paddle.save here nor one of Paddle with arrays"
            f" alone: {error}. Save layer.state_dict() in Paddle, and load that."
        ) from error


def _to_tensors(value: Any) -> Any:
    """Make tensors of the arrays in containers; Paddle saves single ones as (name, array)."""
    if isinstance(value, dict):
        return {name: _to_tensors(item) for name, item in value.items() if name != _NAMES}
    if isinstance(value, tuple) and len(value) == 2 and hasattr(value[1], "__array__"):
        value = value[1]
    if isinstance(value, list | tuple):
        return type(value)([_to_tensors(item) for item in value])
    return to_tensor(value, place="cpu") if hasattr(value, "__array__") else value


def _map_all(value: Any, change: Any) -> Any:
    """Apply a function to every tensor; its results need not be tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map_all(item, change) for name, item in value.items()}
    return [_map_all(item, change) for item in value] if isinstance(value, list) else value
