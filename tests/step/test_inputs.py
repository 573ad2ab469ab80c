"""What tells one kind of inputs from another."""

from __future__ import annotations

import pytest
import torch

from mezzo.step.inputs import (
    UnsupportedInput,
    copy_outputs,
    format_shapes,
    make_static_buffers,
    move_inputs,
    signature,
)

ONES = torch.ones(2, 3)
IMAGES = torch.ones(2, 3, 4, 4)

SAME = {
    "other values": (ONES, torch.zeros(2, 3)),
    "a slice": (ONES, torch.ones(4, 3)[::2]),
    "equal numbers": ((ONES, 3), (ONES, 3)),
}
OTHER = {
    "shape": (ONES, torch.ones(3, 3)),
    "dtype": (ONES, ONES.half()),
    "layout": (IMAGES, IMAGES.contiguous(memory_format=torch.channels_last)),
    "number": ((ONES, 3), (ONES, 4)),
    "type of number": ((ONES, 1), (ONES, True)),
    "list for tuple": ([ONES], (ONES,)),
    "key": ({"a": ONES}, {"b": ONES}),
    "nesting": ((ONES, (ONES,)), ((ONES, ONES),)),
}


@pytest.mark.parametrize("case", SAME)
def test_inputs_of_one_kind_share_a_program(case):
    one, other = SAME[case]
    assert signature(one, []) == signature(other, [])


@pytest.mark.parametrize("case", OTHER)
def test_inputs_of_another_kind_do_not(case):
    one, other = OTHER[case]
    assert signature(one, []) != signature(other, [])


def test_what_cannot_be_compared_is_named():
    with pytest.raises(UnsupportedInput, match="set"):
        signature((ONES, {1}), [])


def test_leaves_come_in_the_order_of_the_buffers():
    value = ({"b": torch.ones(1), "a": [torch.ones(2), 5]}, torch.ones(3))
    leaves = []
    signature(value, leaves)
    held, made = make_static_buffers(value)
    assert [len(leaf) for leaf in leaves] == [len(buffer) for buffer in made] == [1, 2, 3]
    assert held[0]["a"][1] == 5
    assert held[1] is made[2]


def test_buffers_are_ones_own_and_keep_the_layout():
    source = IMAGES.contiguous(memory_format=torch.channels_last)
    (held,), _ = make_static_buffers((source,))
    assert held.data_ptr() != source.data_ptr()
    assert held.is_contiguous(memory_format=torch.channels_last)


def test_images_are_placed_with_channels_last_and_the_rest_is_left():
    placed_images, tokens = move_inputs((IMAGES, ONES), torch.device("cpu"), channels_last=True)
    assert placed_images.is_contiguous(memory_format=torch.channels_last)
    assert tokens is ONES


def test_copy_outputs_have_no_history():
    source = torch.ones(2, requires_grad=True)
    (copy,) = copy_outputs((source * 2,))
    assert not copy.requires_grad


def test_shapes_are_said():
    assert format_shapes([ONES, IMAGES.half()]) == "(2, 3) float32, (2, 3, 4, 4) float16"
