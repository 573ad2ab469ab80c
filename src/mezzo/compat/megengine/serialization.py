"""`megengine.save` and `megengine.load`, which also reads the files that MegEngine writes."""

from __future__ import annotations

import importlib
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.compat.megengine.device import parse_device

__all__ = ["load", "save"]

_ZIP = b"PK\x03\x04"
"""First bytes of a file of `torch.save`."""

_ALLOWED = {
    ("_codecs", "encode"): "_codecs",  # bytes in protocol 2
    ("collections", "OrderedDict"): "collections",
    ("numpy", "dtype"): "numpy",
    ("numpy", "ndarray"): "numpy",
    ("numpy.core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy.core.multiarray", "scalar"): "numpy._core.multiarray",
    ("numpy.core.numeric", "_frombuffer"): "numpy._core.numeric",
    ("numpy._core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy._core.multiarray", "scalar"): "numpy._core.multiarray",
    ("numpy._core.numeric", "_frombuffer"): "numpy._core.numeric",
}
"""What a pickle of MegEngine may refer to, and the module that has it in NumPy 2: arrays."""


def save(obj: Any, f: str | os.PathLike[str] | IO[bytes], **_: Any) -> None:
    """Save a state dict, tensors or plain values by `torch.save`; pickle arguments are ignored.

    >>> file = io.BytesIO()
    >>> save({"step": 3}, file)
    >>> _ = file.seek(0)
    >>> load(file)
    {'step': 3}
    """
    torch.save(obj, f)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **_: Any) -> Any:
    """Load a file of `save`, or a state dict that MegEngine saved, as arrays.

    Nothing in the file is executed: a pickle that contains more than arrays, numbers, strings and
    containers of them raises `pickle.UnpicklingError`.
    """
    data = Path(f).read_bytes() if isinstance(f, str | os.PathLike) else f.read()
    if not data.startswith(_ZIP):
        return _load_arrays(data)
    place = parse_device(map_location) if isinstance(map_location, str) else map_location
    if isinstance(place, Mapping):
        place = {str(parse_device(old)): str(parse_device(new)) for old, new in place.items()}
    return torch.load(io.BytesIO(data), map_location=place, weights_only=True)


def _load_arrays(data: bytes) -> Any:
    try:
        return _ArrayUnpickler(io.BytesIO(data)).load()
    except (EOFError, IndexError, KeyError, ValueError, AttributeError) as error:
        raise pickle.UnpicklingError(
            f"This is no file of megengine.save, or it is damaged: {error}."
        ) from error


class _ArrayUnpickler(pickle.Unpickler):
    """Read pickles of arrays and containers only."""

    def find_class(self, module: str, name: str) -> Any:
        place = _ALLOWED.get((module, name))
        if place is None:
            raise pickle.UnpicklingError(
                f"The file refers to {module}.{name}. Only arrays, numbers, strings and containers"
                " of them are loaded: in MegEngine, save net.state_dict()."
            )
        try:
            return getattr(importlib.import_module(place), name)
        except ImportError:  # NumPy 1
            return getattr(importlib.import_module(place.replace("_core", "core")), name)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
