"""mezzo: automatic mixed precision for PyTorch."""

from mezzo._errors import MezzoError, PolicyError, RefusedOpError, UnsupportedError
from mezzo._hardware import Hardware, hardware
from mezzo.eager.autocast import autocast, disable, enable
from mezzo.eager.region import cache_info, carry, invalidate
from mezzo.policy.policy import Policy
from mezzo.policy.selector import NORMS
