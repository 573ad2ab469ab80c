"""Events reach those who listen, and cost nothing when nobody does."""

import threading
from dataclasses import FrozenInstanceError, asdict

import pytest

from mezzo import _events
from mezzo._events import (
    Float32Fallback,
    HardwareDetected,
    OpCastOverridden,
    PolicyDowngraded,
    PolicyResolved,
    emit,
    listen,
    listening,
)

EVENT = Float32Fallback("fft", "cpu", "float16", "no kernel")

EVERY_EVENT = [
    EVENT,
    HardwareDetected("cpu", "AMD EPYC", ("bfloat16",)),
    PolicyResolved("O1", "cpu", "bfloat16", "native"),
    PolicyDowngraded("bfloat16", "float32", "cpu", "no kernels"),
    OpCastOverridden("add", "half", "float16", "asked for by the user"),
]


class ListenerError(Exception):
    pass


def fail(event):
    raise ListenerError(event.op)


def test_nobody_listens_at_first():
    assert not listening()


def test_an_event_without_a_listener_goes_nowhere():
    emit(EVENT)
    with listen() as heard:
        pass
    assert heard == []


def test_no_record_is_built_when_nobody_listens(monkeypatch):
    from mezzo import _hardware

    monkeypatch.setattr(_hardware, "HardwareDetected", fail)
    _hardware.hardware("cpu")
    with listen(), pytest.raises(TypeError):
        _hardware.hardware("cpu")


def test_events_collect_in_order_while_the_block_runs():
    with listen() as heard:
        assert listening()
        for event in EVERY_EVENT:
            emit(event)
    emit(EVENT)
    assert heard == EVERY_EVENT
    assert not listening()


def test_two_listeners_hear_the_same_event():
    with listen() as outer, listen() as inner:
        emit(EVENT)
    assert outer == inner == [EVENT]


def test_an_inner_listener_that_leaves_does_not_silence_the_outer_one():
    with listen() as outer:
        with listen() as inner:
            emit(EVENT)
        emit(EVENT)
    assert (len(outer), len(inner)) == (2, 1)


def test_listeners_may_leave_in_any_order():
    first, second = listen(), listen()
    heard_first, heard_second = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    emit(EVENT)
    second.__exit__(None, None, None)
    assert (heard_first, heard_second) == ([], [EVENT])


def test_a_sink_of_ones_own_receives_instead_of_the_list():
    mine = []
    with listen(mine.append) as heard:
        emit(EVENT)
    assert (mine, heard) == ([EVENT], [])


def test_one_function_that_listens_twice_hears_twice_and_leaves_once():
    mine = []
    with listen(mine.append):
        with listen(mine.append):
            emit(EVENT)
        emit(EVENT)
    assert len(mine) == 3


def test_what_a_listener_raises_reaches_the_caller_and_the_listener_is_removed():
    with pytest.raises(ListenerError, match="fft"), listen(fail):
        emit(EVENT)
    assert not listening()


def test_a_listener_is_removed_when_the_body_raises():
    with pytest.raises(ListenerError), listen():
        raise ListenerError
    assert not listening()


def test_a_listener_hears_other_threads():
    with listen() as heard:
        thread = threading.Thread(target=emit, args=(EVENT,))
        thread.start()
        thread.join()
    assert heard == [EVENT]


def test_threads_that_come_and_go_leave_nobody_behind():
    def come_and_go():
        for _ in range(200):
            with listen():
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _events._sinks == ()


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: type(event).__name__)
def test_a_record_is_frozen_plain_and_equal_by_value(event):
    field = next(iter(asdict(event)))
    with pytest.raises(FrozenInstanceError):
        setattr(event, field, "other")
    assert type(event)(**asdict(event)) == event
    assert hash(event) == hash(type(event)(**asdict(event)))
