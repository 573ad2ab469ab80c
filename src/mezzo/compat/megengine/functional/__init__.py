"""`megengine.functional`: the losses, under both names that MegEngine has for them. What else is in there is said in torch's words."""

from mezzo.compat.megengine.functional import loss, nn

__all__ = ["loss", "nn"]
