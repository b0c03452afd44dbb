"""Networks in plain torch, which map images to logits."""

import pkgutil
import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parameter import is_lazy

from app.errors import UserError, nearest, one_line
from app.system.trust import distrust, may_run


class LeNet(nn.Module):
    """Small CNN of PyTorch's CIFAR-10 tutorial: 62,006 parameters with ten classes.

    Source: https://docs.pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html, after LeCun et
    al., "Gradient-based learning applied to document recognition", 1998.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            # before ReLU: the result is the same, but ReLU computes only a quarter of the values
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
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
    """Multilayer perceptron over copies of a flattened image; more copies widen the input layer.

    With ``repeats`` N, the input is 28·28·N wide. The first layer's parameters grow with N, and so
    do the gradients that data parallelism communicates. Each batch is repeated on the device; the
    data set is not.
    """

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


def resnet18_cifar(num_classes: int) -> nn.Module:
    """Return a ResNet-18 with the usual stem for small images: (B, 3, H, W) -> (B, num_classes).

    The stem is a 3×3 convolution of stride 1 without max-pool, so that 32×32 images reach the first
    block at full size. Source: section 4.2 of https://arxiv.org/abs/1512.03385.
    """
    network = torchvision.models.resnet18(num_classes=num_classes)
    network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


class WhitenedCNN(nn.Module):
    """CNN for small images, whose frozen first layer whitens patches of 2×2 pixels.

    It has 2.0 million parameters. The other convolutions are initialised to copy their input
    channels; further output channels start at random. Source: Jordan, "94% on CIFAR-10 in 3.29
    Seconds on a Single GPU", https://arxiv.org/abs/2404.00498.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2, bias=False).requires_grad_(False)
        layers: list[nn.Module] = [nn.GELU()]
        for width, next_width in pairwise((24, 64, 256, 256)):
            first = nn.Conv2d(width, next_width, 3, padding=1, bias=False)
            second = nn.Conv2d(next_width, next_width, 3, padding=1, bias=False)
            for convolution in (first, second):
                nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
                norm = nn.BatchNorm2d(next_width, momentum=0.4)
                norm.weight.requires_grad_(False)
                layers.append(convolution)
                if convolution is first:
                    layers.append(nn.MaxPool2d(2))
                layers += [norm, nn.GELU()]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(256, num_classes, bias=False)

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first layer so that it whitens the patches of images, (N, 3, H, W)."""
        patches = functional.unfold(images.double(), 2)  # (N, 12, patches of an image)
        patches = patches.transpose(1, 2).flatten(0, 1)  # (patches, 12)
        variances, axes = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (axes / (variances + 1e-4).sqrt()).T.view(12, 3, 2, 2)
        self.whitening.weight.copy_(torch.cat((filters, -filters)))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of images.

        Args:
            images: (B, 3, H, W), of at least 9×9 pixels.

        Returns:
            Logits, (B, num_classes).
        """
        features = self.blocks(self.whitening(images)).amax((2, 3))  # (B, 256)
        return self.head(features) / 9


SIZES = (28, 32, 64, 96, 128, 224, 256, 384, 518)  # usual heights and widths of images
NETWORKS: dict[str, Any] = {
    "lenet": LeNet,
    "resnet18_cifar": resnet18_cifar,
    "whitened": WhitenedCNN,
}


@cache
def names_of_torchvision() -> list[str]:
    """Return the names of torchvision's networks for classification."""
    return torchvision.models.list_models(module=torchvision.models)


def own_network(name: str) -> str | None:
    """Return the key of `NETWORKS` that a name means, ignoring case: `whitened` for WhitenedCNN."""
    for key, make in NETWORKS.items():
        if name.lower() in (key, make.__name__.lower()):
            return key
    return None


def title(name: str) -> str:
    """Return a network's short name: LeNet for `lenet`, Net for `code.Net`, vit for `timm/vit`."""
    key = own_network(name)
    return NETWORKS[key].__name__ if key else re.split("[./]", name)[-1]


def count_parameters(network: nn.Module, trainable: bool = False) -> int:
    """Return the number of parameters. Lazy layers without a shape are not counted.

    Args:
        network: The network.
        trainable: Whether to count trainable parameters only.
    """
    count = 0
    for parameter in network.parameters():
        if not is_lazy(parameter) and (parameter.requires_grad or not trainable):
            count += parameter.numel()
    return count


def make_network(name: str, num_classes: int) -> nn.Module:
    """Create a network.

    Args:
        name: A key of `NETWORKS`, a network of `torchvision.models`, `timm/NAME`, or the import
            path of a function or class that takes the number of classes.
        num_classes: Number of classes.

    Raises:
        UserError: When there is no such network.
    """
    key = own_network(name)
    if key:
        return NETWORKS[key](num_classes)
    if name in names_of_torchvision():
        options = {}
        if name in ("googlenet", "inception_v3"):  # without their second head
            options = {"aux_logits": False, "init_weights": True}
        return torchvision.models.get_model(name, num_classes=num_classes, **options)
    if name.startswith("timm/"):
        return import_timm(name).create_model(name[5:], num_classes=num_classes)
    if "." not in name:
        near = nearest(name, [*NETWORKS, *names_of_torchvision()])
        raise UserError(f"--model.network {name}: there is no such network{near}")
    make = _imported(name)
    if name.startswith("torchvision.models.") and make.__name__ in names_of_torchvision():
        return make_network(make.__name__, num_classes)
    if not (make in NETWORKS.values() or may_run(make, (nn.Module,))):
        raise UserError(
            f"--model.network {name}: give a subclass of torch.nn.Module, or a function of your "
            "own module"
        )
    network = make(num_classes)
    if not isinstance(network, nn.Module):
        raise UserError(
            f"--model.network {name} returns {type(network).__name__}: return a torch.nn.Module"
        )
    return network


def shape_problem(network: nn.Module, image_shape: Sequence[int]) -> str | None:
    """Return the reason why a network rejects images of a shape (C, H, W), or None.

    The forward pass runs on the meta device, which computes only shapes.
    """
    tensors = [*network.named_parameters(), *network.named_buffers()]
    try:
        state = {name: tensor.to("meta") for name, tensor in tensors}
        with torch.random.fork_rng(devices=[]):
            functional_call(network, state, torch.empty(2, *image_shape, device="meta"))
    except Exception as error:  # networks raise exceptions of any type
        return one_line(str(error)) or type(error).__name__
    return None


def _imported(name: str) -> Any:
    """Return the class or function of a network's import path."""
    reason = distrust(name)
    if reason:
        raise UserError(f"--model.network {name}: {reason}")
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--model.network {name}: {error}") from error


def import_timm(name: str) -> Any:
    """Import timm, which is optional, for a network of this name."""
    try:
        import timm
    except ImportError:
        raise UserError(
            f"--model.network {name}: timm is not installed: pip install timm"
        ) from None
    if not timm.is_model(name[5:]):
        raise UserError(
            f"--model.network {name}: timm has no such "
            f"network{nearest(name[5:], timm.list_models())}"
        )
    return timm


def head_of(network: nn.Module) -> tuple[str, nn.Module]:
    """Return name and module of the last linear or convolutional layer."""
    for name, layer in reversed(list(network.named_modules())):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            return name, layer
    raise UserError(
        f"{type(network).__name__} has no linear or convolutional layer to take as its head"
    )
