"""`gluon.data`: data sets, and a loader whose batches are arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import data

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._ndarray import as_ndarray, as_tensor
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = ["ArrayDataset", "DataLoader", "Dataset", "SimpleDataset"]


class Dataset:
    """`gluon.data.Dataset`: define `__getitem__` and `__len__`."""

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def transform(self, fn: Callable[..., Any], lazy: bool = True) -> SimpleDataset | _Transformed:
        """Return a data set of the samples that a function returns."""
        transformed = _Transformed(self, fn)
        return transformed if lazy else SimpleDataset([transformed[i] for i in range(len(self))])

    def transform_first(
        self, fn: Callable[[Any], Any], lazy: bool = True
    ) -> SimpleDataset | _Transformed:
        """Return a data set with the first element of each sample transformed."""
        return self.transform(lambda first, *others: (fn(first), *others), lazy)


class _Transformed(Dataset):
    """The samples that a function returns for those of another data set."""

    def __init__(self, dataset: Dataset, fn: Callable[..., Any]) -> None:
        self._dataset, self._fn = dataset, fn

    def __getitem__(self, index: Any) -> Any:
        sample = self._dataset[index]
        return self._fn(*sample) if isinstance(sample, tuple) else self._fn(sample)

    def __len__(self) -> int:
        return len(self._dataset)


class SimpleDataset(Dataset):
    """`gluon.data.SimpleDataset`: the samples of a list."""

    def __init__(self, data: Sequence[Any]) -> None:
        self._data = data

    def __getitem__(self, index: Any) -> Any:
        return self._data[index]

    def __len__(self) -> int:
        return len(self._data)


class ArrayDataset(Dataset):
    """`gluon.data.ArrayDataset`: samples are rows of arrays.

    >>> ArrayDataset([1, 2], [3, 4])[1]
    (2, 4)
    """

    def __init__(self, *args: Any) -> None:
        if not args:
            raise AssertionError("Needs at least 1 arrays")
        if len({len(array) for array in args}) > 1:
            raise AssertionError(
                "All arrays must have the same length, got"
                f" {', '.join(str(len(array)) for array in args)}."
            )
        self._data = args

    def __getitem__(self, index: Any) -> Any:
        rows = tuple(array[index] for array in self._data)
        return rows[0] if len(rows) == 1 else rows

    def __len__(self) -> int:
        return len(self._data[0])


class DataLoader:
    """`gluon.data.DataLoader`: batches of arrays, in this process.

    `last_batch` keeps a smaller last batch, discards it, or rolls it over to the next pass.

    >>> loader = DataLoader(ArrayDataset([1.0, 2.0, 3.0]), batch_size=2)
    >>> [batch.asnumpy().tolist() for batch in loader]
    [[1.0, 2.0], [3.0]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Any = None,
        last_batch: str | None = None,
        batch_sampler: Any = None,
        batchify_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        last_batch = last_batch or "keep"
        if last_batch not in ("keep", "discard", "rollover"):
            raise ValueError(
                f"last_batch must be one of 'keep', 'discard', or 'rollover', but got {last_batch}."
            )
        if batch_sampler is None and batch_size is None:
            raise ValueError("batch_size must be specified unless batch_sampler is specified")
        self._dataset, self._batch_size, self._last_batch = dataset, batch_size, last_batch
        self._shuffle, self._sampler, self._batch_sampler = shuffle, sampler, batch_sampler
        self._batchify = batchify_fn or default_batchify_fn
        self._left_over: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for indices in self._batches():
            yield self._batchify([self._dataset[index] for index in indices])

    def __len__(self) -> int:
        if self._batch_sampler is not None:
            return len(self._batch_sampler)
        size, samples = self._batch_size or 1, len(self._dataset) + len(self._left_over)
        return samples // size if self._last_batch != "keep" else -(-samples // size)

    def _batches(self) -> Iterator[Any]:
        if self._batch_sampler is not None:
            yield from self._batch_sampler
            return
        count, size = len(self._dataset), self._batch_size or 1
        order = torch.randperm(count, device="cpu").tolist() if self._shuffle else range(count)
        indices = [*self._left_over, *(order if self._sampler is None else self._sampler)]
        self._left_over = []
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            if len(batch) == size or self._last_batch == "keep":
                yield batch
            elif self._last_batch == "rollover":
                self._left_over = batch


def default_batchify_fn(samples: list[Any]) -> Any:
    """Return samples stacked to arrays, in the structure of a sample; float64 becomes float32."""
    if isinstance(samples[0], tuple | list):
        return [default_batchify_fn(list(column)) for column in zip(*samples, strict=True)]
    rows = [torch.as_tensor(as_tensor(sample)) for sample in samples]
    stacked = data.default_collate([row.as_subclass(torch.Tensor) for row in rows])
    return as_ndarray(stacked.float() if stacked.dtype is torch.float64 else stacked)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
