"""Command `python -m app export`: writes a trained classifier for ONNX Runtime or torch.

The graph maps uint8 images (B, C, h, w) to class probabilities (B, classes), for any number B and
any size: it resizes, crops and normalises them. The file also holds the class names.
"""

import io
import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from jsonargparse import Namespace
from torch import Tensor
from torch.export import Dim

from app.command.checkpoints import find_checkpoint
from app.command.parser import PlainParser
from app.command.run_options import Run
from app.errors import UserError
from app.use.inference import Classifier, load

USAGE = """\
python -m app export --run.name NAME [--ckpt_path best|last|FILE] [--format onnx|torch]

Writes model.onnx or model.pt2 into the run's folder: a graph from uint8 images (B, C, h, w) of any
size to class probabilities (B, classes), with resizing, crop and normalisation. Compares its
predictions with the model's on 64 images, and prints the lines from a JPEG file to its class."""

FILES = {"onnx": "model.onnx", "torch": "model.pt2"}
# largest difference between the probabilities of file and model; ONNX Runtime rounds a few of the
# resized pixels to the next of 256 levels
TOLERANCE = 0.02
LOADING = {  # code that loads the file and classifies a picture, by format
    "onnx": """\
import json, numpy, onnxruntime
from PIL import Image, ImageOps
picture = ImageOps.exif_transpose(Image.open("cat.jpg")).convert("{mode}")
images = numpy.array(picture, ndmin=4){axes}  # uint8 (B, {channels}, h, w)
session = onnxruntime.InferenceSession("{file}")
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
probabilities = session.run(None, {{"images": images}})[0]
print([names[label] for label in probabilities.argmax(1)])""",
    "torch": """\
import json, numpy, torch
from PIL import Image, ImageOps
picture = ImageOps.exif_transpose(Image.open("cat.jpg")).convert("{mode}")
images = torch.from_numpy(numpy.array(picture, ndmin=4){axes})  # uint8 (B, {channels}, h, w)
names = {{"class_names": ""}}
model = torch.export.load("{file}", extra_files=names).module()
probabilities = model(images)
print([json.loads(names["class_names"])[label] for label in probabilities.argmax(1)])""",
}


def read(arguments: list[str]) -> Namespace:
    """Return the options of `export`."""
    parser = PlainParser(prog="python -m app export", usage=USAGE)
    parser.add_argument("--ckpt_path", default="best", help="best or last of --run.name; or a file")
    parser.add_argument("--run.name", default="", help="name of the run")
    parser.add_argument("--run.root", default=Run.root, help="directory of all runs")
    parser.add_argument(
        "--format", type=Literal["onnx", "torch"], default="onnx", help="model.onnx or model.pt2"
    )
    return parser.parse_args(arguments)


def run(arguments: list[str]) -> int:
    """Export a classifier, check the file, and print how to load it.

    Args:
        arguments: The arguments after `export`.

    Raises:
        UserError: When there is no checkpoint, a package is missing, or the model cannot be
            exported.
    """
    options = read(arguments)
    checkpoint = find_checkpoint(options.ckpt_path, [], options.run.root, options.run.name)
    classifier = load(checkpoint, "cpu")
    channels, height, width = classifier.image_shape
    file = classifier.folder / FILES[options.format]
    generator = torch.Generator().manual_seed(0)
    odd = (64, channels, height + 5, 2 * width + 3)
    images = torch.randint(256, odd, dtype=torch.uint8, generator=generator)
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            difference = replace(classifier, images, file)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f'--format {options.format} needs {error.name}: pip install "data-parallel-lab[export]"'
            ", or onnx onnxscript onnxruntime"
        ) from error
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}): make room there, "
            "or copy the run elsewhere"
        ) from error
    except Exception as error:  # torch.export raises many types
        reason = f"{type(error).__name__}: {error}"[:300]
        raise UserError(f"{file} cannot be written ({reason}): --verbose shows where") from error
    picture = {"mode": "RGB", "axes": ".transpose(0, 3, 1, 2)"}
    if channels == 1:
        picture = {"mode": "L", "axes": ""}
    code = LOADING[options.format].format(file=file, channels=channels, **picture)
    shape = f"(B, {channels}, h, w) of any size"
    classes = len(classifier.class_names)
    print(f"exported  {file}: uint8 images {shape} to probabilities (B, {classes})")
    size = f"{height + 5}×{2 * width + 3}"
    print(f"checked   on 64 images of {size}: probabilities differ by at most {difference:.1g}")
    print(f"load it   in Python, without this application:\n\n{code}")
    return 0


def replace(classifier: Classifier, images: Tensor, file: Path) -> float:
    """Write a classifier's file, check it, and let it replace an earlier one.

    Returns:
        Largest difference between the probabilities of the file and of the classifier.

    Raises:
        UserError: When the difference is too large. An earlier file is kept.
    """
    with TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        new = Path(folder, file.name)
        probabilities = write(classifier, images, new)
        difference = float((probabilities - classifier(images)).abs().max())
        if not difference < TOLERANCE:
            raise UserError(
                f"{file}: its probabilities would differ from the model's by {difference:.1g}: "
                "give another --format"
            )
        # the graph of a large network is the last to be replaced, because it reads its weights from
        # a second file
        for weights in Path(folder).glob("*.data"):
            weights.replace(file.with_name(weights.name))
        new.replace(file)
    return difference


def write(classifier: Classifier, images: Tensor, file: Path) -> Tensor:
    """Write a classifier's file, `.onnx` or `.pt2`, and return the file's probabilities of images.

    Args:
        classifier: The classifier.
        images: uint8 (B, C, h, w).
        file: Path of the file.
    """
    names = json.dumps(classifier.class_names)
    dynamic = {"images": {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}}
    # two images, because torch.export would treat a batch size of 1 as a constant
    program = torch.export.export(classifier, (images[:2],), dynamic_shapes=dynamic)
    if file.suffix == ".pt2":
        buffer = io.BytesIO()  # because torch's own writer ends the process on a full disk
        torch.export.save(program, buffer, extra_files={"class_names": names})
        file.write_bytes(buffer.getbuffer())
        return torch.export.load(file).module()(images)
    import onnxruntime  # type: ignore[import-untyped]

    exported = torch.onnx.export(
        program, dynamo=True, verbose=False, input_names=["images"], output_names=["probabilities"]
    )
    assert exported is not None  # with dynamo, torch returns the program
    exported.model.metadata_props["class_names"] = names
    exported.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
