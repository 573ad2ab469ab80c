"""Inputs in pinned memory, with streams and events that record their use: a CPU has neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mezzo.step import host_inputs
from mezzo.step.cuda_graph import CapturedGraph
from mezzo.step.host_inputs import HostInput, HostInputs, is_staged

LARGE = host_inputs.MIN_BYTES // 4


class Device:
    """Records what is done on which stream."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.streams = ["main"]
        self.events = 0

    def event(self) -> Any:
        self.events += 1
        return Event(self, self.events)


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def record(self, stream: Any) -> None:
        self.device.log.append((stream.name, "record", self.number))


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_event(self, event: Event) -> None:
        self.device.log.append((self.name, "wait", event.number))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    copy: Callable[..., torch.Tensor] = torch.Tensor.copy_

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        device.streams.append(stream.name)
        yield
        device.streams.pop()

    def copied(tensor: torch.Tensor, other: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        device.log.append((device.streams[-1], "copy", tensor.data_ptr()))
        return copy(tensor, other)

    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(device, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(device, "main"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.sum() != 0)
    return device


def test_a_large_input_is_copied_on_another_stream_and_then_on_the_current_one(device: Device):
    inputs = HostInputs(torch.device("cpu"))
    buffer = torch.zeros(LARGE)
    leaf = torch.arange(float(LARGE))
    inputs.copy([HostInput(buffer, leaf)])
    assert torch.equal(buffer, leaf)
    staged = device.log[1][2]
    assert device.log == [
        ("copies", "wait", 2),  # until the staging buffer was read
        ("copies", "copy", staged),
        ("copies", "record", 1),
        ("main", "wait", 1),
        ("main", "copy", buffer.data_ptr()),
        ("main", "record", 2),
    ]
    assert staged != buffer.data_ptr()


def test_two_staging_buffers_alternate(device: Device):
    inputs = HostInputs(torch.device("cpu"))
    buffer = torch.zeros(LARGE)
    for number in range(1, 5):
        inputs.copy([HostInput(buffer, torch.full((LARGE,), float(number)))])
        assert buffer.eq(number).all()
    staged = [place for stream, what, place in device.log if (stream, what) == ("copies", "copy")]
    waits = [number for stream, what, number in device.log if (stream, what) == ("copies", "wait")]
    assert staged[0] == staged[2] != staged[1] == staged[3]
    assert waits == [2, 4, 2, 4]


def test_staging_buffers_fit_any_dtype_shape_and_strides(device: Device):
    inputs = HostInputs(torch.device("cpu"))
    leaves = [
        torch.arange(LARGE).view(4, -1).T,
        torch.ones(4 * LARGE, dtype=torch.bool),
        torch.randn(8, 3, 64, 64).to(memory_format=torch.channels_last),
        torch.randn(2 * LARGE, dtype=torch.bfloat16),
    ]
    for leaf in leaves * 2:
        buffer = torch.zeros(leaf.shape, dtype=leaf.dtype)
        inputs.copy([HostInput(buffer, leaf)])
        assert torch.equal(buffer, leaf)
    # A smaller input takes the memory of a larger one.
    places = {place for stream, what, place in device.log if (stream, what) == ("copies", "copy")}
    assert len(places) <= 4


def test_small_inputs_and_inputs_in_pageable_memory_are_copied_as_usual(device: Device):
    inputs = HostInputs(torch.device("cpu"))
    leaves = [torch.ones(5), torch.zeros(LARGE), torch.ones(LARGE, 2)[:, 0]]
    for leaf in leaves:
        buffer = torch.full(leaf.shape, 7.0)
        device.log.clear()
        inputs.copy([HostInput(buffer, leaf)])
        assert device.log == [("main", "copy", buffer.data_ptr())]
        assert torch.equal(buffer, leaf)


def test_a_leaf_that_requires_a_gradient_is_copied_without_it(device: Device):
    buffer = torch.zeros(LARGE)
    HostInputs(torch.device("cpu")).copy([HostInput(buffer, torch.ones(LARGE, requires_grad=True))])
    assert not buffer.requires_grad


def test_a_replay_copies_its_host_inputs(device: Device):
    class Graph:
        def replay(self) -> None:
            device.log.append(("main", "replay"))

    buffers = [torch.zeros(LARGE), torch.zeros(3)]
    graph = CapturedGraph(Graph(), buffers, None, (), HostInputs(torch.device("cpu")))
    graph.replay([torch.ones(LARGE), torch.ones(3)])
    assert all(buffer.eq(1).all() for buffer in buffers)
    assert ("copies", "record", 1) in device.log
    assert device.log[-1] == ("main", "replay")


def test_on_a_machine_without_cuda_nothing_is_pinned():
    assert not is_staged(torch.ones(LARGE))
