"""Pretrained weights: read from a file, a run or a library, and load into a network."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from app.errors import UserError, one_line
from app.modules.networks import head_of, import_timm, names_of_torchvision
from app.system.files import downloading, open_file
from app.system.torch_files import check_exists, load


def checkpoint_of(path: Path, resumes: bool = False) -> Path:
    """Return a checkpoint of a run's folder; return a file unchanged.

    Args:
        path: Path of a checkpoint or of a run's folder.
        resumes: Whether to prefer the last checkpoint to the best.
    """
    if not os.path.isdir(path):  # unlike Path.is_dir, false for a name that is too long
        return path
    names = ["last.ckpt", "best.ckpt"] if resumes else ["best.ckpt", "last.ckpt"]
    preferred = path / "checkpoints" / names[0]
    other = path / "checkpoints" / names[1]
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
            return import_timm(name).create_model(name[5:], pretrained=True).state_dict()
    url = torchvision.models.get_model_weights(name).DEFAULT.url
    remedy = f"put {url} into {Path(torch.hub.get_dir(), 'checkpoints')}"
    with downloading(f"--model.weights DEFAULT: no weights of {name}", remedy):
        # the network renames the tensors of old files
        return torchvision.models.get_model(name, weights="DEFAULT").state_dict()


def published_settings(name: str) -> dict[str, Any]:
    """Return the `--data` settings with which a network of torchvision or timm was published.

    For another network, or one without published weights, return nothing.
    """
    if name in names_of_torchvision():
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
    preset = import_timm(name).get_pretrained_cfg(name[5:]) if name.startswith("timm/") else None
    if preset is not None:
        size = preset.input_size[-1]
        return {
            "mean": list(preset.mean),
            "std": list(preset.std),
            "interpolation": preset.interpolation,
            "size": size,
            "resize": round(size / preset.crop_pct),
        }
    return {}


def image_settings(source: str, name: str | None) -> dict[str, Any]:
    """Return the `--data` settings of pretrained weights: normalisation, sizes, interpolation.

    Args:
        source: As for `read_weights`.
        name: Name of the network.

    Raises:
        UserError: When the weights cannot be read.
    """
    images = None
    if source != "DEFAULT":
        content = _read(source)
        images = content.get("images") if isinstance(content, dict) else None
    # not a checkpoint of this application
    if not isinstance(images, dict) or "image_shape" not in images:
        return published_settings(name or "")
    settings = {"size": images["image_shape"][1:]}
    for key in ("mean", "std", "resize", "interpolation"):
        if images.get(key) is not None:
            settings[key] = images[key]
    return settings


def load_weights(
    network: nn.Module, content: Any, source: str, may_start_anew: bool = True
) -> tuple[str, bool]:
    """Load weights into a network.

    The tensors may lie in any containers, and their names may have any prefix, such as a wrapper's
    `module.`. See `_prefixes`.

    Args:
        network: The network.
        content: Content of a file of weights.
        source: Origin of the weights, for messages.
        may_start_anew: Whether the network keeps its own head if the head's shape differs.

    Returns:
        A message, and whether the network keeps its own head.

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
    return line, bool(new)


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
