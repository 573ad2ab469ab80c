from concurrent.futures import ThreadPoolExecutor

from mezzo.compat.megengine import amp


def test_the_switch_belongs_to_its_thread():
    amp.turn(on=True)
    try:
        with ThreadPoolExecutor() as pool:
            assert pool.submit(amp.is_on).result() is False
        assert amp.is_on()
    finally:
        amp.turn(on=False)
    assert not amp.is_on()
