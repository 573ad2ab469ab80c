import logging

import pytest

from mezzo.conversion.export import quiet_loggers

ONE, OTHER = logging.getLogger("mezzo_tests.one"), logging.getLogger("mezzo_tests.other")


def _fail():
    with quiet_loggers(ONE.name, OTHER.name, below=logging.CRITICAL):
        raise KeyError(ONE.level, OTHER.level)


def test_loggers_speak_as_before_when_the_body_raises():
    ONE.setLevel(logging.INFO)
    with pytest.raises(KeyError) as raised:
        _fail()
    assert raised.value.args == (logging.CRITICAL, logging.CRITICAL)
    assert (ONE.level, OTHER.level) == (logging.INFO, logging.NOTSET)
