"""The page docs/coming-from/mxnet.md names what is there."""

import re
from pathlib import Path

import pytest

import mezzo.compat.mxnet as mx
from mezzo.compat import gluoncv
from mezzo.compat.mxnet import symbol

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from" / "mxnet.md").read_text()
ROOTS = {
    "mx": mx,
    "amp": mx.amp,
    "autograd": mx.autograd,
    "gluon": mx.gluon,
    "nd": mx.nd,
    "gcv": gluoncv,
    "gluoncv": gluoncv,
}
NAMES = sorted(set(re.findall(rf"`(?:with )?((?:{'|'.join(ROOTS)})(?:\.\w+)+)", PAGE)))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_the_tables_exists(name):
    root, *attributes = name.split(".")
    value = ROOTS[root]
    for attribute in attributes:
        value = getattr(value, attribute)


def test_every_op_that_the_page_names_is_read():
    paragraph = PAGE.split("These ops are read")[1].split("## The calls")[0]
    named = set(re.findall(r"`(\w+)`", paragraph))
    assert len(named) > 30
    assert named <= set(symbol._ops.op_names())


@pytest.mark.parametrize(
    ("name", "replacement"),
    [("mark_variables", "attach_grad"), ("set_training", "train_mode"), ("Function", "torch")],
)
def test_a_missing_name_of_autograd_names_its_replacement(name, replacement):
    with pytest.raises(AttributeError, match=rf"autograd has no {name}. Use .*{replacement}"):
        getattr(mx.autograd, name)
