"""ResNet-18 and ResNet-50 for images of 224 pixels, and for those of CIFAR-10 with 32."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Convolutions with batch norms, added to their input: two of 3 × 3, or a bottleneck of three.

    The stride is in the 3 × 3 convolution, as in torchvision ("v1.5").
    """

    def __init__(self, inputs: int, width: int, stride: int, *, is_bottleneck: bool) -> None:
        super().__init__()
        self.outputs = 4 * width if is_bottleneck else width
        if is_bottleneck:
            layers = [
                *_convolution(inputs, width, 1),
                nn.ReLU(inplace=True),
                *_convolution(width, width, 3, stride),
                nn.ReLU(inplace=True),
                *_convolution(width, self.outputs, 1),
            ]
        else:
            layers = [
                *_convolution(inputs, width, 3, stride),
                nn.ReLU(inplace=True),
                *_convolution(width, width, 3),
            ]
        self.body = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != self.outputs:
            self.shortcut = nn.Sequential(*_convolution(inputs, self.outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(body(x) + shortcut(x))."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A ResNet of four stages. Images → logits.

    Without classes it returns the pooled features. `is_cifar` replaces the stem, which divides the
    size by 4, by one 3 × 3 convolution, and starts with residual blocks that do nothing.

    >>> import torch
    >>> resnet18(classes=10, width=8)(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        blocks: Sequence[int],
        classes: int | None,
        *,
        is_bottleneck: bool,
        width: int = 64,
        is_cifar: bool = False,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if is_cifar else (7, 2)
        self.stem = nn.Sequential(*_convolution(3, width, kernel, stride), nn.ReLU(inplace=True))
        if not is_cifar:
            self.stem.append(nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        self.channels: list[int] = []
        """Channels after each stage."""
        inputs = width
        for stage, count in enumerate(blocks):
            layers = []
            for place in range(count):
                stride = 2 if stage and not place else 1
                block = ResidualBlock(inputs, width * 2**stage, stride, is_bottleneck=is_bottleneck)
                if is_cifar:
                    # The last norm of each block is zero at first (Goyal et al., 2017). Without it
                    # 20 epochs of digits end at 8 to 89 % accuracy, whatever the precision.
                    nn.init.zeros_(block.body[-1].get_parameter("weight"))
                layers.append(block)
                inputs = block.outputs
            self.stages.append(nn.Sequential(*layers))
            self.channels.append(inputs)
        self.head = nn.Identity() if classes is None else nn.Linear(inputs, classes)
        self.apply(initialize_convolutions)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        pooled = F.adaptive_avg_pool2d(self.features(images)[-1], 1)
        logits: Tensor = self.head(pooled.flatten(1))
        return logits

    def features(self, images: Tensor) -> list[Tensor]:
        """Return the feature maps after each stage."""
        maps, x = [], self.stem(images)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


def resnet18(classes: int = 1000, *, width: int = 64) -> ResNet:
    """Return ResNet-18: 11.69 million parameters for 1000 classes."""
    return ResNet((2, 2, 2, 2), classes, is_bottleneck=False, width=width)


def resnet50(classes: int | None = 1000, *, width: int = 64, is_cifar: bool = False) -> ResNet:
    """Return ResNet-50: 25.56 million parameters for 1000 classes, 23.52 for those of CIFAR-10."""
    return ResNet((3, 4, 6, 3), classes, is_bottleneck=True, width=width, is_cifar=is_cifar)


def initialize_convolutions(module: nn.Module) -> None:
    """Draw the weights of a convolution as ResNets do, with the variance 2 / fan out."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]
