"""Mutated checkpoints, seeded: damaged bytes, and changed content under correct checksums."""

from __future__ import annotations

import copy
import io
import math
import random
import resource
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.states import assert_equal
from torch import nn

import mezzo
from mezzo._casting import map_tensors
from mezzo.prepare import rng_state

ALLOWED = 2**29
"""Bytes that a load may allocate in addition to the size of the file."""


def make_step(seed=0, **options):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator whose state a checkpoint has
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    return mezzo.TrainStep(
        model,
        nn.functional.mse_loss,
        optimizer,
        "O2",
        **{"dtype": "float16", **options},
        accumulate=2,
        scheduler=scheduler,
        capture=False,
    )


def call(step, times=1):
    for _ in range(times):
        step(torch.randn(4, 4), torch.zeros(4, 2))


class Target:
    """A step, or its parts, into which mutated files are loaded; trained or new."""

    def __init__(self, folder: Path, *, whole: bool, new: bool = False, **options: Any) -> None:
        self._path, self._whole = folder / "mutated.pt", whole
        self._step, other = make_step(**options), make_step(seed=1, **options)
        call(other, 5 if whole else 4)
        mezzo.save_checkpoint(
            self._path,
            **self._arguments(other),
            epoch=3,
            table={"a": [1, 2.5, "x"], "t": torch.ones(3)},
            names={"b"},
        )
        self.file = self._path.read_bytes()
        self.content = torch.load(self._path, weights_only=True)
        mezzo.load_checkpoint(self._path, **self._arguments(self._step))
        self._loaded = self._state()
        call(other, 2)
        mezzo.save_checkpoint(self._path, **self._arguments(other))
        self.other = self._path.read_bytes()
        if new:
            self._step = make_step(**options)
        else:
            call(self._step, 3 if whole else 4)
        self._before = self._state()

    def _arguments(self, step) -> dict[str, Any]:
        if self._whole:
            return {"step": step}
        parts = {
            "model": step.model,
            "optimizer": step.optimizer,
            "scaler": step.scaler,
            "scheduler": next(iter(step._components.schedulers.values())),
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _state(self):
        step, weights = self._step, [parameter.data for parameter in self._step.model.parameters()]
        state = (
            step.state_dict(),
            weights,
            step.optimizer.param_groups[0],
            list(step.optimizer.state.values()),
        )
        return map_tensors(state, torch.clone)

    def load(self, content: bytes) -> str | None:
        """Load a file; return the message of the error, or None. Other exceptions are bugs."""
        self._path.write_bytes(content)
        # The targets share the random number generators.
        rng_state.restore_rng_state(self._before[0]["rng"])
        try:
            with memory_limited(len(content) + ALLOWED):
                mezzo.load_checkpoint(self._path, **self._arguments(self._step))
        except mezzo.CheckpointError as error:
            refuse_out_of_memory(error)
            assert_equal(self._before, self._state())
            return str(error)
        return None

    def is_original(self) -> None:
        """Assert after a load that everything is as it was saved."""
        loaded = self._state()
        if not self._whole:
            # The number of updates is not part of the model, the optimizer or the scheduler.
            loaded[0]["updates"] = self._loaded[0]["updates"]
        assert_equal(self._loaded, loaded)

    def trains(self) -> None:
        """Assert after a load of other values that training continues."""
        try:
            call(self._step, 2)
        except AssertionError as error:
            # A mutated flag with which torch refuses to step on a CPU.
            if "capturable=True" not in str(error):
                raise

    def reset(self) -> None:
        """Restore the state before the load."""
        self._step.load_state_dict(map_tensors(self._before[0], torch.clone))


@contextmanager
def memory_limited(more: int):
    """Make allocations fail that exceed the present size of the process by `more` bytes."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refuse_out_of_memory(error: BaseException | None) -> None:
    while error is not None:
        assert not isinstance(error, MemoryError), "the load requested too much memory"
        assert "allocate" not in str(error), error
        error = error.__cause__


# -- damaged bytes ---------------------------------------------------------------------------------


def damaged(draw: random.Random, file: bytes, other: bytes) -> bytes:
    content = bytearray(file)
    at, start, length = (
        draw.randrange(len(file)),
        draw.randrange(len(file)),
        draw.choice([1, 2, 8, 64, 512, 4096]),
    )
    mutations: list[Callable[[], Any]] = [
        lambda: content.__setitem__(at, content[at] ^ (1 << draw.randrange(8))),
        lambda: [
            content.__setitem__(draw.randrange(len(file)), draw.randrange(256))
            for _ in range(draw.randrange(2, 20))
        ],
        lambda: content.__setitem__(at, draw.randrange(256)),
        lambda: content.__setitem__(slice(at, at + length), bytes(len(content[at : at + length]))),
        lambda: content.__delitem__(slice(at, None)),
        lambda: content.__setitem__(slice(at, at), draw.randbytes(length)),
        lambda: content.__delitem__(slice(at, at + length)),
        lambda: content.__setitem__(slice(at, at + length), file[start : start + length]),
        lambda: content.__setitem__(slice(at, at + length), other[at : at + length]),
        lambda: content.extend(draw.randbytes(length)),
        # The directory of the archive, which no checksum covers, and the records after it.
        *[
            lambda: content.__setitem__(
                -draw.randrange(1, 3000), draw.choice([16, draw.randrange(256)])
            )
        ]
        * 3,
    ]
    draw.choice(mutations)()
    return bytes(content)


# -- other content, with correct checksums ---------------------------------------------------------

WEIRD: list[Callable[[], Any]] = [
    *(
        lambda value=value: value
        for value in (
            None,
            True,
            -1,
            0,
            3,
            math.nan,
            math.inf,
            -1.5,
            1e300,
            2**40,
            2**62,
            "text",
            b"bytes",
            (),
            {"a": 1},
            [1, 2],
        )
    ),
    lambda: torch.zeros(()),
    lambda: torch.full((3,), math.nan),
    lambda: torch.zeros(0),
    lambda: torch.ones(2, 3, dtype=torch.complex64),
    lambda: torch.ones(1).expand(2**38),
    lambda: torch.ones(1).expand(2**20, 2**18),
    lambda: torch.ones(4, dtype=torch.int64),
    lambda: torch.eye(3).to_sparse(),
    lambda: nest(5000),
]


def nest(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def changed_tensor(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    mutations: list[Callable[[], torch.Tensor]] = [
        lambda: tensor.to(
            draw.choice(
                [
                    torch.float64,
                    torch.bfloat16,
                    torch.int64,
                    torch.bool,
                    torch.complex64,
                    torch.uint8,
                    torch.int16,
                ]
            )
        ),
        lambda: tensor.reshape(-1),
        lambda: tensor.unsqueeze(0),
        lambda: tensor.t() if tensor.dim() == 2 else tensor.reshape(-1)[:0],
        lambda: torch.full_like(tensor, draw.choice([0, 1, 127])),
        lambda: -tensor if tensor.is_floating_point() else tensor,
        lambda: tensor.new_ones(()).expand(tensor.shape),
        lambda: tensor.new_ones(()).expand(2**14, 2**14, 2**10),
        lambda: torch.cat([tensor.reshape(-1)] * 2)[: tensor.numel()].view(tensor.shape),
        lambda: tensor * math.nan if tensor.is_floating_point() else tensor,
    ]
    return draw.choice(mutations)()


def places(content: Any, found: list[tuple[Any, Any]], depth: int = 0) -> list[tuple[Any, Any]]:
    """Return every entry of nested containers as container and key; of long lists only a few."""
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    for key in keys if len(keys) < 100 else keys[:3] + keys[-3:]:
        found.append((content, key))
        if isinstance(content[key], dict | list) and depth < 12:
            places(content[key], found, depth + 1)
    return found


def other_content(draw: random.Random, content: Any) -> bytes:
    content = as_lists(content, tuples=draw.random() < 0.1)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        found = places(content, [])
        container, key = draw.choice(found)
        kind = draw.choice(["delete", "weird", "tensor", "swap", "rename", "add", "alias"])
        if kind == "delete":
            del container[key]
        elif kind == "weird":
            container[key] = draw.choice(WEIRD)()
        elif kind == "tensor":
            tensors = [(one, name) for one, name in found if isinstance(one[name], torch.Tensor)]
            plain = [
                (one, name)
                for one, name in tensors
                if one[name].layout is torch.strided and one[name].numel() < 10_000
            ]
            container, key = draw.choice(plain)
            container[key] = changed_tensor(draw, container[key])
        elif kind in {"swap", "alias"}:
            second, name = draw.choice(found)
            container[key], second[name] = (
                second[name],
                (container[key] if kind == "swap" else second[name]),
            )
        elif kind == "rename" and isinstance(container, dict):
            container[draw.choice(["other", 0, 99, -1, None, (1, 2), str(key)])] = container.pop(
                key
            )
        elif isinstance(container, list):
            container.insert(key, copy.copy(container[key]))
        else:
            container["added"] = draw.choice(WEIRD)()
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
    except RecursionError:
        # The values are nested too deep for torch.save.
        buffer = io.BytesIO()
        torch.save({}, buffer)
    return buffer.getvalue()


def as_lists(content: Any, *, tuples: bool) -> Any:
    """Return the content in mutable containers.

    The long states of random number generators are in tuples, which mostly stay as they are.
    """
    if isinstance(content, dict) and not isinstance(content, Counter):
        return {key: as_lists(value, tuples=tuples) for key, value in content.items()}
    return (
        [as_lists(one, tuples=tuples) for one in content]
        if isinstance(content, (list, tuple) if tuples else list)
        else content
    )


def repacked(draw: random.Random, file: bytes) -> bytes:
    """Return the archive with a changed pickle or changed entries, and correct checksums."""
    archive, buffer = zipfile.ZipFile(io.BytesIO(file)), io.BytesIO()
    entries = {one.filename: bytearray(archive.read(one)) for one in archive.infolist()}
    pickled = next(content for name, content in entries.items() if name.endswith("data.pkl"))
    stored = [name for name in entries if "/data/" in name]
    kind = draw.choice(["pickle", "pickle", "pickle", "compress", "resize", "drop", "swap", "name"])
    name = draw.choice(stored)
    if kind == "pickle":
        for _ in range(draw.choice([1, 2, 8])):
            # Most bytes belong to the states of random number generators.
            at = draw.choice(
                [draw.randrange(len(pickled)), draw.randrange(min(len(pickled), 6000))]
            )
            pickled[at] = draw.choice([draw.randrange(256), pickled[at] ^ (1 << draw.randrange(8))])
    elif kind == "resize":
        entries[name] = entries[name][:-4] if draw.random() < 0.5 else entries[name] + bytes(8)
    elif kind == "drop":
        del entries[name]
    elif kind == "swap":
        second = draw.choice(stored)
        entries[name], entries[second] = entries[second], entries[name]
    elif kind == "name":
        entries[draw.choice(["x/y", name.upper(), "archive/constants.pkl", name + "0"])] = (
            entries.pop(name)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method = zipfile.ZIP_DEFLATED if kind == "compress" else zipfile.ZIP_STORED
        with zipfile.ZipFile(buffer, "w") as out:
            for one, content in entries.items():
                out.writestr(one, bytes(content), method)
    return buffer.getvalue()


def fuzz(folder: Path, numbers: range, seed: int = 0) -> Counter[str]:
    """Load mutated checkpoints, and count the outcomes."""
    outcomes: Counter[str] = Counter()
    targets = [
        Target(folder, whole=True),
        Target(folder, whole=False),
        Target(folder, whole=False, new=True, dtype="bfloat16", master="split"),
    ]
    for number in numbers:
        draw, target = random.Random(f"{seed}/{number}"), targets[number % 3]
        kind = draw.choice(["damaged", "damaged", "content", "content", "repacked"])
        content = _mutated(draw, target, kind)
        try:
            # Training with non-finite weights warns, as it should.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes[f"{kind}: {_load(target, content, damaged=kind == 'damaged')}"] += 1
        except Exception as error:
            (folder / f"finding-{seed}-{number}.pt").write_bytes(content)
            raise AssertionError(
                f"input {number} of seed {seed}, {kind}: {type(error).__name__}: {error}"
            ) from error
    return outcomes


def _mutated(draw: random.Random, target: Target, kind: str) -> bytes:
    if kind == "damaged":
        return damaged(draw, target.file, target.other)
    return other_content(draw, target.content) if kind == "content" else repacked(draw, target.file)


def _load(target: Target, content: bytes, *, damaged: bool) -> str:
    if target.load(content) is not None:
        return "refused"
    if damaged:
        target.is_original()
    else:
        target.trains()
    target.reset()
    return "loaded"
