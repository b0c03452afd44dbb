"""Missing or broken data and checkpoints.

The error must be one line that names the file, with exit code 2.
"""

import errno
import gc
import gzip
import json
import multiprocessing
import os
import re
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torchvision
from harness import (
    bit_flipped,
    difference,
    draw_images,
    error_of,
    last_of,
    options,
    record_of,
    tiny,
    weights,
)
from PIL import Image
from test_data import attach, folder, refusal

from app.data import FashionMNIST, ImageFolder
from app.data.geometry import Geometry
from app.data.image_files import FileSplit
from app.data.sources import Workers
from app.errors import UserError
from app.record import Record

REPLACE = "replace unreadable images, or --data.on_bad_image skip"
SMALL = tiny()


def test_no_data_and_no_network(app, tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", Mock(side_effect=URLError("no network in tests")))
    for data, model, file in (
        ("CIFAR10", "CIFARCNN", "cifar-10-python.tar.gz"),
        ("FashionMNIST", "FashionMLP", "train-images-idx3-ubyte.gz"),
    ):
        flags = [f"--model={model}", f"--data={data}", "--data.root", tmp_path / "none"]
        message = app.error("fit", *flags)
        for text in (str(tmp_path / "none"), file, "--data Synthetic", "could not be downloaded"):
            assert text in message
    missing = tmp_path / "xyz/images"
    message = app.error("fit", *folder(missing))
    assert message.startswith(f"error: --data.root {missing}: {tmp_path} has no folder xyz: give")
    assert "--data Synthetic" in message
    (tmp_path / "mine/train/cat").mkdir(parents=True)
    for name, hint in (("mime", "did you mean mine?"), ("mine", f"so give {tmp_path / 'mine'}")):
        assert hint in app.error("fit", *folder(tmp_path / name / "train"))


def test_broken_image_is_named(app, image_root):
    image = image_root / "train/dog/02.jpg"
    image.write_bytes(image.read_bytes()[:200])
    for flags in (options(num_workers=2), options(cache="off", placement="disk")):
        message = app.error("fit", *folder(image_root), *flags)
        assert message == f"error: {image} cannot be read (Truncated File Read): {REPLACE}"
    shutil.rmtree(image_root / "train/dog")
    assert "dog" in rejection(image_root)


def test_bad_checkpoints(app, fit):
    good = last_of(fit(*SMALL, "--trainer.max_epochs=1"))
    other = ["--model.network=resnet18", f"--ckpt_path={good}"]
    for command in ("fit", "test"):
        message = app.error(command, *SMALL, *other)
        assert 'state_dict for CIFARCNN: Missing key(s) in state_dict: "network.conv1' in message


def test_records_with_odd_values(app, fit):
    """Reading a record with a value of the wrong form raises an error with the value's name.

    `replay` then ends with one error line. A resumed run continues without the record.
    """
    flags = [*SMALL, "--run.test=false"]
    run = fit(*flags, *options(max_epochs=1, log_every_n_steps=1))
    path = run / "run.json"
    good = json.loads(path.read_text())
    odd = {
        "steps": ["four", 10**400, []], "train_s": [float("nan"), {}], "global_batch_size": [0],
        "launchers": [[3]], "epochs": [[None], [{}]], "ranks": [[{"rank": 0, "node": 0}]],
        "throughput": [{"max": 10**400}], "course": [{"samples_per_s": [["x", 1]]}],
    }  # fmt: skip
    for name, values in odd.items():
        for value in values:
            path.write_text(json.dumps(good | {name: value}))
            with pytest.raises(ValueError, match=rf"run\.json cannot be read \({name}.*: "):
                Record.load(path)
    path.write_text(json.dumps(good | {"throughput": {"median": 0}}))
    refused = "run.json cannot be read (throughput.median: Input should be greater than 0)"
    replayed = app.run("replay", f"--config={run}/config.yaml")
    assert f"{refused}: name the config.yaml of a run" in error_of(*replayed)
    out = app("fit", *flags, "--trainer.max_epochs=2", "--ckpt_path", last_of(run))
    assert f"{refused}: continuing without it" in out


def test_images_of_one_class(app, tmp_path):
    message = app.error("fit", *folder(draw_images(tmp_path, ("cat",), train=12)))
    assert message == "error: a classifier needs two classes or more, not 1: add a class to --data"


rejection = partial(refusal, ImageFolder)


def test_odd_entries_of_a_folder_are_named(image_root, tmp_path, monkeypatch):
    """An error names pipes, wrong links, an empty class and an unreadable folder."""
    odd = image_root / "train/cat/odd.jpg"
    os.mkfifo(odd)
    assert f"{odd} cannot be read ([Errno 22] not a file" in rejection(image_root)
    odd.unlink()
    for target, problem in (
        ("/etc/passwd", f"{odd} cannot be read (not an image)"),
        (tmp_path, f"link to {tmp_path}, which is missing"),
        (tmp_path / "gone", f"{odd} is a link to {tmp_path / 'gone'}, which is missing"),
        (odd, f"{odd} is a link to {odd}, which is missing"),
    ):
        odd.symlink_to(target)
        assert problem in rejection(image_root)
        odd.unlink()
    (image_root / "val").symlink_to("gone")
    assert f"{image_root / 'val'} is a link to gone, which is missing" in rejection(image_root)
    (image_root / "val").unlink()
    empty = image_root / "train/emu"
    empty.mkdir()
    assert f"{empty} holds no images" in rejection(image_root)
    empty.rmdir()
    scandir = os.scandir

    def denied(folder):
        if Path(folder).name == "dog":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(folder)

    # patched, because a superuser may read a folder without permissions
    monkeypatch.setattr(os, "scandir", denied)
    assert "/dog cannot be read (Permission denied)" in rejection(image_root)


def test_bad_images_are_skipped(app, image_root, tmp_path):
    """Skipped images are counted in the record, and reported once.

    Both placements skip the same images.

    Without the cache, or if no image can be read, the run is refused.
    """
    cats = image_root / "train/cat"
    (cats / "00.jpg").write_bytes(b"")
    (cats / "01.jpg").write_bytes((cats / "02.jpg").read_bytes()[:300])
    (image_root / "train/dog/zz.png").write_bytes(b"text")
    flags = {"on_bad_image": "skip", "cache": str(tmp_path / "cache")}
    first = f"{cats / '00.jpg'} cannot be read (not an image), {cats / '01.jpg'} cannot be read ("
    message = rejection(image_root)
    assert message.startswith(first)
    assert message.endswith(f"/train/dog/zz.png cannot be read (not an image): {REPLACE}")
    with pytest.raises(UserError, match=re.escape(message)):
        attach(ImageFolder(str(image_root), cache="off"))._splits["train"][0].tensor()
    assert "remove --data.cache off" in rejection(image_root, on_bad_image="skip", cache="off")
    runs = []
    for version, placement in enumerate(("memory", "disk")):
        flags["placement"] = placement
        out = app("fit", *folder(image_root, max_epochs=1, **flags))
        skipped = f"3 of 38 images are skipped: {first}"
        assert (skipped in out) == (version == 0), "reported when they are decoded"
        run = tmp_path / f"runs/LeNet-ImageFolder/version_{version}"
        assert record_of(run)["images_left_out"] == {"train": 3}
        runs.append(weights(run))
    assert difference(*runs) == 0
    for image in (image_root / "train").rglob("*.*"):
        image.write_bytes(b"")
    message = rejection(image_root, **flags)
    assert "none of 38 images can be read" in message
    assert "cat/08.jpg cannot be read (not an image) and 28 more" in message


def test_odd_images_are_read(app, fit, image_root):
    """Unusual images are read: CMYK, 16 bits, animated, of one pixel, or with a wrong suffix.

    Names of classes and files need not be UTF-8.
    """
    cats = image_root / "train/cat"
    Image.new("CMYK", (20, 20), (1, 2, 3, 4)).save(cats / "cmyk.jpg")
    Image.fromarray(np.full((9, 9), 40_000, np.uint16)).save(cats / "deep.png")
    frames = [Image.new("RGB", (9, 9), (value, 0, 0)) for value in (10, 20)]
    frames[0].save(cats / "moving.webp", save_all=True, append_images=frames[1:])
    Image.new("L", (1, 1)).save(cats / "pixel.png")
    (cats / "renamed.png").write_bytes((cats / "00.jpg").read_bytes())
    for split in ("train", "test"):
        (image_root / split / "dog").rename(image_root / split / "d\udcffg")
    (image_root / "test/cat/00.jpg").rename(image_root / "test/cat" / "\udcfe.jpg")
    flags = folder(image_root, max_epochs=1)
    run = fit(*flags)
    assert "d\ufffdg" in (run / "confusion_matrix.csv").read_text(encoding="utf-8")
    app("predict", *flags, "--ckpt_path=last")
    assert b"/\xfe.jpg" in (run / "predict_1/predictions.csv").read_bytes()


def test_changed_bit_of_fashion_mnist_is_noticed(fashion_root, monkeypatch):
    """Extracted files are compared with the archives that torchvision downloads."""
    dataset = torchvision.datasets.FashionMNIST
    file = fashion_root / "FashionMNIST/raw/train-labels-idx1-ubyte"
    archive = file.with_name(f"{file.name}.gz")
    archive.write_bytes(gzip.compress(file.read_bytes()))
    checksum = torchvision.datasets.utils.calculate_md5(archive)
    resources = [(name, checksum if name == archive.name else "") for name, _ in dataset.resources]
    monkeypatch.setattr(dataset, "resources", resources)
    attach(FashionMNIST(str(fashion_root)))
    bit_flipped(file)
    with pytest.raises(UserError, match="idx1-ubyte differs from the archive beside it: delete"):
        attach(FashionMNIST(str(fashion_root)))


def test_broken_files_of_fashion_mnist_are_refused(fashion_root):
    """Files are cut off, or hold zeros, or a label beyond the classes."""
    labels = fashion_root / "FashionMNIST/raw/train-labels-idx1-ubyte"
    whole = labels.read_bytes()
    for broken in (whole[:-1] + b"\xff", whole[:-1], whole[:7], bytes(len(whole))):
        labels.write_bytes(broken)
        message = refusal(FashionMNIST, fashion_root)
        assert f"{labels.parent} cannot be read (truncated or corrupted files)" in message


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_unreadable_image_leaves_no_worker_behind(in_memory, tmp_path):
    """After an image's error, the worker processes end at once, without a garbage collection."""
    (tmp_path / "bad.png").write_bytes(b"x")
    split = FileSplit([str(tmp_path / "bad.png")], [0], (3, 8, 8), Geometry((8, 8)))
    gc.collect()
    gc.disable()
    try:
        with suppress(UserError):
            if in_memory:
                split.tensor(num_workers=1)
            else:
                list(Workers(split.__getitem__, [[0]], list, 1))
        assert not multiprocessing.active_children()
    finally:
        gc.enable()
