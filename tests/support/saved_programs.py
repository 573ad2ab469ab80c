"""Small programs to save, and functions that read and change the parts of saved files."""

from __future__ import annotations

import json
import warnings
from zipfile import ZIP_DEFLATED, ZipFile

import torch
from torch import nn

from mezzo.conversion import saved_model


class Everything(nn.Module):
    """A model with everything that a file must store.

    Keyword and nested inputs, a tied weight, a constant, buffers that change, a branch, nested
    outputs and a dynamic batch.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = torch.tensor([0.5, 2.0, 1.0, 3.0])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, ids, *, extra, gain=2):
        self.calls.add_(1)
        x = self.norm(self.embed(ids)) * self.scale
        x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() + 1, (x,))
        return {
            "logits": self.head(x.half().to(x.dtype)),
            "rest": [x + extra["bias"], (gain * x.mean(), ids.shape[0] * 2)],
        }


def batch(count):
    torch.manual_seed(count)
    return (torch.randint(0, 7, (count,)),), {"extra": {"bias": torch.randn(1, 4)}, "gain": 3}


def export(model, args, kwargs=None, **options):
    """Export without gradients and without warnings: torch warns about its own code."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, kwargs, **options)


def everything():
    """Return the program of `Everything` with a batch of 2 to 64."""
    torch.manual_seed(0)
    model, (args, kwargs) = Everything(), batch(6)
    sizes = {
        "ids": {0: torch.export.Dim("batch", min=2, max=64)},
        "extra": {"bias": None},
        "gain": None,
    }
    return export(model, args, kwargs, dynamic_shapes=sizes)


def linear():
    """Return the smallest program with weights."""
    torch.manual_seed(0)
    return export(nn.Linear(3, 2), (torch.randn(4, 3),))


def save(path, *programs, **options):
    saved_model.save(
        path,
        saved_model.SavedModel(
            tuple(saved_model.SavedProgram(one, {"rows": []}) for one in programs), options
        ),
    )
    return path


def one(path, **options):
    """Return the only program of a file."""
    [stored] = saved_model.load(path, **options).programs
    return stored.exported


def parts(path):
    with ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_parts(path, contents):
    with ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content, ZIP_DEFLATED if name.endswith(".json") else None)


def edited(path, name, change):
    """Change one JSON part of a file in place, with a correct checksum; return its path."""
    contents = parts(path)
    value = json.loads(contents[name])
    change(value)
    write_parts(path, {**contents, name: json.dumps(value)})
    return path


def same(left, right):
    """Return whether two nested results are bit-equal, with equal dtypes, strides and structure."""
    flat, structure = torch.utils._pytree.tree_flatten(left)
    other, other_structure = torch.utils._pytree.tree_flatten(right)
    return structure == other_structure and all(
        _same(a, b) for a, b in zip(flat, other, strict=True)
    )


def _same(left, right):
    if not isinstance(left, torch.Tensor):
        return left == right
    return (left.dtype, left.shape, left.stride()) == (
        right.dtype,
        right.shape,
        right.stride(),
    ) and torch.equal(left, right)
