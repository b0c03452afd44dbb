"""Settings that the user left open: those of pretrained weights, and of training on own images."""

import os
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from app.command.arguments import Arguments, Token
from app.command.parser import find_class, parameters
from app.data.datasets import EncodedImages
from app.errors import UserError
from app.modules import ImageClassifier
from app.modules.weights import image_settings, published_settings, read_weights
from app.system.machine import nvidia_smi

NETWORK = "resnet18"
IMAGE_SETTINGS = ("mean", "std", "size", "resize", "interpolation")
# recipes for own images; configs/finetune.yaml spells out the first one
FINETUNED = {
    # its steps are equally long for a steep head and for a flat one
    "model.optimizer": "torch.optim.AdamW",
    "model.optimizer.lr": 3e-5,
    "trainer.max_epochs": 5,
}
FROM_SCRATCH = {
    "model.optimizer": "torch.optim.AdamW",
    "model.optimizer.lr": 1e-3,
    "trainer.max_epochs": 30,
    "data.size": 128,
}
COMMON = {"model.label_smoothing": 0.1, "model.schedule": "onecycle", "data.batch_size": 32}
AUGMENTED = {"data.crop": "random_resized", "data.scale": [0.35, 1.0], "data.flip": True}
# settings of the user's, and those that they leave without effect
REPLACED = {
    "model.optimizer": ("model.optimizer.lr",),
    "model.scheduler": ("model.schedule",),
    "data.crop": ("data.scale",),
    "trainer.max_steps": ("trainer.max_epochs",),
}


def complete(arguments: Arguments, classes: dict[str, str]) -> None:
    """Add the flags that the user left open and that follow others.

    The image settings follow pretrained weights. Training on the user's own images begins with
    published weights and follows a recipe, unless a config chooses the model.

    Args:
        arguments: The arguments, which are extended.
        classes: Class of model and data, by section.
    """
    root = arguments.chosen("data.root")
    if root is not None and not os.path.isdir(root):
        return  # the data class names the missing folder, before a download of weights
    data = find_class("data", classes["data"]) or object
    network = arguments.chosen("model.network")
    weights = arguments.chosen("model.weights")
    settings: dict[str, Any] = {}
    is_configured = any("model" in config for config in arguments.configs.values())
    is_own = issubclass(data, EncodedImages) and not is_configured
    if is_own and find_class("model", classes["model"]) is ImageClassifier:
        network = network or NETWORK
        weights = weights or _weights_of(network)
        settings = {"model": classes["model"], "model.network": network, "model.weights": weights}
        settings |= _recipe(arguments, weights)
    names = {f"data.{name}": name for name in IMAGE_SETTINGS if name in parameters(data)}
    is_open = any(arguments.chosen(flag) is None for flag in names)
    if is_open and weights not in (None, "null"):
        images = image_settings(weights, network)
        settings |= {flag: images[name] for flag, name in names.items() if name in images}
    added = [
        Token(f"--{name}", str(value))
        for name, value in settings.items()
        if arguments.chosen(name) is None
    ]
    arguments.add(added)


def _weights_of(network: str) -> str:
    """Return `DEFAULT` if a network's published weights can be read or downloaded, else `null`."""
    if not published_settings(network):
        return "null"
    try:
        read_weights("DEFAULT", network)
    except UserError as error:
        rank_zero_info(f"Training from scratch, which takes longer and learns less. {error}")
        return "null"
    return "DEFAULT"


def _recipe(arguments: Arguments, weights: str) -> dict[str, Any]:
    """Return the recipe for own images, without what the user's settings replace."""
    recipe: dict[str, Any] = dict(COMMON)
    recipe |= FROM_SCRATCH if weights == "null" else FINETUNED
    if arguments.chosen("model.freeze") != "backbone":  # its features are computed once
        recipe |= AUGMENTED
        if arguments.chosen("data.placement") in ("memory", "device"):  # only workers crop
            del recipe["data.crop"], recipe["data.scale"]
    if arguments.chosen("trainer.accelerator") in (None, "auto", "gpu", "cuda"):
        generations = [float(version) for version in nvidia_smi("compute_cap")]
        if generations and torch.cuda.device_count():
            has_bfloat16 = min(generations) >= 8
            recipe["trainer.precision"] = "bf16-mixed" if has_bfloat16 else "16-mixed"
    for setting, replaced in REPLACED.items():
        if arguments.chosen(setting) is not None:
            for name in replaced:
                recipe.pop(name, None)
    return recipe
