"""The closed sets are read from their spelling."""

from __future__ import annotations

import pytest

from mezzo import PolicyError
from mezzo.scaling.scale_state import OnCollapse, OptimizerStage


@pytest.mark.parametrize("kind", [OnCollapse, OptimizerStage])
def test_every_word_is_read_from_its_spelling_and_another_is_refused(kind):
    assert [kind.parse(member.value) for member in kind] == list(kind)
    with pytest.raises(PolicyError, match="Choose one of"):
        kind.parse("sometimes")
