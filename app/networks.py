"""Networks in plain torch; each forward pass maps images to class scores (logits)."""

from collections.abc import Sequence
from itertools import pairwise

import torchvision
from torch import Tensor, nn


class LeNet(nn.Module):
    """Small CNN of PyTorch's CIFAR-10 tutorial: 62,006 parameters with ten classes.

    Source: https://docs.pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html, after LeCun et al.,
    "Gradient-based learning applied to document recognition", 1998.
    """

    image_shape = (3, 32, 32)

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.MaxPool2d(2),  # before ReLU, for the same values at a quarter of the cost
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of images.

        Args:
            images: (B, 3, 32, 32).

        Returns:
            Logits, (B, num_classes).
        """
        features = self.features(images)  # (B, 16, 5, 5)
        return self.classifier(features.flatten(1))  # (B, num_classes)


class MLP(nn.Module):
    """Multilayer perceptron over a flattened image, repeated to scale the input layer.

    With ``repeats`` N, the input is 28·28·N wide. The first layer's parameters grow with N, and so do the gradients
    that data parallelism communicates. Each batch is repeated on the device; the data set is not.
    """

    image_shape = (1, 28, 28)

    def __init__(self, repeats: int, hidden: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.repeats = repeats
        widths = [28 * 28 * repeats, *hidden]
        layers: list[nn.Module] = []
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of images.

        Args:
            images: (B, 1, 28, 28).

        Returns:
            Logits, (B, num_classes).
        """
        repeated = images.flatten(1).repeat(1, self.repeats)  # (B, 784 * repeats)
        return self.layers(repeated)  # (B, num_classes)


def resnet18(num_classes: int) -> nn.Module:
    """Return torchvision's ResNet-18 with a head of ``num_classes``: (B, 3, H, W) -> (B, num_classes).

    Source: He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385.
    """
    network = torchvision.models.resnet18(num_classes=num_classes)
    network.image_shape = (3, None, None)
    return network


def resnet18_cifar(num_classes: int) -> nn.Module:
    """Return a ResNet-18 with the usual stem for small images: (B, 3, H, W) -> (B, num_classes).

    The stem is a 3×3 convolution of stride 1 without max-pool, so that 32×32 images reach the first block at full size.
    Source: section 4.2 of https://arxiv.org/abs/1512.03385.
    """
    network = resnet18(num_classes)
    network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network
