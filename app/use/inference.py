"""A trained classifier in Python: `load("runs/NAME/version_0").predict("cat.jpg")`."""

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import LightningModule
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from app.command.arguments import read_yaml
from app.command.checkpoint_file import read
from app.command.parser import PlainParser, import_trusted_only
from app.data.image_files import FileSplit, NewSource, files_in, pixels
from app.data.transforms import Transform
from app.errors import UserError, one_line
from app.modules import ImageClassifier
from app.modules.weights import checkpoint_of, load_weights


class Prediction(NamedTuple):
    """Most likely classes of an image.

    Attributes:
        names: Names of the classes, the most likely first.
        probabilities: Their probabilities.
        file: Path of the image; None for a PIL image, an array or a tensor.
    """

    names: tuple[str, ...]
    probabilities: tuple[float, ...]
    file: str | None


class Classifier(nn.Module):
    """Trained classifier from pixels to probabilities: a LightningModule in evaluation mode.

    Args:
        module: The LightningModule.
        source: Classes, shape and normalisation of images, and their resizing and cropping.
        folder: Folder of the run's config.yaml.
    """

    def __init__(self, module: LightningModule, source: NewSource, folder: Path) -> None:
        super().__init__()
        self.module = module
        self.geometry = source.geometry
        self.folder = folder
        self.class_names = source.class_names
        self.image_shape = source.image_shape
        self.transform = Transform(source.mean, source.std)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities (B, classes) of images of any size on the host, uint8 (B, C, h, w).

        `export` writes this method as a graph.
        """
        return self.classify(self.geometry.evaluated(images))

    def classify(self, images: Tensor) -> Tensor:
        """Return probabilities (B, classes) of images in training shape, uint8 (B, C, H, W)."""
        images = self.transform(images.to(self.module.device))
        return self.module(images).float().softmax(1)

    @torch.inference_mode()
    def predict(self, images: Any, k: int = 1, batch_size: int = 64) -> Any:
        """Return the most likely classes of images, resized and cropped as for validation.

        Args:
            images: A file, a folder, a PIL image of any mode, a uint8 array (H, W, C), or a uint8
                tensor (C, H, W). Several images are a list of these, an array (B, H, W, C), or a
                tensor (B, C, H, W).
            k: Number of classes to return.
            batch_size: Number of images per forward pass.

        Returns:
            A `Prediction` for a single image; a list of them for a folder, a list or a batch.

        Raises:
            UserError: When an image is unreadable or not uint8, or k is below 1 or above the number
                of classes.
        """
        if not 1 <= k <= len(self.class_names):
            raise UserError(f"k={k}: the model has {len(self.class_names)} classes")
        items = []
        is_single = isinstance(images, Image.Image) or getattr(images, "ndim", 0) == 3
        if isinstance(images, str | os.PathLike):
            is_single = os.path.isfile(images)
            images = [images]
        elif is_single:
            images = [images]
        for item in images:
            if isinstance(item, str | os.PathLike):
                items += files_in([os.fspath(item)], Counter())
            else:
                items.append(item)
        predictions = []
        for start in range(0, len(items), batch_size):
            chunk = items[start : start + batch_size]
            batch = torch.stack([self._pixels(item) for item in chunk])
            best = self.classify(batch).topk(k)  # (B, k)
            for item, row, labels in zip(chunk, best.values, best.indices, strict=True):
                file = None
                if isinstance(item, str):
                    file = item
                names = tuple(self.class_names[label] for label in labels)
                predictions.append(Prediction(names, tuple(row.tolist()), file))
        if is_single:
            return predictions[0]
        return predictions

    def _pixels(self, item: Any) -> Tensor:
        """Return an image in the training's shape, uint8 (C, H, W)."""
        if isinstance(item, str):
            return FileSplit([item], [-1], self.image_shape, self.geometry)[0]
        if isinstance(item, Tensor):
            if item.shape == self.image_shape and item.dtype == torch.uint8:
                return item.cpu()
            item = item.movedim(0, -1).cpu()
        if not isinstance(item, Image.Image):
            array = np.asarray(item)
            is_image = array.ndim == 3 and array.shape[2] in (1, 3, 4) and array.size > 0
            if array.dtype != np.uint8 or not is_image:
                raise UserError(
                    f"an image of {array.dtype} and shape {array.shape}: "
                    "give pixels of uint8, 0 to 255: arrays (H, W, C), tensors (C, H, W)"
                )
            item = to_pil_image(array)
        try:
            return self.geometry.evaluated(pixels(item, self.image_shape[0]))
        except Exception as error:  # as for files
            raise UserError(f"{item} cannot be read ({one_line(str(error))})") from error


def load(run: str | Path, device: torch.device | str | None = None) -> Classifier:
    """Load a trained classifier, without its data set.

    Args:
        run: A checkpoint file, or a run's folder, such as `runs/NAME/version_0`. In a folder, the
            best checkpoint is loaded; if there is none, the last one.
        device: Device to compute on; by default the accelerator, if there is one.

    Raises:
        UserError: When the checkpoint or the run's config.yaml is missing, the checkpoint is not of
            an `ImageClassifier` trained on an `ImageData`, or the network's module is not trusted.
    """
    file = checkpoint_of(Path(run))
    checkpoint = read(file)
    folder = file.parent
    if not (folder / "config.yaml").is_file():
        folder = Path(os.path.normpath(file / "../.."))
    config = read_yaml(str(folder / "config.yaml"))
    device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        source = NewSource(checkpoint, file)
        module = _model(config.get("model") or {}, len(source.class_names))
        load_weights(module, checkpoint["state_dict"], str(file), may_start_anew=False)
        return Classifier(module.to(device), source, folder)
    except UserError:
        raise
    except Exception as error:  # a damaged config or checkpoint raises anything
        reason = f"{type(error).__name__}: {one_line(str(error))}"[:300]
        raise UserError(
            f"{folder}/config.yaml and {file} make no classifier ({reason}): give another run"
        ) from error


def _model(settings: dict[str, Any], num_classes: int) -> ImageClassifier:
    """Instantiate the model of a run's config, from trusted modules only."""
    import_trusted_only()
    parser = PlainParser()
    parser.add_subclass_arguments(ImageClassifier, "model", required=True)
    arguments = {**settings.get("init_args", {}), "num_classes": num_classes}
    parsed = parser.parse_object({"model": {**settings, "init_args": arguments}})
    return parser.instantiate_classes(parsed).model
