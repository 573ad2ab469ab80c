"""`megengine.amp.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Self

import torch
from torch.compiler import is_dynamo_compiling

from mezzo._dtypes import dtype_name, parse_dtype
from mezzo.autocasting.autocast import disable, everywhere, switch_to, switched_to
from mezzo.compat.megengine.amp.switch import PRESET, require_float32


class autocast(everywhere):  # noqa: N801 - MegEngine's spelling
    """MegEngine's rules inside, as a context manager or a decorator.

    `enabled=False` switches an outer region off for its own duration; in MegEngine it could not.

    >>> @autocast()
    ... def product(x):
    ...     return x @ x
    >>> product(torch.ones(1, 1)).dtype
    torch.float16
    """

    def __init__(
        self,
        enabled: bool = True,  # noqa: FBT001, FBT002 - MegEngine's call shape
        low_prec_dtype: str | torch.dtype = "float16",
        high_prec_dtype: str | torch.dtype = "float32",
    ) -> None:
        if not is_dynamo_compiling():
            require_float32(high_prec_dtype)
        self.enabled, self.high_prec_dtype = enabled, "float32"
        low = parse_dtype(low_prec_dtype, what="low_prec_dtype")
        self.low_prec_dtype = dtype_name(low)
        self._switched: dict[int, list[AbstractContextManager[Any] | None]] = {}
        super().__init__(preset=PRESET, dtype=low, enabled=enabled)

    def __enter__(self) -> Self:
        if not is_dynamo_compiling():
            self._switched.setdefault(get_ident(), []).append(switched_to())
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if is_dynamo_compiling():
            return
        before = self._switched[get_ident()].pop()
        # What was assigned to the switch inside ends with the region, as there.
        if switched_to() is not before:
            disable()
            if before is not None:
                switch_to(before)
