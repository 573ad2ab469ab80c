import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.conversion.min_cut import FlowNetwork, Value, minimum_cut


def _assignments(values, fixed):
    free = sorted(
        {one for value in values for one in (value.producer, *value.readers, *value.promoting)}
        - set(fixed)
    )
    return [
        {**fixed, **dict(zip(free, bits, strict=True))}
        for bits in itertools.product([False, True], repeat=len(free))
    ]


@st.composite
def problems(draw):
    names = [f"op{place}" for place in range(draw(st.integers(2, 8)))]
    fixed = {name: draw(st.booleans()) for name in names if draw(st.integers(0, 2)) == 0}
    values = []
    for place, name in enumerate(names):
        later = names[place + 1 :]
        readers = tuple(one for one in later if draw(st.booleans()))
        promoting = tuple(
            one for one in later if one not in readers and draw(st.integers(0, 3)) == 0
        )
        if readers or promoting:
            values.append(
                Value(
                    name,
                    readers,
                    draw(st.integers(0, 9)),
                    draw(st.integers(0, 9)),
                    promoting=promoting,
                )
            )
    return values, fixed


def cast_cost(values: list[Value], in_half: dict[str, bool]) -> float:
    """Return the cost of all casts, given for every op whether it runs in 16 bits."""
    ups = sum(
        value.up
        for value in values
        if in_half[value.producer] and not all(in_half[one] for one in value.readers)
    )
    return ups + sum(
        value.down
        for value in values
        if not in_half[value.producer]
        and any(in_half[one] for one in (*value.readers, *value.promoting))
    )


@given(problems())
@settings(max_examples=150, deadline=None)
def test_the_cut_is_cheapest_and_has_the_most_16_bit_ops_among_ties(problem):
    values, fixed = problem
    found = {**fixed, **minimum_cut(values, fixed)}
    assignments = _assignments(values, fixed)
    least = min(cast_cost(values, assignment) for assignment in assignments)
    assert cast_cost(values, found) == least
    assert sum(found.values()) == max(
        sum(assignment.values())
        for assignment in assignments
        if cast_cost(values, assignment) == least
    )


def test_many_readers_share_one_cast():
    # One down-cast of 3 serves both readers, and is cheaper than the up-cast of 4.
    value = Value("x", ("a", "b"), up=4, down=3)
    assert cast_cost([value], {"x": False, "a": True, "b": True}) == 3
    assert cast_cost([value], {"x": True, "a": False, "b": False}) == 4


def test_a_promoting_reader_in_float32_needs_no_cast_of_a_16_bit_value():
    value = Value("x", (), up=4, down=3, promoting=("sum",))
    assert cast_cost([value], {"x": True, "sum": False}) == 0
    assert cast_cost([value], {"x": False, "sum": True}) == 3


def test_a_different_cost_moves_the_cut():
    def values(up):
        return [Value("linear", ("op",), up=1, down=1), Value("op", ("softmax",), up=up, down=1)]

    fixed = {"linear": True, "softmax": False}
    assert minimum_cut(values(1), fixed) == {"op": True}
    assert minimum_cut(values(2), fixed) == {"op": False}


def test_a_component_of_3000_ops_is_solved_in_seconds():
    # No fixed ops inside, so that the network does not split. 3,000 undecided ops took 1 s on one
    # core of a laptop.
    choose = random.Random(0)
    names = list(range(3000))
    values = []
    for one in names:
        readers = [
            *(other for other in (one + 1, one + 2, one + choose.randint(1, 30)) if other < 3000),
            *choose.choice((["full"], ["half"], [], [], [])),
        ]
        values.append(Value(one, tuple(readers), choose.randint(1, 1000), choose.randint(1, 1000)))
    begin = time.perf_counter()
    minimum_cut(values, {"full": False, "half": True})
    assert time.perf_counter() - begin < 20


# Maximum flow


def test_the_maximum_flow_equals_the_minimum_cut():
    network = FlowNetwork(4)
    for tail, head, capacity in ((0, 2, 5), (0, 3, 2), (2, 3, 4), (2, 1, 1), (3, 1, 3)):
        network.add_arc(tail, head, capacity)
    assert network.max_flow(0, 1) == 4


def test_flow_is_rerouted_over_reverse_arcs():
    # The shortest paths use the arc in the middle; only against it do both units arrive.
    network = FlowNetwork(6)
    for tail, head in ((0, 2), (0, 3), (2, 4), (3, 4), (2, 5), (4, 1), (5, 1)):
        network.add_arc(tail, head, 1)
    assert network.max_flow(0, 1) == 2


def test_nodes_that_cannot_reach_the_sink_are_the_largest_source_side():
    network = FlowNetwork(4)
    for tail, head in ((0, 2), (2, 3), (3, 1)):
        network.add_arc(tail, head, 1)
    network.max_flow(0, 1)
    assert network.can_reach(1) == [False, True, False, False]


def test_capacities_may_be_floats():
    network = FlowNetwork(3)
    network.add_arc(0, 2, 0.1)
    network.add_arc(2, 1, 0.3)
    network.add_arc(0, 2, 0.2)
    assert network.max_flow(0, 1) == pytest.approx(0.3)


def test_an_infinite_arc_is_never_cut():
    network = FlowNetwork(3)
    network.add_arc(0, 2, 7)
    network.add_arc(2, 1, float("inf"))
    assert network.max_flow(0, 1) == 7
    assert not network.can_reach(1)[0]
