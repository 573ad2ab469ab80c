"""`megengine.functional`: its losses, in `loss` and `nn`. Use torch for everything else."""

from mezzo.compat.megengine.functional import loss, nn

__all__ = ["loss", "nn"]
