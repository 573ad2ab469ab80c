"""The line that reads from the device."""

from __future__ import annotations

import traceback
import warnings

import torch

from mezzo.step import cuda_graph


def test_the_users_line_is_named_not_torchs():
    lines = []

    class Noticed(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_, **__):
            lines.append(cuda_graph.user_line(traceback.extract_stack()))
            return 0

    torch.nn.functional.relu(torch.ones(1).as_subclass(Noticed))  # here
    assert "test_host_syncs.py" in lines[0]


def test_reads_are_collected_and_other_warnings_pass(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with cuda_graph.find_host_syncs() as found:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
            warnings.warn("something else", UserWarning, stacklevel=1)
    assert len(found) == 1
    assert "test_host_syncs.py" in found[0]
    assert "called a synchronizing" in found[0]
    assert [str(one.message) for one in heard] == ["something else"]
    assert modes == ["default", "warn", "default"]
