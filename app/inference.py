"""A trained classifier in Python: `load("runs/NAME/version_0").predict("cat.jpg")`."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from torch import Tensor, nn

from app.data.image_files import FileSplit, files_in, pixels
from app.data.transforms import Transform
from app.errors import UserError, one_line
from app.fit.arguments import read_yaml
from app.fit.checkpoint_file import read
from app.fit.checkpoints import of_run
from app.fit.parser import PlainParser, import_trusted_only
from app.modules import ImageClassifier


class Prediction(NamedTuple):
    """Most likely classes of an image.

    Attributes:
        names: Names of the classes, the most likely first.
        probabilities: Their probabilities.
        file: Path of the image; None for an array or a tensor.
    """

    names: tuple[str, ...]
    probabilities: tuple[float, ...]
    file: str | None


class Classifier(nn.Module):
    """Trained classifier: a LightningModule with its normalisation and softmax, in evaluation mode.

    Args:
        module: The LightningModule.
        images: `class_names`, `image_shape` (C, H, W), `mean` and `std` of its training images.
        folder: Folder of its run.
    """

    def __init__(self, module: LightningModule, images: dict[str, Any], folder: Path) -> None:
        super().__init__()
        self.module, self.folder = module, folder
        self.class_names: Sequence[str] = images["class_names"]
        self.image_shape: tuple[int, int, int] = tuple(images["image_shape"])
        transform = Transform(images["mean"], images["std"])
        self.register_buffer("mean", transform.mean)  # (C, 1, 1)
        self.register_buffer("std", transform.std)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return class probabilities (B, classes) of images, uint8 (B, C, H, W) of the training's shape."""
        return self.module((images.float() - self.mean) / self.std).float().softmax(1)

    @torch.inference_mode()
    def predict(self, images: Any, k: int = 1, batch_size: int = 64) -> Any:
        """Return the most likely classes of images.

        Files and images of another size are decoded and resized as for training.

        Args:
            images: A file, a folder, an array (H, W, C) or a tensor (C, H, W), uint8; or a list of these, or a batch
                (B, …).
            k: Number of classes.
            batch_size: Number of images per forward pass.

        Returns:
            A `Prediction` for one image; a list of them for a folder, a list or a batch.

        Raises:
            UserError: When an image cannot be read, or is not uint8.
        """
        if not 1 <= k <= len(self.class_names):
            raise UserError(f"k={k}: the model has {len(self.class_names)} classes")
        is_path = isinstance(images, str | os.PathLike)
        is_single = os.path.isfile(images) if is_path else getattr(images, "ndim", 4) == 3
        items: list[Any] = []
        for item in [images] if is_path or is_single else images:
            items += files_in([os.fspath(item)]) if isinstance(item, str | os.PathLike) else [item]
        found = list(self._predictions(items, k, batch_size))
        return found[0] if is_single else found

    def _predictions(self, items: Sequence[Any], k: int, batch_size: int) -> Iterator[Prediction]:
        for start in range(0, len(items), batch_size):
            part = items[start : start + batch_size]
            batch = torch.stack([self._pixels(item).to(self.mean.device) for item in part])  # (B, C, H, W)
            probabilities, labels = self(batch).topk(k)  # (B, k)
            for item, row, best in zip(part, probabilities.tolist(), labels.tolist(), strict=True):
                names = tuple(self.class_names[label] for label in best)
                yield Prediction(names, tuple(row), item if isinstance(item, str) else None)

    def _pixels(self, item: Any) -> Tensor:
        """Return an image in the training's shape, uint8 (C, H, W)."""
        if isinstance(item, str):
            return FileSplit([(item, -1)], self.image_shape)[0]
        if isinstance(item, Tensor):
            if item.shape == self.image_shape and item.dtype == torch.uint8:
                return item
            item = item.movedim(0, -1).cpu()
        array = np.asarray(item)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4):
            form = "give pixels of uint8, 0 to 255: arrays (H, W, C), tensors (C, H, W)"
            raise UserError(f"an image of {array.dtype} and shape {array.shape}: {form}")
        return pixels(Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array), self.image_shape)


def load(run: str | Path, device: torch.device | str | None = None) -> Classifier:
    """Load a trained classifier; the data set is not needed.

    Args:
        run: Folder of a run, such as `runs/NAME/version_0`, whose best checkpoint counts, else the last one; or a
            checkpoint file.
        device: Device to compute on; by default the accelerator, if there is one.

    Raises:
        UserError: When there is no checkpoint, no config.yaml beside it, or the model is not an `ImageClassifier`
            trained on this application's data.
    """
    file = Path(run)
    if file.is_dir():
        try:
            file = of_run("best", file / "run.json")
        except UserError:
            file = of_run("last", file / "run.json")
    checkpoint = read(file)
    folders = (Path(os.path.normpath(file / above)) for above in ("..", "../.."))
    folder = next((each for each in folders if (each / "config.yaml").is_file()), None)
    if folder is None:
        raise UserError(f"{file}: the run's config.yaml is not beside it: copy it there")
    images = checkpoint.get("images")
    if not images:
        raise UserError(f"{file} has no class names: load is for an ImageClassifier trained on an ImageData")
    module = _build(folder / "config.yaml", len(images["class_names"]))
    try:
        module.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        raise UserError(f"{file} does not fit {folder / 'config.yaml'}: {one_line(str(error))[:200]}") from error
    device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return Classifier(module, images, folder).to(device)


def _build(config: Path, num_classes: int) -> LightningModule:
    """Instantiate the model of a run's config, from trusted modules only."""
    import_trusted_only()
    parser = PlainParser()
    parser.add_subclass_arguments(ImageClassifier, "model", required=True)
    settings = read_yaml(str(config)).get("model", {})
    settings["init_args"] = {**settings.get("init_args", {}), "num_classes": num_classes}
    return parser.instantiate_classes(parser.parse_object({"model": settings})).model
