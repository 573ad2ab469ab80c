"""torch.amp's own names on mezzo: `install()` and existing code that says `torch.autocast` or `torch.amp.GradScaler` runs here, nothing else changed.

What differs, and why, is in docs/coming-from/torch.md.
"""

from mezzo.compat.torch._install import install, is_installed, uninstall
from mezzo.compat.torch._regions import autocast
from mezzo.compat.torch._scaler import GradScaler

__all__ = ["GradScaler", "autocast", "install", "is_installed", "uninstall"]
