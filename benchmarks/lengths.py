"""Training on batches of 40 lengths, as text has: rows of `models.py`."""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from measure import Row
from torch import nn
from training import MEZZO, WARM_UP, Train, amp, clear, synchronize, with_mezzo
from zoo import AMP, Batch, Case, transformers_model

LENGTHS = [64 + round(index * (2048 - 64) / 39) for index in range(40)]
VISITS = 5
"""Batches of each length in an epoch."""
OPTIONS: dict[str, Any] = {}
"""Further arguments of `mezzo.TrainStep`."""
NAME = "Llama 30M, 40 lengths from 64 to 2048, batch 8"
VOCABULARY = 8192
CASE = Case(NAME, lambda _: None, lambda _: None, {})
"""A model that returns its loss, trained with AdamW; the rows make model and batches."""


def length_rows(options: argparse.Namespace, device: str) -> list[Row]:
    """Train two epochs of many lengths in random order; compare with torch.amp."""
    lengths, rows = ([8, 16], 2) if options.tiny else (LENGTHS, 8)
    drawn = {length: _batch(rows, length, device) for length in lengths}
    order = [length for length in lengths for _ in range(VISITS)]
    first, second = (
        [drawn[length] for length in random.Random(seed).sample(order, len(order))]  # noqa: S311
        for seed in (1, 2)
    )
    alone = _longest_alone(drawn[max(lengths)], device, tiny=options.tiny)
    times = {}
    train = amp(CASE, _model(device, tiny=options.tiny), device)
    times[f"{AMP}, first epoch"] = _epoch(train, first, device)
    times[f"{AMP}, second epoch"] = _epoch(train, second, device)

    train, step = with_mezzo(CASE, _model(device, tiny=options.tiny), **OPTIONS)
    clear(device)
    times[f"{MEZZO}, first epoch"] = _epoch(train, first, device)
    before = step.replays
    times[f"{MEZZO}, second epoch"] = _epoch(train, second, device)
    eager = 1.0 - (step.replays - before) / len(second)
    peaks = _peaks(device)
    print(f"{step!r}\npeak bytes: {peaks}, of the longest alone: {alone}", flush=True)
    return [
        Row(f"{NAME}: calls of the second epoch not replayed", {}, eager, "of all", 0.1),
        Row(
            f"{NAME}: second epoch against torch.amp",
            times,
            times[f"{MEZZO}, second epoch"] / times[f"{AMP}, second epoch"],
            "×",
            1.0,
        ),
        *(
            Row(
                f"{NAME}: peak memory {kind}, against the longest", {}, peak / alone[kind], "×", 1.3
            )
            for kind, peak in peaks.items()
        ),
    ]


def _model(device: str, *, tiny: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64} if tiny else {}
    defaults = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408}
    return transformers_model(
        "LlamaForCausalLM",
        "LlamaConfig",
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        use_cache=False,
        **defaults | sizes,
    ).to(device)


def _batch(rows: int, length: int, device: str) -> Batch:
    tokens = torch.randint(10, VOCABULARY, (rows, length), device=device)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _longest_alone(batch: Batch, device: str, *, tiny: bool) -> dict[str, float]:
    """Return the peaks of memory of a training on the longest batches only."""
    train, _ = with_mezzo(CASE, _model(device, tiny=tiny), **OPTIONS)
    clear(device)
    _epoch(train, [batch] * WARM_UP, device)
    return _peaks(device)


def _epoch(train: Train, batches: list[Batch], device: str) -> float:
    """Train on the batches; return microseconds."""
    synchronize(device)
    begin = time.perf_counter()
    for batch in batches:
        train(batch)
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6


def _peaks(device: str) -> dict[str, float]:
    """Return the peaks of memory since `clear`: in tensors, and held by torch."""
    if device != "cuda":
        return {}
    return {
        "allocated": float(torch.cuda.max_memory_allocated()),
        "reserved": float(torch.cuda.max_memory_reserved()),
    }
