"""`gluoncv.model_zoo.get_model`: ResNet v1 and SSD by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mezzo._errors import choices, nearest
from mezzo.compat._missing import module_getattr
from mezzo.compat.gluoncv._substitutions import SUBSTITUTIONS
from mezzo.compat.gluoncv.model_zoo.resnet import ResNetV1, get_resnet
from mezzo.compat.gluoncv.model_zoo.ssd import SSD, get_ssd_512_resnet50
from mezzo.compat.mxnet.gluon import HybridBlock

__all__ = ["SSD", "ResNetV1", "get_model", "get_model_list"]

_MODELS: dict[str, Callable[..., HybridBlock]] = {
    **{f"resnet{depth}_v1": partial(get_resnet, depth) for depth in (18, 34, 50, 101, 152)},
    **{
        f"ssd_512_resnet50_v1_{dataset}": partial(get_ssd_512_resnet50, dataset)
        for dataset in ("coco", "voc", "custom")
    },
}


def get_model(name: str, **kwargs: Any) -> HybridBlock:
    """Return a network by name.

    `pretrained=True`, and for SSD `pretrained_base=True`, which is the default as in gluoncv, read
    weights from `root` (`~/.mxnet/models`); without the file they raise.

    >>> import torch
    >>> get_model("resnet18_v1", classes=10)(torch.ones(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    make = _MODELS.get(name.lower())
    if make is None:
        raise ValueError(
            f"Model {name!r} is not available. {choices(_MODELS)}{nearest(name.lower(), _MODELS)}"
        )
    return make(**kwargs)


def get_model_list() -> list[str]:
    """Return the names that `get_model` knows."""
    return list(_MODELS)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
