"""Test the result of `mezzo compare` as a value."""

from __future__ import annotations

import json

from mezzo.comparing.comparison import Comparison, ModeResult
from mezzo.comparing.workload import Documented

RESULT = Comparison(
    workload="mlp",
    title="MLP 256-128-10, batch 128",
    preset="small",
    data="synthetic",
    machine="a CPU",
    torch="2.13.0",
    mezzo="0.1.0",
    steps=20,
    rounds=5,
    modes=(
        ModeResult("float32", milliseconds=4.0, loss=2.0),
        ModeResult(
            "O2 captured", "float16", 1.0, 128e3, 1000, 500, 7, 2.1, 1, 0.9, (3.0, 2.1), (0.5, 0.9)
        ),
        ModeResult("TF32", note="needs an NVIDIA GPU"),
    ),
    documented=(Documented("O2", 5.2, "PaddlePaddle, V100"),),
    complete=False,
)


def test_a_result_survives_json_with_every_field():
    assert Comparison.from_json(json.loads(json.dumps(RESULT.to_json()))) == RESULT


def test_speedup_is_against_float32_and_none_without_a_time():
    assert RESULT.speedup("O2 captured") == 4.0
    assert RESULT.speedup("TF32") is None
    assert RESULT.speedup("O1") is None
