"""Logs of runs that did not take place, in the format of `mezzo.observe`."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

_KINDS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")


def layer_names(blocks: int) -> list[str]:
    return [
        "transformer.wte.weight",
        *(f"transformer.h.{i}.{kind}.weight" for i in range(blocks) for kind in _KINDS),
        "lm_head.weight",
    ]


def header(**fields: Any) -> dict[str, Any]:
    return {
        "kind": "run",
        "version": 1,
        "model": "GPT",
        "policy": "Policy('O1', dtype='float16')",
        "dtype": "float16",
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "mezzo": "0.1.0",
        "rank": 0,
        "ranks": 1,
        "started": 1_790_000_000.0,
        **fields,
    }


def training_run(steps: int = 300, *, blocks: int = 3, seed: int = 0, **fields: Any) -> list[Any]:
    """A run that trains: a loss that falls, a scale that grows and backs off, samples."""
    numbers = random.Random(seed)
    names = layer_names(blocks)
    lines: list[dict[str, Any]] = [header(**fields)]
    scale, growth = 2.0**19, 0
    for step in range(1, steps + 1):
        time = step * 0.05
        limit = 2.0 ** (17.5 + math.sin(step / 400))
        skipped = scale > limit or (step > 50 and numbers.random() < 0.0004)
        loss = 1.2 + 9 * math.exp(-step / (steps / 4)) + numbers.gauss(0, 0.08)
        growth = 0 if skipped else growth + 1
        bad = numbers.choice(names) if skipped else None
        if skipped:
            scale /= 2
        elif growth >= max(steps // 12, 20):
            scale, growth = scale * 2, 0
        lines.append(
            {
                "kind": "step",
                "step": step,
                "time": time,
                "loss": loss,
                "scale": scale,
                "skipped": skipped,
                "norm": 1.5 + numbers.random() + 3 * math.exp(-step / 200),
                "parameter": bad,
            }
        )
        if skipped or step % max(steps // 60, 1) == 0:
            lines.append(_gradients(numbers, names, step, time, bad))
        if step % max(steps // 40, 1) == 0:
            lines += [
                _tensors(numbers, names, step, time, which)
                for which in ("gradients", "activations", "parameters", "updates")
            ]
    return [
        *lines,
        op_rows(blocks),
        {"kind": "end", "step": None, "time": time, "reason": "stopped"},
    ]


def _gradients(numbers: Any, names: list[str], step: int, time: float, bad: str | None) -> Any:
    total = 65_536
    layers, zeros = {}, {}
    for index, name in enumerate(names):
        share = min(0.24, 0.004 * (len(names) - index) * (0.4 + numbers.random()))
        zeros[name] = int(total * 0.01)
        layers[name] = [3 if name == bad else 0, int(total * share) + zeros[name], total]
    return {"kind": "gradients", "step": step, "time": time, "layers": layers, "zeros": zeros}


def _tensors(numbers: Any, names: list[str], step: int, time: float, which: str) -> Any:
    stats = {
        name: {
            "dtype": "float32" if which == "parameters" else "float16",
            "count": 65_536,
            "nan": 0,
            "inf": 0,
            "zero": 3,
            "min": -1.0,
            "max": 1.0,
            "rms": 0.1,
            "headroom": max(0.0, 3 + 9 * abs(math.sin(index + step / 900)) + numbers.gauss(0, 0.5)),
            "underflow": 0.02 * numbers.random(),
            "histogram": [[-4, 100], [-3, 200]],
            "lost": 0.1 * numbers.random() if which == "updates" else None,
        }
        for index, name in enumerate(names)
    }
    return {"kind": "tensors", "step": step, "time": time, "which": which, "stats": stats}


def op_rows(blocks: int) -> dict[str, Any]:
    rows = []
    for block in range(blocks):
        for op, dtype, casts in (
            ("addmm", "float16", 3),
            ("_softmax", "float32", 1),
            ("native_layer_norm", "float32", 1),
            ("bmm", "float16", 0),
            ("gelu", "float16", 0),
            ("add", "float32", 1),
        ):
            rows.append(
                {
                    "module": f"transformer.h.{block}",
                    "op": op,
                    "dtype": dtype,
                    "calls": 4,
                    "casts_in": casts,
                    "casts_out": 1 if dtype == "float32" else 0,
                    "cast_bytes": casts * 3_145_728,
                    "microseconds": 12.5,
                }
            )
    return {"kind": "ops", "step": 1, "time": 0.1, "rows": rows}


def finding(step: int = 120, **fields: Any) -> dict[str, Any]:
    """What `mezzo.trace_overflow` found."""
    return {
        "kind": "finding",
        "step": step,
        "time": 6.0,
        "direction": "forward",
        "op": "mul",
        "module": "transformer.h.2.attn",
        "line": "model.py:61",
        "reason": "left the range of float16: 1.2e+05",
        "precision": True,
        "cure": "full={'mul'}",
        "verified": True,
        **fields,
    }


def lint(**fields: Any) -> dict[str, Any]:
    one = {
        "rule": "matrix-multiple",
        "what": "the vocabulary has 50257 rows",
        "where": "lm_head",
        "why": "tensor cores compute in tiles of 8: the product is padded or slow",
        "instead": "pad the vocabulary to 50304",
        "gain": 1.24,
        **fields,
    }
    return {"kind": "lint", "step": None, "time": 0.0, "findings": [one]}


def event(name: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "step": step, "time": step * 0.05, "name": name, "fields": fields}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
