"""Command `python -m app export`: writes a trained classifier as one file, for ONNX Runtime or torch.

The graph takes uint8 images (B, C, H, W), of any number B, and returns class probabilities (B, classes). It contains
the normalisation, and the file contains the names of the classes.
"""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from app.errors import UserError, one_line
from app.fit.checkpoints import find_checkpoint
from app.fit.parser import PlainParser
from app.fit.run_options import Run
from app.inference import Classifier, load

USAGE = """\
python -m app export --ckpt_path FILE [--format onnx|torch]
       python -m app export --ckpt_path best --run.name NAME [--format onnx|torch]

Writes model.onnx or model.pt2 into the run's folder: a graph from uint8 images (B, C, H, W) to class probabilities
(B, classes), with normalisation and any batch size. Compares its predictions with the model's on 64 images."""

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
IMAGES = 64
TOLERANCE = 1e-4  # largest difference of a probability
LOADING = {
    "onnx": """\
import json, onnxruntime
session = onnxruntime.InferenceSession("{file}")
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
probabilities = session.run(None, {{"images": images}})[0]  # images: array, uint8 (B, {shape}), sized as for training
print([names[label] for label in probabilities.argmax(1)])""",
    "torch": """\
import json, torch
extra = {{"class_names": ""}}
model = torch.export.load("{file}", extra_files=extra).module()
probabilities = model(images)  # images: tensor, uint8 (B, {shape}), sized as for training
print([json.loads(extra["class_names"])[label] for label in probabilities.argmax(1)])""",
}


def run(arguments: list[str]) -> int:
    """Export a classifier, check the file, and print how to load it.

    Args:
        arguments: The arguments after `export`.

    Raises:
        UserError: When there is no checkpoint, a package is missing, or the network cannot be exported.
    """
    parser = PlainParser(prog="python -m app export", usage=USAGE)
    parser.add_argument("--ckpt_path", type=str, default="best", help="best, last or a file")
    parser.add_argument("--run.name", type=str | None, default=None, help="name of the run, for best and last")
    parser.add_argument("--run.root", type=str, default=Run.root, help="folder of all runs")
    parser.add_argument("--format", type=Literal["onnx", "torch"], default="onnx", help="model.onnx or model.pt2")
    options = parser.parse_args(arguments)
    name, kind = options.ckpt_path, options.format
    if name in ("best", "last") and options.run.name is None:
        raise UserError(f"--ckpt_path {name}: give --run.name, or the path of a file")
    missing = [package for package in PACKAGES if kind == "onnx" and not importlib.util.find_spec(package)]
    if missing:
        raise UserError(f"--format onnx needs {', '.join(missing)}: pip install {' '.join(missing)}")
    classifier = load(find_checkpoint(name, [], options.run.root, options.run.name or ""), "cpu")
    shape, file = classifier.image_shape, classifier.folder / {"onnx": "model.onnx", "torch": "model.pt2"}[kind]
    images = torch.randint(256, (IMAGES, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = classifier(images)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            exported = (_onnx if kind == "onnx" else _torch)(classifier, images, file)
    except Exception as error:  # torch.export raises many types
        reason = f"{type(error).__name__}: {one_line(str(error))[:200]} (--verbose shows where)"
        raise UserError(f"--format {kind}: the model cannot be exported to {file} ({reason})") from error
    difference = float((exported - expected).abs().max())
    if not difference <= TOLERANCE:
        raise UserError(f"{file} predicts probabilities that differ by {difference:.1g}: give another --format")
    sides = ", ".join(map(str, shape))
    print(f"exported  {file}: uint8 images (B, {sides}) to probabilities (B, {len(classifier.class_names)})")
    print(f"checked   on {IMAGES} random images: probabilities differ by at most {difference:.1g}")
    print(f"load it   in Python, without this application:\n\n{LOADING[kind].format(file=file, shape=sides)}")
    return 0


def _program(classifier: Classifier, images: Tensor) -> torch.export.ExportedProgram:
    dynamic = {"images": {0: torch.export.Dim("batch")}}
    return torch.export.export(classifier, (images[:2],), dynamic_shapes=dynamic)  # 2, because 1 would be a constant


def _torch(classifier: Classifier, images: Tensor, file: Path) -> Tensor:
    """Write the file of torch.export, and return its probabilities of images."""
    names = json.dumps(list(classifier.class_names))
    torch.export.save(_program(classifier, images), file, extra_files={"class_names": names})
    return torch.export.load(file).module()(images)


def _onnx(classifier: Classifier, images: Tensor, file: Path) -> Tensor:
    """Write the ONNX file, and return ONNX Runtime's probabilities of images."""
    import onnxruntime

    program = torch.onnx.export(
        _program(classifier, images), dynamo=True, input_names=["images"], output_names=["probabilities"], verbose=False
    )
    assert program is not None
    program.model.metadata_props["class_names"] = json.dumps(list(classifier.class_names))
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
