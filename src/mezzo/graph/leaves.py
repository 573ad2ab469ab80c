"""Names for what a model returns."""

from __future__ import annotations

import re
from typing import Any

from mezzo._torch import pytree


def named_leaves(nested: Any) -> list[tuple[str, Any]]:
    """Everything in nested outputs, by where it stands; what stands alone is `output`.

    >>> named_leaves({"logits": 1, "hidden": [2, 3]}), named_leaves((1, 2)), named_leaves(1)
    ([('logits', 1), ('hidden_0', 2), ('hidden_1', 3)], [('output_0', 1), ('output_1', 2)], [('output', 1)])
    """
    return [(_name(re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")), leaf) for path, leaf in pytree.tree_leaves_with_path(nested)]


def _name(words: str) -> str:
    return words if words and not words[0].isdigit() else f"output_{words}".rstrip("_")
