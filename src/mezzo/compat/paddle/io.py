"""`paddle.io`: data sets, samplers and a loader whose batches are Paddle tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import ChainDataset, ConcatDataset, Sampler, Subset, get_worker_info

from mezzo._casting import map_tensors
from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._places import default_device, device_of
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle._tensor import as_tensor, plain_tensor
from mezzo.compat.paddle.distributed import get_rank, get_world_size

__all__ = [
    "BatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "DistributedBatchSampler",
    "IterableDataset",
    "RandomSampler",
    "Sampler",
    "SequenceSampler",
    "Subset",
    "TensorDataset",
    "default_collate_fn",
    "get_worker_info",
    "random_split",
]

_CPU = torch.device("cpu")


class Dataset(data.Dataset[Any]):
    """`paddle.io.Dataset`: define `__getitem__` and `__len__`; samples may be NumPy arrays."""

    def __len__(self) -> int:
        raise NotImplementedError(
            f"'__len__' not implement in class {type(self).__name__}. Define it."
        )


class IterableDataset(data.IterableDataset[Any]):
    """`paddle.io.IterableDataset`: define `__iter__`."""


class TensorDataset(Dataset):
    """`paddle.io.TensorDataset`: samples are rows of tensors.

    >>> len(TensorDataset([torch.ones(3, 2), torch.zeros(3)]))
    3
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if len({len(tensor) for tensor in tensors}) > 1:
            raise ValueError(
                "The tensors should have the same first size, got"
                f" {[len(tensor) for tensor in tensors]}."
            )
        self.tensors = list(tensors)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])


class SequenceSampler(Sampler[int]):
    """`paddle.io.SequenceSampler`: the indices in order."""

    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(Sampler[int]):
    """`paddle.io.RandomSampler`: the indices in a new random order for each pass.

    Drawn on the CPU: torch's own sampler fails if the default device is another one.
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: Any = None,
    ) -> None:
        self.data_source = data_source
        self._replacement = replacement
        self._num_samples = num_samples
        self._generator = generator

    def __iter__(self) -> Iterator[int]:
        size, options = len(self.data_source), {"device": _CPU, "generator": self._generator}
        if self._replacement:
            drawn = torch.randint(size, (len(self),), **options)
        else:
            drawn = torch.randperm(size, **options)[: len(self)]
        return iter(drawn.tolist())

    def __len__(self) -> int:
        return len(self.data_source) if self._num_samples is None else self._num_samples


class BatchSampler(Sampler[list[int]]):
    """`paddle.io.BatchSampler`: lists of indices, one for each batch.

    >>> list(BatchSampler(range(5), batch_size=2))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Any = None,
        sampler: Any = None,
        shuffle: bool = False,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if (dataset is None) is (sampler is None):
            raise ValueError("BatchSampler needs either dataset= or sampler=, and not both.")
        if sampler is None:
            sampler = RandomSampler(dataset) if shuffle else SequenceSampler(dataset)
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return iter(data.BatchSampler(self.sampler, self.batch_size, self.drop_last))

    def __len__(self) -> int:
        return len(data.BatchSampler(self.sampler, self.batch_size, self.drop_last))


class DistributedBatchSampler(Sampler[list[int]]):
    """`paddle.io.DistributedBatchSampler`: the batches of one process of a group.

    All processes have the same number of batches: the first samples are repeated at the end. Call
    `set_epoch` before each pass to shuffle differently; without it each pass is another epoch.

    >>> list(DistributedBatchSampler(range(6), batch_size=2, num_replicas=2, rank=1))
    [[2, 3], [5]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.shuffle, self.drop_last, self.epoch = shuffle, drop_last, 0
        self.nranks = get_world_size() if num_replicas is None else num_replicas
        self.local_rank = get_rank() if rank is None else rank
        self.num_samples = -(-len(dataset) // self.nranks)

    def __iter__(self) -> Iterator[list[int]]:
        size, total = len(self.dataset), self.num_samples * self.nranks
        indices = list(range(size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.epoch)
            indices = torch.randperm(size, generator=generator).tolist()
            self.epoch += 1
        indices += indices[: total - size]
        whole = self.num_samples // self.batch_size * self.batch_size
        own = [
            index
            for start in range(self.local_rank * self.batch_size, whole * self.nranks, self._stride)
            for index in indices[start : start + self.batch_size]
        ]
        left = self.num_samples - whole
        last = whole * self.nranks + self.local_rank * left
        own += indices[last : last + left]
        return iter(data.BatchSampler(own, self.batch_size, self.drop_last))

    def __len__(self) -> int:
        return len(data.BatchSampler(range(self.num_samples), self.batch_size, self.drop_last))

    def set_epoch(self, epoch: int) -> None:
        """Set the seed of the next shuffled pass."""
        self.epoch = epoch

    @property
    def _stride(self) -> int:
        return self.batch_size * self.nranks


class DataLoader(data.DataLoader[Any]):
    """`paddle.io.DataLoader`: batches of Paddle tensors on the default place.

    It can be iterated, and called for an iterator. Samples are arrays, numbers, tensors, or
    tuples, lists and dicts of them. `places` chooses another place; of several the first is used,
    since each process has one device.

    >>> loader = DataLoader(TensorDataset([torch.arange(4.0)]), batch_size=2, places="cpu")
    >>> [batch.numpy().tolist() for (batch,) in loader()]
    [[0.0, 1.0], [2.0, 3.0]]
    """

    def __init__(
        self,
        dataset: Any,
        feed_list: Any = None,
        places: Any = None,
        return_list: bool = True,
        batch_sampler: Any = None,
        batch_size: int | None = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        use_buffer_reader: bool = True,
        prefetch_factor: int = 2,
        use_shared_memory: bool = True,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if not return_list or feed_list is not None:
            raise ValueError(
                "DataLoader(feed_list=, return_list=False) yields dicts of static variables, which"
                " is not supported. Leave both out, and pass feed={name: batch[0]} to"
                " Executor.run()."
            )
        place = places[0] if isinstance(places, list | tuple) else places
        self._place = place
        is_stream = isinstance(dataset, data.IterableDataset)
        options: dict[str, Any] = {}
        if batch_sampler is not None:
            options["batch_sampler"] = batch_sampler
        else:
            options["batch_size"] = batch_size
            options["drop_last"] = drop_last if batch_size is not None else False
            if shuffle and not is_stream:
                options["sampler"] = RandomSampler(dataset)
        if num_workers:
            options |= {"prefetch_factor": prefetch_factor, "timeout": timeout}
        is_batched = batch_size is not None or batch_sampler is not None
        super().__init__(
            dataset,
            collate_fn=collate_fn or (default_collate_fn if is_batched else None),
            num_workers=num_workers,
            worker_init_fn=worker_init_fn,
            persistent_workers=persistent_workers and num_workers > 0,
            # A copy from pinned memory does not synchronize.
            pin_memory=use_buffer_reader and self._device().type == "cuda",
            **options,
        )

    def _device(self) -> torch.device:
        return default_device() if self._place is None else device_of(self._place)

    def __iter__(self) -> Any:
        return self._on_place(super().__iter__())

    def _on_place(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield to_place(batch, self._device())

    def __call__(self) -> Iterator[Any]:
        """Return an iterator over the batches, as `iter(loader)` does."""
        return iter(self)


def default_collate_fn(batch: list[Any]) -> Any:
    """Return samples stacked to tensors on the CPU, in the structure of a sample.

    >>> default_collate_fn([(1, 2.0), (3, 4.0)])
    [tensor([1, 3]), tensor([2., 4.], dtype=torch.float64)]
    """
    with torch.device(_CPU):
        return data.default_collate(
            [
                map_tensors(sample, lambda tensor: plain_tensor(tensor.detach()).cpu())
                for sample in batch
            ]
        )


def to_place(batch: Any, device: torch.device) -> Any:
    """Return a batch with its arrays and tensors as Paddle tensors on a device."""
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return [to_place(item, device) for item in batch]
    if isinstance(batch, dict):
        return {name: to_place(item, device) for name, item in batch.items()}
    if hasattr(batch, "__array__") and not isinstance(batch, torch.Tensor):
        batch = torch.as_tensor(batch, device=_CPU)
    if not isinstance(batch, torch.Tensor):
        return batch
    return as_tensor(plain_tensor(batch).to(device, non_blocking=True))


def random_split(dataset: Any, lengths: Sequence[int], generator: Any = None) -> list[Any]:
    """Return random disjoint parts of a data set."""
    if sum(lengths) != len(dataset):
        raise ValueError(
            f"The lengths {list(lengths)} add up to {sum(lengths)}, and the dataset has"
            f" {len(dataset)} samples. They must be equal."
        )
    indices = torch.randperm(len(dataset), device=_CPU, generator=generator).tolist()
    parts, start = [], 0
    for length in lengths:
        parts.append(Subset(dataset, indices[start : start + length]))
        start += length
    return parts


__getattr__ = module_getattr(__name__, SUBSTITUTIONS, counterpart=data)
