from concurrent.futures import ThreadPoolExecutor

from mezzo.compat.megengine.amp import switch


def test_the_switch_belongs_to_its_thread():
    switch.turn(on=True)
    try:
        with ThreadPoolExecutor() as pool:
            assert pool.submit(switch.is_on).result() is False
        assert switch.is_on()
    finally:
        switch.turn(on=False)
    assert not switch.is_on()
