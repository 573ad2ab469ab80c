"""Damaged and crafted files are rejected with one clear error, or load and run without a crash.

Each file is read in a forked child, because a crash would end the process.
`MEZZO_FUZZ_FILES=10000` tries more files.
"""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.forked import SUPPORTED, in_children, resident
from support.fuzzed_files import crafted, damaged
from torch import nn

import mezzo

COUNT = int(os.environ.get("MEZZO_FUZZ_FILES", "250"))
_ROOM = 512 * 2**20
pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs fork and Linux's /proc")


class Small(nn.Module):
    """Has a convolution, a recurrent layer, an embedding, views, and a dynamic batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(7, 4), nn.Conv1d(4, 4, 3, padding=1)
        self.rnn, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, ids):
        x = self.conv(self.embed(ids).transpose(1, 2)).relu_().transpose(1, 2)
        return self.head(self.rnn(x)[0][:, -1]).softmax(-1)


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("fuzz") / "model"
    batch = torch.export.Dim("batch", min=2, max=64)
    mezzo.convert(
        Small().eval(), (IDS,), dtype="bfloat16", dynamic_shapes={"ids": {0: batch}}
    ).save(path)
    return path


def state(converted):
    [program] = converted._converted.programs
    return {**program.exported.state_dict, **program.exported.constants}


def outcomes(make, original, count, judge):
    """Return the outcomes of loading the files number 0 to `count`."""
    content, path = original.read_bytes(), original.with_name("fuzzed")

    def load(number):
        path.write_bytes(make(content, number))
        return _outcome(path, judge)

    found = in_children(count, load)
    # Shown with -s, to see what a larger count tries.
    print(Counter(outcome.partition(":")[0] for outcome in found.values()))  # noqa: T201
    return found


def _outcome(path, judge):
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    try:
        loaded = mezzo.Converted.load(path)
    except (mezzo.CheckpointError, mezzo.UnsupportedError) as error:
        loaded, outcome = None, f"rejected: {error}"
    except BaseException as error:  # noqa: BLE001
        return f"bare {type(error).__name__}: {error}"
    taken = resident("VmHWM") - before
    if taken > _ROOM:
        return f"took {taken} bytes"
    return outcome if loaded is None else judge(loaded)


def unexpected(found, *expected):
    return {
        number: outcome for number, outcome in found.items() if not outcome.startswith(expected)
    }


def test_damaged_files_are_rejected_or_load_unchanged(original):
    expected = mezzo.Converted.load(original)
    weights, output = state(expected), expected(IDS)

    def judge(loaded):
        same = state(loaded).keys() == weights.keys() and all(
            torch.equal(one, weights[name]) for name, one in state(loaded).items()
        )
        return "unchanged" if same and torch.equal(loaded(IDS), output) else "changed"

    found = outcomes(damaged, original, COUNT * 2 // 3, judge)
    assert not unexpected(found, "rejected", "unchanged")


def test_crafted_files_are_rejected_or_run_without_crashing(original):
    def judge(loaded):
        exported = loaded._converted.programs[0].exported
        for args, kwargs in [((IDS,), {}), exported.example_inputs or ((), {})]:
            try:
                loaded(*args, **kwargs)
            except Exception as error:  # noqa: BLE001
                return f"raised {type(error).__name__}"
        return "ran"

    found = outcomes(crafted, original, COUNT - COUNT * 2 // 3, judge)
    assert not unexpected(found, "rejected", "raised", "ran")
