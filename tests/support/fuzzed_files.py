"""Damaged and crafted files of converted programs. Each number always gives the same file."""

from __future__ import annotations

import copy
import json
import random
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile

import torch

NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    2**16,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e300,
    1e-300,
]
ODD = [
    None,
    True,
    False,
    "",
    "x",
    [],
    {},
    [0],
    {"a": 1},
    "\ud800",
    "é",
    "NaN",
    "Infinity",
    "s0",
    float("inf"),
    float("nan"),
    "a" * 30_000,
]
INTEGERS = [number for number in NUMBERS if isinstance(number, int) and abs(number) < 2**63]
ARGUMENTS = {
    "as_int": INTEGERS,
    "as_ints": [
        [],
        [0],
        [-1],
        [1, -1],
        [0, 2],
        [2**31, 2**31],
        [2**62, 4],
        [3, 3, 3],
        [-(2**63)],
        [2**63 - 1, 1],
    ],
    "as_float": [0.0, -1.0, 1e300, "NaN", "Infinity"],
    "as_bool": [True, False],
    "as_scalar_type": list(range(1, 14)),
    "as_tensor": [{"name": "ids"}],
}
"""Values of an op's arguments, by their type in the file."""
OPS = sorted(
    name.removeprefix("aten::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("aten::")
)
METHODS = [name for name in OPS if hasattr(torch.Tensor, name.partition(".")[0])]


def damaged(original: bytes, number: int) -> bytes:
    """Return the file with bytes changed, lost, doubled or moved, as disks and networks do."""
    rng, content = random.Random(f"damaged {number}"), bytearray(original)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place, length = rng.randrange(len(content)), rng.randrange(1, 64)
        match rng.randrange(7):
            case 0 | 1:
                content[place] ^= 1 << rng.randrange(8)
            case 2:
                content[place] = rng.randrange(256)
            case 3:
                del content[place : place + length]
            case 4:
                content[place : place + length] = bytes(len(content[place : place + length]))
            case 5:
                source = rng.randrange(len(content))
                content[place : place + length] = content[source : source + length]
            case 6:
                content[place:] = content[place:] + content[:length] if rng.random() < 0.3 else b""
        if not content:
            break
    return bytes(content)


def crafted(original: bytes, number: int) -> bytes:
    """Return the file with some of its values changed, and correct checksums."""
    rng = random.Random(f"crafted {number}")
    with ZipFile(BytesIO(original)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    if rng.random() < 0.1:
        _change_parts(rng, parts)
    else:
        name = rng.choice(
            [name for name in parts if name.endswith(".json")] + ["programs/0/graph.json"] * 4
        )
        value = json.loads(parts[name])
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            value = _change(rng, value)
        # From here on as text, since the result need not be valid JSON.
        text = json.dumps(value)
        if rng.random() < 0.05:
            place = rng.randrange(len(text))
            text = (
                text[:place]
                + rng.choice(
                    ["[" * 100_000, "]", "{", "}", ",", '"', "NaN", "1" * 5000, "-", "\\u0000"]
                )
                + text[place:]
            )
        parts[name] = text.encode("utf-8", "surrogatepass")
    buffer = BytesIO()
    with ZipFile(buffer, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content, ZIP_DEFLATED if name.endswith(".json") else None)
    return buffer.getvalue()


def _change_parts(rng: random.Random, parts: dict[str, bytes]) -> None:
    name = rng.choice(list(parts))
    match rng.randrange(5):
        case 0:
            del parts[name]
        case 1:
            parts[rng.choice(["other", "programs/1/graph.json", "../up", name + "x"])] = parts[name]
        case 2:
            parts[name] = parts[rng.choice(list(parts))]
        case 3:
            parts[name] = parts[name][: rng.randrange(len(parts[name]))]
        case 4:
            parts["tensors"] = rng.randbytes(len(parts["tensors"]))


def _change(rng: random.Random, value: object) -> object:
    """Change one of the nested values, and return the whole."""
    places = list(_places(value))
    ops = [
        (holder, key)
        for holder, key in places
        if isinstance(holder[key], str) and holder[key].startswith("torch.ops.")
    ]
    arguments = [
        (holder, key) for holder, key in places if key in ARGUMENTS and isinstance(holder, dict)
    ]
    # Most random changes are rejected by the reader. Another op or another argument makes a program
    # that may run.
    match rng.randrange(3):
        case 0 if ops:
            holder, key = rng.choice(ops)
            holder[key] = _other_op(rng)
        case 1 if arguments:
            holder, key = rng.choice(arguments)
            same = [other[key] for other, kind in arguments if kind == key]
            holder[key] = copy.deepcopy(rng.choice([rng.choice(ARGUMENTS[key]), rng.choice(same)]))
        case _:
            _change_anything(rng, *rng.choice(places), places)
    return value


def _change_anything(rng: random.Random, holder, key, places) -> None:
    other, place = rng.choice(places)
    value = holder.pop(key)
    changed = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(ODD),
        lambda: copy.deepcopy(other.get(place) if isinstance(other, dict) else other[:1]),
        lambda: (
            rng.choice([value + 1, value - 1, -value, 2 * value]) if type(value) is int else value
        ),
        lambda: (
            value[: len(value) // 2]
            + rng.choice(["", "_", "0", "(", "'", value])
            + value[len(value) // 2 :]
            if isinstance(value, str)
            else [value, value]
        ),
        lambda: json.loads("[" * 100 + json.dumps(value) + "]" * 100),
    ]
    if rng.random() < 0.1:
        # The value is lost.
        return
    if isinstance(holder, list):
        holder.insert(key, rng.choice(changed)())
    else:
        holder[key if rng.random() < 0.9 else rng.choice(["x", "name", "as_int", "as_tensor"])] = (
            rng.choice(changed)()
        )


def _other_op(rng: random.Random) -> str:
    name, _, overload = rng.choice(rng.choice([OPS, METHODS])).partition(".")
    return f"torch.ops.aten.{name}.{overload or 'default'}"


def _places(value: object):
    """Yield every entry of nested values as container and key."""
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in list(entries):
        yield value, key
        yield from _places(one)
