"""`oneflow.amp`: how a graph scales its gradients, and eager regions."""

from mezzo.compat.oneflow.amp.region import autocast
from mezzo.compat.oneflow.amp.scalers import GradScaler, StaticGradScaler

__all__ = ["GradScaler", "StaticGradScaler", "autocast"]
