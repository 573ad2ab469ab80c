"""`mxnet.io`: `DataBatch`, the input of `Module.forward`, and `DataDesc`, a name and a shape."""

from __future__ import annotations

import logging
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = ["DataBatch", "DataDesc"]

_log = logging.getLogger()


class DataDesc(NamedTuple):
    """`mxnet.io.DataDesc`: the name and the shape of an input.

    >>> DataDesc("data", (1, 3, 224, 224)).name
    'data'
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any = None
    layout: str = "NCHW"


@dataclass(frozen=True)
class DataBatch:
    """`mxnet.io.DataBatch`: data and labels of a batch. Inference ignores the labels.

    >>> len(DataBatch(data=[torch.ones(1, 2)]).data)
    1
    """

    data: Sequence[torch.Tensor]
    label: Sequence[torch.Tensor] | None = None
    pad: int | None = None
    index: object = None
    bucket_key: Hashable = None
    """The bucket that `BucketingModule` runs the batch in."""
    provide_data: Sequence[Any] | None = None
    """Names and shapes of the data, which `BucketingModule` binds a new bucket to."""
    provide_label: Sequence[Any] | None = None


def parse_shapes(shapes: Any, names: Sequence[str], what: str) -> list[DataDesc]:
    """Return the descriptions of inputs, given as pairs of a name and a shape or as `DataDesc`.

    >>> parse_shapes([["data", (2, 3)]], ["data"], "data")[0].shape
    (2, 3)
    """
    if isinstance(shapes, DataDesc) or not isinstance(shapes, list | tuple):
        raise ValueError(
            f"{what}_shapes should be a list of names and shapes, got {shapes!r}. Pass"
            f" [({(names or ['data'])[0]!r}, (1, 3, 224, 224))]."
        )
    descriptions = [_parse_shape(entry, what) for entry in shapes]
    given = [description.name for description in descriptions]
    if sorted(given) != sorted(names):
        message = (
            f"Data provided by {what}_shapes don't match names specified by {what}_names"
            f" ({given} vs. {list(names)})."
        )
        if what == "data":
            raise ValueError(message)
        # A network for inference may have no labels.
        _log.warning(message)
    return descriptions


def _parse_shape(entry: Any, what: str) -> DataDesc:
    if isinstance(entry, DataDesc):
        name, shape = entry.name, entry.shape
    elif isinstance(entry, list | tuple) and len(entry) == len(("name", "shape")):
        name, shape = entry
    else:
        raise ValueError(
            f"{what}_shapes has {entry!r}, expected a name and a shape such as"
            " ('data', (1, 3, 224, 224))."
        )
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if not isinstance(name, str) or any(size < 0 for size in sizes):
        raise ValueError(
            f"{what}_shapes has {entry!r}, expected a string and a tuple of sizes such as"
            " ('data', (1, 3, 224, 224))."
        )
    return DataDesc(name, sizes)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
