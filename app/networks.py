"""Networks in plain torch, and pretrained weights. Each network maps images to class scores (logits)."""

import pkgutil
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from app.errors import UserError, nearest, one_line
from app.system.files import downloading


class LeNet(nn.Module):
    """Small CNN of PyTorch's CIFAR-10 tutorial: 62,006 parameters with ten classes.

    Source: https://docs.pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html, after LeCun et al.,
    "Gradient-based learning applied to document recognition", 1998.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.MaxPool2d(2),  # before ReLU: the result is the same, but ReLU computes only a quarter of the values
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
    """Multilayer perceptron over copies of a flattened image; more copies widen the input layer.

    With ``repeats`` N, the input is 28·28·N wide. The first layer's parameters grow with N, and so do the gradients
    that data parallelism communicates. Each batch is repeated on the device; the data set is not.
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

    The stem is a 3×3 convolution of stride 1 without max-pool, so that 32×32 images reach the first block at full size.
    Source: section 4.2 of https://arxiv.org/abs/1512.03385.
    """
    network = torchvision.models.resnet18(num_classes=num_classes)
    network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


class WhitenedCNN(nn.Module):
    """CNN for small images: 2.0 million parameters, and a frozen first layer that whitens patches of 2×2 pixels.

    The other convolutions are initialised to copy their input channels; further output channels start at random.
    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", https://arxiv.org/abs/2404.00498.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2, bias=False).requires_grad_(False)
        layers: list[nn.Module] = [nn.GELU()]
        for width, next_width in pairwise((24, 64, 256, 256)):
            first, second = (nn.Conv2d(inputs, next_width, 3, padding=1, bias=False) for inputs in (width, next_width))
            for convolution, shrink in ((first, [nn.MaxPool2d(2)]), (second, [])):
                nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
                norm = nn.BatchNorm2d(next_width, momentum=0.4)
                norm.weight.requires_grad_(False)
                layers += [convolution, *shrink, norm, nn.GELU()]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(256, num_classes, bias=False)

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first layer so that it whitens the patches of images, (N, 3, H, W)."""
        patches = functional.unfold(images.double(), 2).transpose(1, 2).flatten(0, 1)  # (patches, 12)
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


SIZES = (28, 32, 64, 96, 128, 192, 224, 256, 299, 336, 384, 448, 512, 518)  # usual heights and widths of images
NETWORKS: dict[str, Any] = {"lenet": LeNet, "resnet18_cifar": resnet18_cifar, "whitened": WhitenedCNN}


@cache
def names_of_torchvision() -> list[str]:
    """Return the names of torchvision's networks for classification."""
    return torchvision.models.list_models(module=torchvision.models)


def title(name: str) -> str:
    """Return the short name of a network: LeNet for `lenet`, Net for `my_code.Net`, vit for `timm/vit`."""
    return NETWORKS[name].__name__ if name in NETWORKS else re.split("[./]", name)[-1]


def count_parameters(network: nn.Module, trainable: bool = False) -> int:
    """Return the number of parameters. Lazy layers without a shape are not counted.

    Args:
        network: The network.
        trainable: Whether to count trainable parameters only.
    """
    known = [parameter for parameter in network.parameters() if not isinstance(parameter, nn.UninitializedParameter)]
    return sum(parameter.numel() for parameter in known if parameter.requires_grad or not trainable)


def make_network(name: str, num_classes: int) -> nn.Module:
    """Create a network.

    Args:
        name: A key of `NETWORKS`, a network of `torchvision.models`, `timm/NAME`, or the import path of a function or
            class that takes the number of classes.
        num_classes: Number of classes.

    Raises:
        UserError: When there is no such network.
    """
    if name in NETWORKS:
        return NETWORKS[name](num_classes)
    if name in names_of_torchvision():
        one_head = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
        network = torchvision.models.get_model(name, num_classes=num_classes, **one_head)
    elif name.startswith("timm/"):
        network = _timm(name).create_model(name[5:], num_classes=num_classes)
    else:
        if "." not in name:
            near = nearest(name, [*NETWORKS, *names_of_torchvision()])
            raise UserError(f"--model.network {name}: there is no such network{near}")
        try:
            make = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"--model.network {name}: {error}") from error
        network = make(num_classes)
        if not isinstance(network, nn.Module):
            raise UserError(f"--model.network {name} returns {type(network).__name__}: return a torch.nn.Module")
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


def _timm(name: str) -> Any:
    try:
        import timm
    except ImportError:
        raise UserError(f"--model.network {name}: timm is not installed: pip install timm") from None
    if not timm.is_model(name[5:]):
        raise UserError(f"--model.network {name}: timm has no such network{nearest(name[5:], timm.list_models())}")
    return timm


def head_of(network: nn.Module) -> tuple[str, nn.Module]:
    """Return name and module of the last linear or convolutional layer."""
    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if not layers:
        raise UserError(f"{type(network).__name__} has no linear or convolutional layer to take as its head")
    return layers[-1]


def checkpoint_of(path: Path) -> Path:
    """Return the best checkpoint of a run's folder, else the last one; return a file unchanged."""
    if not path.is_dir():
        return path
    checkpoints = [path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
    return next((file for file in checkpoints if file.is_file()), checkpoints[0])


def read_weights(source: str, name: str) -> dict[str, Tensor]:
    """Read pretrained weights.

    Args:
        source: A file of torch or safetensors; a run's folder, for its best checkpoint; or `DEFAULT`, for the
            published weights of torchvision or timm, downloaded into their cache.
        name: Name of the network, for `DEFAULT`.

    Raises:
        UserError: When the weights cannot be read or downloaded.
    """
    if source == "DEFAULT":
        return _published(name)
    state = _read(source)
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else {}
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _read(source: str) -> Any:
    """Return the content of a file of weights; tensors in torch's zip format are memory-mapped."""
    file = checkpoint_of(Path(source))
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except ImportError:
        raise UserError(f"--model.weights {source}: safetensors is not installed: pip install safetensors") from None
    except Exception as error:  # torch, zipfile, pickle and safetensors raise different types
        # hide torch's advice to set `weights_only=False`, because this would run the file's code
        has_code = "weights_only" in str(error)
        reason = "it holds more than tensors: save the model's state_dict()" if has_code else one_line(str(error))[:200]
        raise UserError(f"--model.weights {source}: {file} cannot be read ({reason})") from error


def _published(name: str) -> dict[str, Tensor]:
    if not (name in names_of_torchvision() or name.startswith("timm/")):
        raise UserError("--model.weights DEFAULT is for networks of torchvision and timm: give a file or a run")
    if name.startswith("timm/"):
        with downloading(f"--model.weights DEFAULT: no weights of {name}", "give a file of them to --model.weights"):
            return _timm(name).create_model(name[5:], pretrained=True).state_dict()
    weights, folder = torchvision.models.get_model_weights(name).DEFAULT, Path(torch.hub.get_dir(), "checkpoints")
    with downloading(f"--model.weights DEFAULT: no weights of {name}", f"put {weights.url} into {folder}"):
        return weights.get_state_dict(check_hash=True)


def image_settings(source: str, name: str | None) -> dict[str, Any]:
    """Return the `--data` settings with which weights were trained: normalisation, sizes, interpolation.

    Args:
        source: As for `read_weights`.
        name: Name of the network.

    Raises:
        UserError: When the weights cannot be read.
    """
    if source == "DEFAULT" and name in names_of_torchvision():
        preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        sizes = {"size": preset.crop_size[0], "resize": preset.resize_size[0]}
        if name in ("googlenet", "inception_v3"):  # they were trained with another mean and std than the preset's
            preset.mean = preset.std = [0.5] * 3
        return {"mean": preset.mean, "std": preset.std, "interpolation": preset.interpolation.value, **sizes}
    if source == "DEFAULT" and name is not None and name.startswith("timm/"):
        preset = _timm(name).get_pretrained_cfg(name[5:])
        size = preset.input_size[-1]
        sizes = {"size": size, "resize": round(size / preset.crop_pct)}
        return {"mean": [*preset.mean], "std": [*preset.std], "interpolation": preset.interpolation, **sizes}
    content = None if source == "DEFAULT" else _read(source)
    if not (images := content.get("images") if isinstance(content, dict) else None):
        return {}
    names = ("mean", "std", "resize", "interpolation")
    known = {name: images[name] for name in names if images.get(name) is not None}
    return {**known, "size": images["image_shape"][1:]}


def load_weights(network: nn.Module, state: Mapping[str, Tensor], source: str) -> str:
    """Load weights into a network, and return a message. If the head's size differs, the network keeps its own head.

    Args:
        network: The network.
        state: Weights by name, perhaps with the prefix of a wrapper, such as `module.`.
        source: Origin of the weights, for messages.

    Raises:
        UserError: When the weights are of another network.
    """
    initial = network.state_dict()
    prefixes = ("", "network.", "module.", "model.", "_orig_mod.")
    prefix = max(prefixes, key=lambda prefix: len(initial.keys() & {key.removeprefix(prefix) for key in state}))
    weights = {key.removeprefix(prefix): value for key, value in state.items()}
    head = head_of(network)[0]
    replaced = [key for key in initial if key not in weights or weights[key].shape != initial[key].shape]
    wrong = [key for key in replaced if key.rpartition(".")[0] != head]
    if wrong or not weights:
        first = wrong[0] if wrong else next(iter(initial))
        entry = f"{first} of {tuple(weights[first].shape)}" if first in weights else f"no {first}"
        shapes = f"it has {entry}, here {first} is {tuple(initial[first].shape)}"
        problem = f"--model.weights {source} is of another network than {type(network).__name__}: {shapes}"
        raise UserError(f"{problem}, and {len(wrong)} of {len(initial)} tensors differ")
    network.load_state_dict({**initial, **{key: weights[key] for key in initial if key not in replaced}})
    left = [key for key in weights if key not in initial]
    line = f"Weights of {source}: {len(initial) - len(replaced)} tensors loaded"
    if replaced:
        line += f", {head} starts anew for another number of classes"
    if left:
        line += f", {len(left)} left out, such as {left[0]}"
    return line
