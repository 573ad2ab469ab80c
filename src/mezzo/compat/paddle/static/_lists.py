"""`CustomOpLists`: the op lists of a static program."""

from __future__ import annotations

import torch

from mezzo.compat.paddle.amp._words import Names, custom_lists
from mezzo.compat.paddle.static._precision import GRAY
from mezzo.policy.presets import paddle
from mezzo.policy.types import Level, Rule


class AutoMixedPrecisionLists:
    """Op lists in Paddle's names, on top of the default ones. Variables cannot be listed: `custom_black_varnames` names what torch does not name.

    >>> lists = AutoMixedPrecisionLists(custom_white_list=["elementwise_add"])
    >>> "elementwise_add" in lists.white_list, "softmax" in lists.black_list
    (True, True)
    """

    def __init__(self, custom_white_list: Names = None, custom_black_list: Names = None, custom_black_varnames: Names = None, dtype: str = "float16") -> None:
        white, black = set(custom_white_list or ()), set(custom_black_list or ())
        if both := sorted(white & black):
            raise ValueError(f"The given custom_white_list overlaps custom_black_list with < {', '.join(both)} >!")
        if custom_black_varnames:
            raise ValueError(
                f"custom_black_varnames={custom_black_varnames!r}: variables have no names of their own here. List the op that reads them, "
                "or keep it out of fp16_guard."
            )
        if dtype not in ("float16", "bfloat16"):
            raise ValueError(f"The dtype of the lists should be 'float16' or 'bfloat16', got {dtype!r}.")
        self.amp_dtype = dtype
        self.half, self.full = custom_lists(white, black)
        """The same in mezzo's words."""
        self.white_list = (_listed(Rule.HALF) - black) | white
        self.black_list = (_listed(Rule.FULL) - white) | black
        self.gray_list = set(GRAY.split()) - self.white_list - self.black_list


def _listed(rule: Rule) -> set[str]:
    """The names under a rule by default, those with a counterpart here."""
    entries = paddle.lists(Level.O1, torch.float16).entries
    return {name for name, ours in paddle.NAMES.known.items() if all(one in entries and entries[one].rule is rule for one in ours)}


CustomOpLists = AutoMixedPrecisionLists
"""The name by which the guide calls the lists."""
