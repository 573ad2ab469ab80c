"""Signatures of inputs, static buffers, copies of outputs, and closure values."""

from __future__ import annotations

import pytest
import torch
from support.containers import CONTAINERS, Encoding, Fields, FrozenFields, sizes, values_of

from mezzo.step.inputs import (
    UnsupportedInput,
    closure_values,
    copy_outputs,
    format_shapes,
    make_static_buffers,
    move_inputs,
    signature,
)

ONES = torch.ones(2, 3)
IMAGES = torch.ones(2, 3, 4, 4)

EQUAL = {
    "other values": (ONES, torch.zeros(2, 3)),
    "a slice": (ONES, torch.ones(4, 3)[::2]),
    "equal numbers": ((ONES, 3), (ONES, 3)),
}
DIFFERENT = {
    "shape": (ONES, torch.ones(3, 3)),
    "dtype": (ONES, ONES.half()),
    "memory format": (IMAGES, IMAGES.contiguous(memory_format=torch.channels_last)),
    "number": ((ONES, 3), (ONES, 4)),
    "type of number": ((ONES, 1), (ONES, True)),
    "list and tuple": ([ONES], (ONES,)),
    "key": ({"a": ONES}, {"b": ONES}),
    "type of mapping": (Encoding({"a": ONES}), {"a": ONES}),
    "number in a mapping": (Encoding({"a": 1}), Encoding({"a": 2})),
    "shape in a dataclass": (Fields(ONES, 1), Fields(IMAGES, 1)),
    "number in a dataclass": (FrozenFields(ONES, 1), FrozenFields(ONES, 2)),
    "nesting": ((ONES, (ONES,)), ((ONES, ONES),)),
}


@pytest.mark.parametrize("case", EQUAL)
def test_inputs_that_can_share_a_graph_have_equal_signatures(case):
    one, other = EQUAL[case]
    assert signature(one, []) == signature(other, [])


@pytest.mark.parametrize("case", DIFFERENT)
def test_inputs_that_need_another_graph_have_another_signature(case):
    one, other = DIFFERENT[case]
    assert signature(one, []) != signature(other, [])


def test_an_input_that_cannot_be_compared_is_named():
    with pytest.raises(UnsupportedInput, match="set"):
        signature((ONES, {1}), [])


def test_leaves_have_the_order_of_the_static_buffers():
    value = ({"b": torch.ones(1), "a": [torch.ones(2), 5]}, torch.ones(3))
    leaves = []
    signature(value, leaves)
    buffers = make_static_buffers(value)
    assert [len(leaf) for leaf in leaves] == [len(buffer) for buffer in buffers.tensors]
    assert [len(leaf) for leaf in leaves] == [1, 2, 3]
    assert buffers.values[0]["a"][1] == 5
    assert buffers.values[1] is buffers.tensors[2]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_has_a_signature_whose_leaves_are_in_the_order_of_the_buffers(kind):
    def make(factor):
        nested = CONTAINERS[kind](one=torch.ones(2) * factor, two=[torch.ones(3), 5])
        return CONTAINERS[kind](one=nested, two=torch.ones(4) * factor)

    leaves = []
    key = signature(make(1), leaves)
    assert key == signature(make(2), [])
    assert hash(key) == hash(signature(make(3), []))
    buffers = make_static_buffers(make(1))
    assert sizes(leaves) == sizes(buffers.tensors) == [2, 3, 4]
    assert type(buffers.values) is type(make(1))
    first, last = values_of(buffers.values)
    assert values_of(first)[0] is buffers.tensors[0]
    assert last is buffers.tensors[2]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_is_moved(kind):
    moved = move_inputs(CONTAINERS[kind](one=ONES, two=3), torch.device("meta"))
    assert values_of(moved)[0].device.type == "meta"
    assert values_of(moved)[1] == 3
    assert values_of(CONTAINERS[kind](one=ONES, two=3))[0] is ONES


def test_static_buffers_are_copies_with_the_same_memory_format():
    source = IMAGES.contiguous(memory_format=torch.channels_last)
    (buffer,) = make_static_buffers((source,)).values
    assert buffer.data_ptr() != source.data_ptr()
    assert buffer.is_contiguous(memory_format=torch.channels_last)


def test_images_are_moved_to_channels_last_and_other_tensors_are_unchanged():
    images, tokens = move_inputs((IMAGES, ONES), torch.device("cpu"), channels_last=True)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert tokens is ONES


@pytest.mark.parametrize("nested", [False, True])
def test_copies_of_outputs_are_detached(nested):
    output = torch.ones(2, requires_grad=True) * 2
    copy = copy_outputs((output,))[0] if nested else copy_outputs(output)
    assert not copy.requires_grad
    assert copy.data_ptr() != output.data_ptr()


def test_shapes_and_dtypes_are_formatted():
    assert format_shapes([ONES, IMAGES.half()]) == "(2, 3) float32, (2, 3, 4, 4) float16"


WEIGHT = 1.0


def weighted(loss):
    return loss * WEIGHT


class TestClosureValues:
    def test_globals_that_change_are_read(self, monkeypatch):
        read = closure_values(weighted)
        before = read()
        monkeypatch.setitem(globals(), "WEIGHT", 2.0)
        assert (before, read()) == ((1.0,), (2.0,))

    def test_tensors_in_a_closure_are_compared_by_their_memory(self):
        held = first = torch.ones(4)
        read = closure_values(lambda: held)
        before = read()
        held.zero_()
        assert read() == before
        held = first[::2]
        assert read() != before
        held = torch.ones(4)
        assert read() != before
        held = held.to_sparse()
        assert read() == (id(held),)

    def test_attributes_are_not_taken_for_globals_of_their_name(self, monkeypatch):
        read = closure_values(lambda output: output.WEIGHT)
        monkeypatch.setitem(globals(), "WEIGHT", torch.ones(1))
        assert read() == ()

    def test_globals_that_are_assigned_later_are_read(self, monkeypatch):
        read = closure_values(lambda: assigned_later)  # noqa: F821
        before = read()
        monkeypatch.setitem(globals(), "assigned_later", torch.ones(1))
        assert (before, len(read())) == ((None,), 1)
        assert read() != before

    def test_a_module_has_none(self):
        assert closure_values(torch.nn.MSELoss())() == ()

    def test_a_variable_that_is_not_assigned_yet_is_none(self):
        read = closure_values(lambda: later)
        before = read()
        later = 3
        assert (before, read()) == ((None,), (3,))
