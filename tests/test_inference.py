"""`app.load`, `app.fit` and `export`: use of a trained classifier outside of a run."""

import contextlib
import io
import re
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from exact_code import Linear
from forked import fork_app
from harness import QUIET, SLOW, draw_images, on_cpu, options, slow, tiny
from matplotlib.cbook import get_sample_data
from PIL import Image
from test_tables import saved, table  # noqa: F401
from torchvision.transforms import InterpolationMode, v2

import app as package
from app.errors import UserError
from app.lab.runs import _whole_name
from app.modules import CIFARCNN
from app.use.inference import load

NAMES = ("cat", "dog", "eel")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directory of a run on image files of different sizes."""
    folder = tmp_path_factory.mktemp("trained")
    images = draw_images(folder / "images", NAMES, train=12, test=4)
    flags = [f"--data={images}", "--model=my_networks.Wide", *QUIET]
    flags += options(size=24, resize=28, interpolation="bicubic", batch_size=9, max_epochs=1)
    flags += options(accelerator="cpu", test=False, root=folder / "runs", name="x")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        Path("my_networks.py").write_text(WIDE)
        from app.cli import main

        assert main(["fit", *flags]) == 0
        yield folder / "runs/x/version_0"
        sys.modules.pop("my_networks", None)


WIDE = """
import torch
from torch import nn
from app.modules import ImageClassifier


class Wide(ImageClassifier):
    def __init__(self, width: int = 8, num_classes: int = 10):
        layers = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(4 * width, num_classes)]
        super().__init__(nn.Sequential(*layers), num_classes)
"""


@pytest.fixture(scope="module")
def model(trained):
    return load(trained, "cpu")


def test_every_form_of_an_image(trained, model):
    """A resized image has the same prediction from a file, an array, a tensor and a batch."""
    folder = trained.parents[2] / "images/test/eel"
    file = folder / "01.png"
    array = np.asarray(Image.open(file))
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    one = model.predict(file)
    nameless = one._replace(file=None)
    assert one == model.predict(str(file)) == model.predict(folder)[1]
    assert model.predict([file, folder])[0] == one
    assert model.predict(Image.open(file)) == nameless
    for form in (array, tensor):
        assert model.predict(form) == nameless
        assert model.predict(form[None]) == model.predict([form]) == [nameless]
    for mode in ("1", "L", "P", "RGBA", "CMYK"):
        picture = Image.open(file).convert(mode)
        assert model.predict([picture]) == model.predict([np.asarray(picture.convert("RGB"))])
    grey = array[:, :, :1]
    assert model.predict(grey) == model.predict(np.repeat(grey, 3, axis=2))
    assert len(model.predict(torch.zeros((2, 3, 24, 24), dtype=torch.uint8))) == 2


def test_wrong_input_is_rejected(trained, model, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("text")
    empty = tmp_path / "empty.jpg"
    empty.touch()
    for images, problem in (
        ("gone.jpg", "gone.jpg cannot be read"),
        (torch.rand(3, 8, 8), "an image of float32 and shape (8, 8, 3): give pixels of uint8"),
        (np.zeros((8, 8), np.uint8), "an image of uint8 and shape (8,)"),
        (
            np.zeros((0, 8, 3), np.uint8),
            "an image of uint8 and shape (0, 8, 3): give pixels of uint8",
        ),
        ("a\0b", "cannot be read (embedded null byte)"),
        (tmp_path / "notes", "notes holds no images: 1 .txt"),
        (empty, "empty.jpg cannot be read (not an image)"),
        (Image.new("F", (8, 8)), "cannot be read (pixels of 32 bits, mode F)"),
    ):
        with pytest.raises(UserError) as error:
            model.predict(images)
        assert problem in str(error.value)
    with pytest.raises(UserError, match="k=4: the model has 3 classes"):
        model.predict(np.zeros((8, 8, 3), np.uint8), k=4)
    with pytest.raises(UserError, match=r"gone.* no such file"):
        package.load(tmp_path / "gone")


def test_classifier_beside_a_config(trained, tmp_path):
    """A checkpoint is loaded with the config beside it, if this is of its network and trusted."""
    path = shutil.copy(trained / "checkpoints/best.ckpt", tmp_path)
    with pytest.raises(UserError, match=r"config.yaml: there is no such file"):
        load(path)
    config = Path(shutil.copy(trained / "config.yaml", tmp_path))
    assert load(path).class_names == NAMES
    whole = config.read_text()
    for text, problem in (
        (whole.replace("width: 8", "width: 9"), "is of another network"),
        ("model: {class_path: os.system}", "os.system.* is not trusted: give --trust os"),
        (
            "model: {class_path: app.modules.ImageClassifier, init_args: {network: os.system}}",
            "os.system.* is not trusted: give --trust os",
        ),
    ):
        config.write_text(text)
        with pytest.raises(UserError, match=problem):
            load(path)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(UserError, match="has no class names"):
        load(path)


GREY = "--model=FashionMLP --model.repeats=1"
ODD = "--data.size=28 --data.resize=30 --data.interpolation=bicubic --data.channels=1"
SOURCES = [
    ("cifar_root", "CIFAR10 --data.root=data --model.weights=lenet.pth"),
    ("fashion_root", f"FashionMNIST --data.root=data {GREY}"),
    ("image_root", "Synthetic --data.images=30"),
    ("image_root", f"ImageFolder --data.root=images {GREY} {ODD} --data.batch_size=0.5"),
    slow("table", "ImageTable --data.csv=images/all.csv --data.mean=[0.1,0.2,0.3]"),
    slow("saved", "HuggingFace --data.path=images/saved"),
]


@pytest.mark.parametrize(("fixture", "flags"), SOURCES)
def test_new_images(fixture, flags, fit, app, tmp_path, request, monkeypatch):
    """`predict` and `app.load` prepare new images as in training, whose images are gone.

    The probabilities are those of torchvision's usual transforms, also from two processes.
    """
    monkeypatch.chdir(tmp_path)
    request.getfixturevalue(fixture)
    torch.save(CIFARCNN().network.state_dict(), "lenet.pth")
    run = fit("--data", *flags.split(), *options(max_epochs=1, test=False), *QUIET)
    Path("lenet.pth").unlink()
    for place in ("data", "images"):
        shutil.rmtree(place, ignore_errors=True)
    new = draw_images(Path("new"), ("a", "b[red]"), x=11)
    predict = ["predict", f"--ckpt_path={run}", *QUIET, "--run.top_k=2", "--data.predict_dir"]
    if "ImageFolder" in flags:
        new = new.resolve()
        two = [f"[{new}/x/a, '{new}/x/b[red]']", *on_cpu("ddp_fork"), "--data.batch_size=5"]
        out = fork_app(*predict, *two)
    else:
        out = app(*predict, new)
        assert re.search(r"\nnew/x/b\[red\]/00.jpg  \w.* \d+\.\d%", out)
    assert "… and 2 more" in out
    predicted = pd.read_csv(run / "predict_1/predictions.csv", index_col="file")
    files = sorted(map(str, new.rglob("*.*")))
    assert list(predicted.index) == files
    model = load(run, "cpu")
    images = torch.load(run / "checkpoints/best.ckpt", weights_only=True)["images"]
    channels, _, size = images["image_shape"]
    kind = InterpolationMode(images.get("interpolation", "bilinear"))
    steps = [v2.PILToTensor(), v2.Resize(images.get("resize") or size, kind), v2.CenterCrop(size)]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(images["mean"], images["std"])]
    for row, prediction in zip(predicted.itertuples(), model.predict(files, k=2), strict=True):
        picture = Image.open(row.Index).convert({1: "L", 3: "RGB"}[channels])
        shares, labels = model.module(v2.Compose(steps)(picture)[None]).softmax(1)[0].topk(2)
        names = tuple(images["class_names"][label] for label in labels)
        assert (row.name, row.name2) == names == prediction.names
        expected = pytest.approx(shares.tolist(), abs=1e-4)
        assert [row.probability, row.probability2] == expected
        assert prediction.probabilities == expected


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--ckpt_path RUN", " holds no images: 1 .ckpt"),
        ("--ckpt_path NEW/x.ckpt", "x.ckpt has no class names: it is not of an ImageClassifier"),
        ("--ckpt_path best", "no best.ckpt under"),
        ("--trainer.devices 1", "--data.predict_dir needs a trained model: give its --ckpt_path"),
        ("--data.size 9 --ckpt_path RUN --data CIFAR10", "--data: the checkpoint sets how images"),
    ],
)
def test_new_images_are_refused(flags, problem, trained, app, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    words = flags.replace("RUN", str(trained)).replace("NEW", str(tmp_path)).split()
    assert problem in app.error("predict", *words, f"--data.predict_dir={tmp_path}")


@SLOW
def test_a_data_class_of_the_user_reads_new_images(fit, app, image_root):
    words = f"--data user_code.TheirImages --data.root {image_root} --trainer.max_epochs 1"
    run = fit(*words.split(), *QUIET)
    app("predict", f"--ckpt_path={run}", f"--data.predict_dir={image_root}")
    assert "path: user_code.TheirImages" in (run / "predict_1/config.yaml").read_text()


@SLOW
def test_a_mistyped_checkpoint_is_named_before_data_are_read(trained, app):
    mistyped = trained.with_name("version_O")
    for command in ("fit", "validate", "test", "predict", "export"):
        for path in ("checkpoints/bst.ckpt", ""):
            message = app.error(command, "--ckpt_path", mistyped / path)
            right = trained / path.replace("bst", "best")
            assert message == (
                f"error: --ckpt_path {mistyped / path}: there is no such file: "
                f"did you mean {right}?"
            )
    message = app.error("predict", "--ckpt_path", trained.parent)
    assert message.endswith(f"there is no such file: {trained.parent} has version_0")


DAMAGED = [
    ("config.yaml", b""),
    ("config.yaml", b"- 1"),
    ("config.yaml", b"\xff"),
    ("config.yaml", b"model: x"),
    ("config.yaml", b"model: {class_path: my_networks.Wide, init_args: 3}"),
    (
        "config.yaml",
        b"model: {class_path: app.modules.ImageClassifier, init_args: {network: nope}}",
    ),
    ("best.ckpt", b""),
    ("config.yaml and .*best.ckpt make no classifier", {"image_shape": [3]}),
    ("config.yaml and .*best.ckpt make no classifier", {"class_names": 7}),
    ("config.yaml and .*best.ckpt make no classifier", {"mean": None}),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED, ids=str)
def test_a_damaged_run_is_named(name, content, trained, tmp_path):
    shutil.copy(trained / "config.yaml", tmp_path)
    file = shutil.copy(trained / "checkpoints/best.ckpt", tmp_path)
    if isinstance(content, dict):
        checkpoint = torch.load(file, weights_only=True)
        torch.save(checkpoint | {"images": checkpoint["images"] | content}, file)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(
        UserError, match=f"{tmp_path}/{name}|--model.network nope: there is no such network"
    ):
        load(file)


@pytest.mark.parametrize(("kind", "limit"), [slow("onnx", 2**30), ("torch", 2**30), ("onnx", 0)])
def test_export(kind, limit, trained, model, app, tmp_path, monkeypatch):
    """The code that `export` prints predicts a photo of odd size as the model does.

    The weights of a large network lie in a second file, because ONNX limits the size of the first.
    """
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", limit)
    best = ["--ckpt_path=best", "--run.root", trained.parents[1], "--run.name=x"]
    out = app("export", *best, "--format", kind)
    assert "checked   on 64 images of 29×51: probabilities differ by at most" in out
    assert (trained / "model.onnx.data").exists() == (limit == 0)
    code = out[out.index("import json") :].strip()
    monkeypatch.chdir(tmp_path)
    for width, height in ((301, 217), (19, 24)):
        with Image.open(get_sample_data("grace_hopper.jpg")) as photo:
            photo.resize((width, height)).save("cat.jpg")
        namespace = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        expected = model.predict("cat.jpg", k=3)
        assert printed.getvalue().strip() == str([expected.names[0]])
        ordered = sorted(namespace["probabilities"][0].tolist(), reverse=True)
        assert ordered == pytest.approx(expected.probabilities, abs=0.01)


@pytest.mark.parametrize(("kind", "file"), [("onnx", "model.onnx"), ("torch", "model.pt2")])
def test_a_failed_export_keeps_the_earlier_file(kind, file, trained, app, monkeypatch):
    """On a full disk, or with other probabilities, only the earlier file is kept."""
    flags = ["export", "--ckpt_path", trained / "checkpoints/best.ckpt", "--format", kind]
    for name in (file, f"{file}.data"):
        (trained / name).unlink(missing_ok=True)
    place = trained / file
    place.write_bytes(b"earlier")
    before = sorted(trained.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    message = app.error(*flags)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{place} cannot be written (File too large): make room there" in message
    monkeypatch.setattr(
        "app.use.export.write", lambda classifier, images, file: 1 - classifier(images)
    )
    assert "its probabilities would differ from the model's by" in app.error(*flags)
    assert place.read_bytes() == b"earlier"
    assert sorted(trained.iterdir()) == before
    place.unlink()


def test_export_needs_a_run_and_its_packages(app, trained, monkeypatch):
    assert "give --run.name, or a file's path" in app.error("export", "--ckpt_path=best")
    assert "did you mean --format" in app.error("export", "--fromat=onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    message = app.error("export", "--ckpt_path", trained / "checkpoints/best.ckpt")
    assert (
        '--format onnx needs onnxruntime: pip install "data-parallel-lab[export]", '
        "or onnx onnxscript" in message
    )


@pytest.mark.usefixtures("forked_runs")
def test_fit_is_a_function(tmp_path, capfd):
    """`app.fit` takes flags by the last part of their names, such as `images` for `--data.images`.

    Other names are short, such as `lr`. It prints the command's lines, and returns the new run's
    record, even if an earlier run has the same name.
    """
    fit = package.fit
    flags = {
        "data": "Synthetic",
        "images": 60,
        "batch_size": 20,
        "root": str(tmp_path),
        "name": "x",
    }
    with pytest.raises(UserError, match=r"'model.lr': …"):
        _whole_name("lr", {"model": Linear, "data": Linear})
    with pytest.raises(UserError, match=r"^app.fit has no flag epoch: did you mean epochs\?$"):
        fit(**flags, epoch=1)
    (tmp_path / "x/version_0").mkdir(parents=True)
    (tmp_path / "x/version_0/run.json").write_text('{"status": "completed"}')
    more = {"model": "CIFARCNN", "model.optimizer": "SGD", "accelerator": "cpu", "threads": 1}
    record = fit(**flags, **more, lr=0.1, epochs=1, schedule="cosine")
    assert (record.status, record.run_dir) == ("completed", str(tmp_path / "x/version_1"))
    assert record.test is not None, "as by the command"
    assert record.validation is not None
    assert record.validation.samples == 6
    out = capfd.readouterr().out
    for line in ("runs on    one CPU", "epoch 1/1  train", "test            accuracy"):
        assert line in out
    assert "lr: 0.1" in (tmp_path / "x/version_1/config.yaml").read_text()
    assert load(record.run_dir).image_shape == (3, 32, 32)


def test_tensorboard(fit, tmp_path):
    """The flags in app/monitor/README.md write TensorBoard's files."""
    board = tmp_path / "board"
    logger = ["--trainer.logger+=TensorBoardLogger", f"--trainer.logger.save_dir={board}"]
    fit(*tiny(60, 20, max_epochs=1, test=False), *logger)
    assert list(board.rglob("events.out.tfevents.*"))
    assert list(tmp_path.rglob("metrics.csv")), "beside ours"
