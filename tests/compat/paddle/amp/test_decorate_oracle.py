"""Compare `decorate` with every recorded table of PaddlePaddle.

The tables have the dtypes of all tensors, also with `excluded_layers` and `save_dtype`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.paddle_networks import NETWORKS, torchs
from torch import nn

import mezzo
from mezzo.compat import paddle

ORACLE = json.loads((Path(__file__).parents[3] / "data" / "paddle-decorate.json").read_text())
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "i64": torch.int64,
}
NO_COUNTERPART = {
    "lstm._dropout_state": (
        "Paddle keeps the random state of a recurrent layer's dropout in a buffer of bytes; torch"
        " has none"
    )
}
EXCLUDED = {
    "None": lambda _: None,
    "instance:fc1": lambda model: model.fc1,
    "type:Linear": lambda _: nn.Linear,
    "list:[fc2,Embedding]": lambda model: [model.fc2, nn.Embedding],
    "type:LayerNorm": lambda _: nn.LayerNorm,
    "whole_model": lambda model: model,
    "type:Layer": lambda _: nn.Module,
    "list:[]": lambda _: [],
    "instance:inner (container)": lambda model: model.inner,
    "type:Sequential": lambda _: nn.Sequential,
}


def recorded(table: dict[str, str]) -> dict[str, torch.dtype]:
    return {
        torchs(name): DTYPES[dtype] for name, dtype in table.items() if name not in NO_COUNTERPART
    }


def tensor_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: tensor.dtype
        for name, tensor in tensors.items()
        if not name.endswith("num_batches_tracked")
    }


@pytest.mark.parametrize(
    "row", ORACLE["param_dtypes"], ids=lambda row: f"{row['net']}-{row['dtype']}-{row['level']}"
)
def test_the_same_tensors_are_cast(row):
    model = NETWORKS[row["net"]]()
    assert paddle.amp.decorate(models=model, level=row["level"], dtype=row["dtype"]) is model
    assert tensor_dtypes(model) == recorded(row["params"] | row["buffers"])


@pytest.mark.parametrize(
    "row",
    ORACLE["excluded_layers"],
    ids=lambda row: f"{row['net']}-{row['excluded']}-{row['dtype']}",
)
def test_the_same_layers_are_excluded(row):
    model = NETWORKS[row["net"]]()
    paddle.amp.decorate(
        models=model,
        level="O2",
        dtype=row["dtype"],
        excluded_layers=EXCLUDED[row["excluded"]](model),
    )
    assert tensor_dtypes(model) == recorded(row["params"] | row["buffers"])


@pytest.mark.parametrize(
    "row", ORACLE["save_dtype"], ids=lambda row: f"{row['net']}-{row['dtype']}-{row['save_dtype']}"
)
def test_the_state_is_saved_in_the_same_dtypes(row):
    model = NETWORKS[row["net"]]()
    paddle.amp.decorate(models=model, level="O2", dtype=row["dtype"], save_dtype=row["save_dtype"])
    state = {
        name: value.dtype
        for name, value in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    assert state == recorded(row["state_dict"])
    assert {
        name: dtype for name, dtype in tensor_dtypes(model).items() if not name.endswith("buf")
    } == recorded(row["params_after"])


def test_masters_start_from_the_original_values_and_not_from_rounded_ones_as_paddles():
    """A deliberate difference: what rounding loses before the first step is lost for good."""
    assert ORACLE["master_initialised_from"] == {
        "equals_original_fp32": False,
        "equals_rounded_half": True,
    }
    model = NETWORKS["A"]()
    original = model.fc1.weight.detach().clone()
    optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    paddle.amp.decorate(models=model, optimizers=optimizer, level="O2")
    assert not torch.equal(model.fc1.weight.float(), original)
    mezzo.undecorate(model)
    assert torch.equal(model.fc1.weight, original)
