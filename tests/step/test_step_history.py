"""The ring of rows that each step writes, and the host takes out."""

from __future__ import annotations

import torch

from mezzo.step.step_history import StepHistory

CPU = torch.device("cpu")


def append(history, count):
    for _ in range(count):
        history.append(torch.tensor(0.5), 0.0, 8.0, None)


def numbers(history, *, all_arrived=True):
    return history.take(all_arrived=all_arrived)[:, 0].tolist()


def test_rows_are_taken_once_and_in_order_over_the_end_of_the_ring():
    history = StepHistory(CPU, rows=5)
    for taken in ([1, 2, 3], [4, 5, 6, 7], [], [8]):
        append(history, len(taken))
        assert numbers(history) == taken


def test_the_newest_row_is_left_while_the_device_may_write_it():
    history = StepHistory(CPU, rows=5)
    assert numbers(history, all_arrived=False) == []
    append(history, 3)
    assert numbers(history, all_arrived=False) == [1, 2]
    assert numbers(history, all_arrived=False) == []
    append(history, 1)
    assert numbers(history, all_arrived=False) == [3]
    assert numbers(history) == [4]


def test_of_a_ring_that_was_overwritten_each_row_is_taken_once():
    history = StepHistory(CPU, rows=4)
    append(history, 6)
    assert numbers(history) == [3, 4, 5, 6]
    append(history, 2)
    assert numbers(history) == [7, 8]


def test_rows_that_are_taken_do_not_change_with_later_steps():
    history = StepHistory(CPU, rows=2)
    append(history, 1)
    rows = history.take(all_arrived=True)
    append(history, 4)
    assert rows[:, 0].tolist() == [1]


def test_rows_that_are_kept_do_not_hold_the_memory_of_the_ring():
    history = StepHistory(CPU, rows=2048)
    append(history, 3)
    rows = history.take(all_arrived=True)
    assert rows.untyped_storage().nbytes() == rows.nbytes
