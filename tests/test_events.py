"""Events reach all listeners, and are not built without one."""

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
    OpCastOverridden("add", "half", "float16", "chosen by the user"),
]


class ListenerError(Exception):
    pass


def fail(event):
    raise ListenerError(event.op)


def test_there_is_no_listener_at_first():
    assert not listening()


def test_an_event_without_a_listener_is_dropped():
    emit(EVENT)
    with listen() as events:
        pass
    assert events == []


def test_no_event_is_built_without_a_listener(monkeypatch):
    from mezzo import _hardware

    monkeypatch.setattr(_hardware, "HardwareDetected", fail)
    _hardware.hardware("cpu")
    with listen(), pytest.raises(TypeError):
        _hardware.hardware("cpu")


def test_events_are_collected_in_order_while_the_block_runs():
    with listen() as events:
        assert listening()
        for event in EVERY_EVENT:
            emit(event)
    emit(EVENT)
    assert events == EVERY_EVENT
    assert not listening()


def test_two_listeners_receive_the_same_event():
    with listen() as outer, listen() as inner:
        emit(EVENT)
    assert outer == inner == [EVENT]


def test_the_exit_of_an_inner_listener_does_not_remove_the_outer_one():
    with listen() as outer:
        with listen() as inner:
            emit(EVENT)
        emit(EVENT)
    assert (len(outer), len(inner)) == (2, 1)


def test_listeners_may_exit_in_any_order():
    first, second = listen(), listen()
    first_events, second_events = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    emit(EVENT)
    second.__exit__(None, None, None)
    assert (first_events, second_events) == ([], [EVENT])


def test_a_sink_receives_events_instead_of_the_list():
    received = []
    with listen(received.append) as events:
        emit(EVENT)
    assert (received, events) == ([EVENT], [])


def test_a_sink_that_is_registered_twice_receives_twice_and_exits_once():
    received = []
    with listen(received.append):
        with listen(received.append):
            emit(EVENT)
        emit(EVENT)
    assert len(received) == 3


def test_an_exception_of_a_listener_reaches_the_caller_and_removes_it():
    with pytest.raises(ListenerError, match="fft"), listen(fail):
        emit(EVENT)
    assert not listening()


def test_a_listener_is_removed_when_the_body_raises():
    with pytest.raises(ListenerError), listen():
        raise ListenerError
    assert not listening()


def test_a_listener_receives_events_of_other_threads():
    with listen() as events:
        thread = threading.Thread(target=emit, args=(EVENT,))
        thread.start()
        thread.join()
    assert events == [EVENT]


def test_threads_that_listen_concurrently_leave_no_listener():
    def listen_often():
        for _ in range(200):
            with listen():
                pass

    threads = [threading.Thread(target=listen_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _events._sinks == ()


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: type(event).__name__)
def test_an_event_is_frozen_and_equal_by_value(event):
    field = next(iter(asdict(event)))
    with pytest.raises(FrozenInstanceError):
        setattr(event, field, "other")
    assert type(event)(**asdict(event)) == event
    assert hash(event) == hash(type(event)(**asdict(event)))
