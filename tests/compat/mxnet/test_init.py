from mezzo.compat import mxnet


def test_amp_is_where_both_generations_have_it():
    assert mxnet.contrib.amp is mxnet.amp
