"""Networks in plain torch, which map images to logits, and pretrained weights."""

import os
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parameter import is_lazy

from app.errors import UserError, nearest, one_line
from app.system.files import downloading, open_file
from app.system.torch_files import check_exists, load
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
        return _timm(name).create_model(name[5:], num_classes=num_classes)
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


def _timm(name: str) -> Any:
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


def checkpoint_of(path: Path, resumes: bool = False) -> Path:
    """Return a checkpoint of a run's folder; return a file unchanged.

    Args:
        path: Path of a checkpoint or of a run's folder.
        resumes: Whether to prefer the last checkpoint to the best.
    """
    if not os.path.isdir(path):  # unlike Path.is_dir, false for a name that is too long
        return path
    preferred = path / "checkpoints" / "best.ckpt"
    other = path / "checkpoints" / "last.ckpt"
    if resumes:
        preferred, other = other, preferred
    if other.is_file() and not preferred.is_file():
        return other
    return preferred


def read_weights(source: str, name: str) -> Any:
    """Read pretrained weights, and return the content of their file.

    Args:
        source: A file of torch or safetensors; a run's folder, for its best checkpoint; or
            `DEFAULT`, for the published weights of torchvision or timm, downloaded into their
            cache.
        name: Name of the network, for `DEFAULT`.

    Raises:
        UserError: When the weights cannot be read or downloaded.
    """
    return _published(name) if source == "DEFAULT" else _read(source)


def _read(source: str) -> Any:
    file = checkpoint_of(Path(source))
    if file.suffix != ".safetensors":
        return load(file, "--model.weights")
    check_exists(file, "--model.weights")
    try:
        from safetensors.torch import load_file

        with open_file(file):  # rejects pipes and devices
            return load_file(file)
    except Exception as error:  # safetensors raises several types, or is not installed
        raise UserError(
            f"--model.weights {source} cannot be read ({one_line(str(error))[:200]})"
        ) from error


def _published(name: str) -> dict[str, Tensor]:
    if not (name in names_of_torchvision() or name.startswith("timm/")):
        raise UserError(
            "--model.weights DEFAULT is for networks of torchvision and timm: give a file or a run"
        )
    if name.startswith("timm/"):
        remedy = "give a file of them to --model.weights"
        with downloading(f"--model.weights DEFAULT: no weights of {name}", remedy):
            return _timm(name).create_model(name[5:], pretrained=True).state_dict()
    url = torchvision.models.get_model_weights(name).DEFAULT.url
    remedy = f"put {url} into {Path(torch.hub.get_dir(), 'checkpoints')}"
    with downloading(f"--model.weights DEFAULT: no weights of {name}", remedy):
        # the network renames the tensors of old files
        return torchvision.models.get_model(name, weights="DEFAULT").state_dict()


def image_settings(source: str, name: str | None) -> dict[str, Any]:
    """Return the `--data` settings of pretrained weights: normalisation, sizes, interpolation.

    Args:
        source: As for `read_weights`.
        name: Name of the network.

    Raises:
        UserError: When the weights cannot be read.
    """
    if source == "DEFAULT" and name in names_of_torchvision():
        preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        if name in ("googlenet", "inception_v3"):  # trained with others than the preset's
            preset.mean = preset.std = [0.5] * 3
        return {
            "mean": preset.mean,
            "std": preset.std,
            "interpolation": preset.interpolation.value,
            "size": preset.crop_size[0],
            "resize": preset.resize_size[0],
        }
    if source == "DEFAULT" and name is not None and name.startswith("timm/"):
        preset = _timm(name).get_pretrained_cfg(name[5:])
        size = preset.input_size[-1]
        return {
            "mean": list(preset.mean),
            "std": list(preset.std),
            "interpolation": preset.interpolation,
            "size": size,
            "resize": round(size / preset.crop_pct),
        }
    if source == "DEFAULT":
        return {}
    content = _read(source)
    images = content.get("images") if isinstance(content, dict) else None
    # not a checkpoint of this application
    if not isinstance(images, dict) or "image_shape" not in images:
        return {}
    settings = {"size": images["image_shape"][1:]}
    for key in ("mean", "std", "resize", "interpolation"):
        if images.get(key) is not None:
            settings[key] = images[key]
    return settings


def load_weights(network: nn.Module, content: Any, source: str, may_start_anew: bool = True) -> str:
    """Load weights into a network, and return a message.

    The tensors may lie in any containers, and their names may have any prefix, such as a wrapper's
    `module.`. See `_prefixes`.

    Args:
        network: The network.
        content: Content of a file of weights.
        source: Origin of the weights, for messages.
        may_start_anew: Whether the network keeps its own head if the head's shape differs.

    Raises:
        UserError: When the weights are of another network.
    """
    initial = network.state_dict()
    tensors = dict(_tensors(content))
    prefix = _prefix(tensors, initial)
    weights: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith(prefix):
            weights[name.removeprefix(prefix)] = value
    problem = f"--model.weights {source} is of another network than {type(network).__name__}"
    if not weights.keys() & initial.keys():
        first = ", ".join(list(tensors)[:3]) or "it holds no tensors"
        raise UserError(f"{problem}: {first}, where the network has {', '.join(list(initial)[:3])}")
    head = head_of(network)[0]
    loaded: dict[str, Tensor] = {}
    new: list[str] = []
    wrong: list[str] = []
    for key, value in initial.items():
        if key in weights and _fits(weights[key], value):
            loaded[key] = weights[key]
        elif key.rpartition(".")[0] == head and may_start_anew:
            new.append(key)
        # weights of old versions of torch lack the counters of BatchNorm
        elif key in weights or not key.endswith(".num_batches_tracked"):
            shape = tuple(weights[key].shape) if key in weights else "missing"
            wrong.append(f"{key} is {shape}, here {tuple(value.shape)}")
    if wrong:
        entries = "; ".join(wrong[:3])
        raise UserError(f"{problem}: {len(wrong)} of {len(initial)} tensors differ: {entries}")
    for key, value in loaded.items():
        form = _form(value)
        expected = _form(initial[key])
        # averaged weights have the counters of BatchNorm as floats
        if form != expected and not key.endswith(".num_batches_tracked"):
            raise UserError(
                f"--model.weights {source}: {key} is {form}, here {expected}: convert it, and save "
                "it anew"
            )
    network.load_state_dict({**initial, **loaded})
    line = f"Weights of {source}: {len(loaded)} tensors loaded"
    if prefix:
        line += f" from {prefix[:-1]}"
    if new:
        line += f", {head} starts anew"
    if new and new[0] in weights:
        line += " for another number of classes"
    left = [key for key in weights if key not in initial]
    if left:
        line += f", {len(left)} left out, such as {left[0]}"
    return line


def _tensors(content: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of nested containers. A name joins the keys on the way to a tensor by dots.

    Names lack the parts that torch's wrappers insert.
    """
    if isinstance(content, Tensor):
        parts = [part for part in name.split(".") if part not in ("", *WRAPPERS)]
        yield ".".join(parts), content
    elif isinstance(content, list | tuple):
        content = dict(enumerate(content))
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _tensors(value, f"{name}.{key}")


# parts of names that torch's wrappers insert
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def _prefix(tensors: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> str:
    """Return the prefix whose removal makes most tensors match a network's, by name and shape.

    Among equals, a moving average precedes the trained weights, as in timm, and then the first one
    in the file.
    """
    matches: Counter[str] = Counter()
    for name, value in tensors.items():
        parts = name.split(".")
        for start in range(len(parts)):
            key = ".".join(parts[start:])
            if key in initial:
                matches[name.removesuffix(key)] += 1 + _fits(value, initial[key])

    def rank(prefix: str) -> tuple[int, bool]:
        return matches[prefix], "ema" in re.split(r"[._]", prefix.lower())

    return max(matches, key=rank, default="")


def _fits(value: Tensor, place: Tensor) -> bool:
    """Return whether a tensor has the shape of a network's; that of a lazy layer is unknown."""
    return is_lazy(place) or value.shape == place.shape


def _form(tensor: Tensor) -> str:
    """Return the kind of a tensor's values; a cast to another kind would lose some."""
    if tensor.is_meta:
        return "without values (meta)"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return "sparse"
    if tensor.is_complex():
        return "complex"
    return "floating-point" if tensor.is_floating_point() else "integer"
