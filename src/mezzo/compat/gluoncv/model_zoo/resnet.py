"""ResNet v1 of gluoncv, with its parameter names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mezzo._errors import UnsupportedError
from mezzo.compat.gluoncv.model_zoo._files import DEFAULT_ROOT, find_weights
from mezzo.compat.mxnet.gluon.block import HybridBlock, Layer
from mezzo.compat.mxnet.gluon.nn import (
    Activation,
    BatchNorm,
    Conv2D,
    Dense,
    GlobalAvgPool2D,
    HybridSequential,
    MaxPool2D,
)

Tensor = torch.Tensor
Norm = Callable[[int], HybridBlock]


class _Residual(Layer):
    """Blocks of convolutions and a shortcut, added and passed through ReLU."""

    def __init__(self, channels: int, stride: int, in_channels: int, norm: Norm) -> None:
        super().__init__()
        self.body = self._make_body(channels, stride, in_channels, norm)
        self.downsample: HybridSequential | None = None
        if channels != in_channels:
            self.downsample = sequence(
                Conv2D(channels, 1, stride, use_bias=False, in_channels=in_channels),
                norm(channels),
            )

    def _make_body(
        self, channels: int, stride: int, in_channels: int, norm: Norm
    ) -> HybridSequential:
        raise NotImplementedError

    def forward(self, data: Tensor) -> Tensor:
        """Return relu(body(x) + shortcut(x))."""
        shortcut = data if self.downsample is None else self.downsample(data)
        return torch.relu(self.body(data) + shortcut)


class BasicBlockV1(_Residual):
    """The block of ResNet-18 and -34."""

    def _make_body(
        self, channels: int, stride: int, in_channels: int, norm: Norm
    ) -> HybridSequential:
        return sequence(
            Conv2D(channels, 3, stride, 1, use_bias=False, in_channels=in_channels),
            norm(channels),
            Activation("relu"),
            Conv2D(channels, 3, 1, 1, use_bias=False, in_channels=channels),
            norm(channels),
        )


class BottleneckV1(_Residual):
    """The block of the deeper networks; as in gluoncv its 1 x 1 convolutions have a bias."""

    def _make_body(
        self, channels: int, stride: int, in_channels: int, norm: Norm
    ) -> HybridSequential:
        inner = channels // 4
        return sequence(
            Conv2D(inner, 1, stride, in_channels=in_channels),
            norm(inner),
            Activation("relu"),
            Conv2D(inner, 3, 1, 1, use_bias=False, in_channels=inner),
            norm(inner),
            Activation("relu"),
            Conv2D(channels, 1, in_channels=inner),
            norm(channels),
        )


_SPECS: dict[int, tuple[type[_Residual], list[int], list[int]]] = {
    18: (BasicBlockV1, [2, 2, 2, 2], [64, 64, 128, 256, 512]),
    34: (BasicBlockV1, [3, 4, 6, 3], [64, 64, 128, 256, 512]),
    50: (BottleneckV1, [3, 4, 6, 3], [64, 256, 512, 1024, 2048]),
    101: (BottleneckV1, [3, 4, 23, 3], [64, 256, 512, 1024, 2048]),
    152: (BottleneckV1, [3, 8, 36, 3], [64, 256, 512, 1024, 2048]),
}


class ResNetV1(Layer):
    """ResNet v1: `features`, a sequence of convolutions, stages and pooling, and `output`."""

    def __init__(
        self,
        block: type[_Residual],
        layers: list[int],
        channels: list[int],
        classes: int = 1000,
        norm_layer: Any = BatchNorm,
        norm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        norm = make_norm(norm_layer, norm_kwargs)
        self.features = sequence(
            Conv2D(channels[0], 7, 2, 3, use_bias=False, in_channels=3),
            norm(channels[0]),
            Activation("relu"),
            MaxPool2D(3, 2, 1),
        )
        for index, count in enumerate(layers):
            inputs, outputs = channels[index], channels[index + 1]
            first = block(outputs, 1 if index == 0 else 2, inputs, norm)
            others = [block(outputs, 1, outputs, norm) for _ in range(count - 1)]
            self.features.add(sequence(first, *others))
        self.features.add(GlobalAvgPool2D())
        self.output = Dense(classes, in_units=channels[-1])

    def forward(self, data: Tensor) -> Tensor:
        """Return the logits of the classes."""
        logits: Tensor = self.output(self.features(data))
        return logits


def get_resnet(
    depth: int,
    pretrained: bool | str = False,
    root: str = DEFAULT_ROOT,
    ctx: Any = None,
    classes: int = 1000,
    norm_layer: Any = BatchNorm,
    norm_kwargs: dict[str, Any] | None = None,
    **unknown: Any,
) -> ResNetV1:
    """Return a ResNet v1 of 18, 34, 50, 101 or 152 layers."""
    check_arguments(f"resnet{depth}_v1", unknown)
    weights = find_weights(f"resnet{depth}_v1", pretrained, root) if pretrained else None
    network = ResNetV1(*_SPECS[depth], classes, norm_layer, norm_kwargs)
    if weights is not None:
        network.load_parameters(weights)
    if ctx is not None:
        network.collect_params().reset_ctx(ctx)
    return network


def check_arguments(name: str, unknown: dict[str, Any]) -> None:
    """Raise for arguments of gluoncv that are not supported."""
    if unknown:
        raise UnsupportedError(
            f"get_model({name!r}) does not support {', '.join(unknown)}. It takes pretrained, root,"
            " ctx, classes, norm_layer and norm_kwargs, and for SSD pretrained_base."
        )


def sequence(*blocks: HybridBlock) -> HybridSequential:
    """Return blocks that run one after the other."""
    made = HybridSequential()
    made.add(*blocks)
    return made


def make_norm(norm_layer: Any, norm_kwargs: dict[str, Any] | None) -> Norm:
    """Return a function that makes a normalization of a number of channels."""
    return lambda channels: norm_layer(in_channels=channels, **(norm_kwargs or {}))
