"""`megengine.amp`: a region, a switch that is assigned to, loss scaling, and layouts.

`amp.enabled`, `amp.low_prec_dtype` and `amp.high_prec_dtype` are read and assigned as attributes of this module. The switch belongs to the thread that throws
it, as every region here does; there it is one for the process.

>>> import torch
>>> from mezzo.compat.megengine import amp
>>> amp.enabled = True
>>> torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
torch.float16
>>> amp.enabled = False
>>> torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
torch.float32
"""

from __future__ import annotations

import sys
from types import ModuleType

from mezzo.compat.megengine.amp import switch
from mezzo.compat.megengine.amp.layout import convert_module_format, convert_tensor_format
from mezzo.compat.megengine.amp.region import autocast
from mezzo.compat.megengine.amp.scaler import GradScaler

__all__ = ["GradScaler", "autocast", "convert_module_format", "convert_tensor_format"]


class _Amp(ModuleType):
    """This module, with attributes that do something when they are assigned."""

    @property
    def enabled(self) -> bool:
        """Whether precision is automatic here and now, by the switch or by a region."""
        return switch.is_on()

    @enabled.setter
    def enabled(self, on: bool) -> None:
        switch.turn(on=bool(on))

    @property
    def low_prec_dtype(self) -> str:
        """The 16-bit dtype in force, or the one that the switch would use."""
        return switch.low_dtype()

    @low_prec_dtype.setter
    def low_prec_dtype(self, dtype: str) -> None:
        switch.set_low_dtype(dtype)

    @property
    def high_prec_dtype(self) -> str:
        """float32."""
        return "float32"

    @high_prec_dtype.setter
    def high_prec_dtype(self, dtype: str) -> None:
        switch.require_float32(dtype)


sys.modules[__name__].__class__ = _Amp
