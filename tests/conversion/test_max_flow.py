import pytest

from mezzo.conversion.min_cut import Network


def test_as_much_flows_as_the_narrowest_cut_lets_through():
    network = Network(4)
    for tail, head, capacity in ((0, 2, 5), (0, 3, 2), (2, 3, 4), (2, 1, 1), (3, 1, 3)):
        network.connect(tail, head, capacity)
    assert network.maximize(0, 1) == 4


def test_flow_that_went_wrong_is_taken_back():
    # The shortest paths use the arc in the middle; only against it do both units arrive.
    network = Network(6)
    for tail, head in ((0, 2), (0, 3), (2, 4), (3, 4), (2, 5), (4, 1), (5, 1)):
        network.connect(tail, head, 1)
    assert network.maximize(0, 1) == 2


def test_what_cannot_reach_the_sink_is_the_largest_source_side():
    network = Network(4)
    for tail, head in ((0, 2), (2, 3), (3, 1)):
        network.connect(tail, head, 1)
    network.maximize(0, 1)
    assert network.reaching(1) == [False, True, False, False]


def test_capacities_may_be_measured_times():
    network = Network(3)
    network.connect(0, 2, 0.1)
    network.connect(2, 1, 0.3)
    network.connect(0, 2, 0.2)
    assert network.maximize(0, 1) == pytest.approx(0.3)


def test_an_infinite_arc_is_never_the_narrow_one():
    network = Network(3)
    network.connect(0, 2, 7)
    network.connect(2, 1, float("inf"))
    assert network.maximize(0, 1) == 7
    assert not network.reaching(1)[0]
