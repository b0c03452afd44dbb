"""The cache: images are decoded once, into a file that every rank maps."""

import errno
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from forked import fork_app, fork_fit
from harness import QUIET, SLOW, losses, on_cpu, options, record_of
from PIL import Image
from test_data import attach, folder

from app.data import CIFAR10, ImageFolder
from app.data.cache import ImageCache
from app.data.datasets import EncodedImages
from app.data.image_files import FileSplit, FolderSource
from app.errors import UserError
from app.system.files import PART

STEPS = [*options(max_epochs=1, max_steps=2), *QUIET]
UNTESTED = options(test=False)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def decoded(tmp_path, monkeypatch):
    """Return a function that counts the files decoded since its last call, in any process."""
    note = tmp_path / "decoded"
    decode = FileSplit._pixels

    def noting(self, index):
        with note.open("ab") as file:
            file.write(b".")
        return decode(self, index)

    def count():
        size = note.stat().st_size if note.exists() else 0
        note.unlink(missing_ok=True)
        return size

    monkeypatch.setattr(FileSplit, "_pixels", noting)
    return count


def images_of(root, cache, name="train", **kwargs):
    """Return the images of a split as the application reads them at the start of a command."""
    stage = {"train": "fit", "test": "test"}[name]
    data = attach(ImageFolder(str(root), cache=str(cache), num_workers=0, **kwargs), stage)
    return data._splits[name][0].tensor()


@SLOW
def test_the_second_start_decodes_nothing(image_root, cache, app, decoded):
    flags = [*folder(image_root, cache=cache), *STEPS]
    gc.collect()  # ends the workers of other tests
    out = app("fit", *flags)
    assert decoded() == 36 + 12, "train and test"
    assert f"Decoding 36 images, once, into {cache}" in out
    for more in ([], options(placement="disk", augment="RandomHorizontalFlip")):
        out = app("fit", *flags, "--data.num_workers=1", *more)
        assert decoded() == 0
        assert "Decoding" not in out
        assert multiprocessing.active_children() == []
    new = ["--ckpt_path=last", "--data.predict_dir", image_root / "train/eel"]
    app("predict", *flags, *new)
    assert decoded() == 12


def test_a_command_decodes_what_it_reads(image_root, cache, decoded):
    images_of(image_root, cache, "test")
    assert decoded() == 12
    images_of(image_root, cache, "test", batch_size=0.5)
    assert decoded() == 36, "the batch is a fraction of the training images"


@SLOW
def test_all_placements_and_no_cache_train_alike(image_root, cache, fit):
    flags = folder(image_root, batch_size=8, max_epochs=2, num_workers=1, test=False)
    flags += options(log_every_n_steps=1)
    curves = []
    places = [(cache, "memory"), (cache, "disk"), (cache, "device"), ("off", "memory")]
    for place, placement in [*places, ("off", "disk")]:
        curves.append(losses(fit(*flags, *options(placement=placement, cache=place))).tolist())
    assert len(curves[0]) == 10
    assert curves == curves[:1] * 5


def test_cache_off_writes_no_file(image_root, tmp_path, fit, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    config = tmp_path / "off.yaml"
    config.write_text("data:\n  class_path: ImageFolder\n  init_args:\n    cache: off\n")
    folder_of_caches = tmp_path / "home/data-parallel-lab"
    flags = ["--model=CIFARCNN", f"--data.root={image_root}", *STEPS, *UNTESTED]
    fit(f"--config={config}", *flags)
    assert not folder_of_caches.exists()
    attach(ImageFolder(str(image_root)))
    assert len(list(folder_of_caches.iterdir())) == 2


def test_changed_images_are_decoded_again(image_root, cache, decoded):
    first = images_of(image_root, cache)
    image = image_root / "train/cat/00.jpg"
    decoded()
    shutil.copy(image_root / "train/dog/00.jpg", image)
    second = images_of(image_root, cache)
    assert decoded() == 36
    assert not torch.equal(second, first)
    os.utime(image, (1, 1))
    images_of(image_root, cache)
    assert decoded() == 36
    image.unlink()
    assert len(images_of(image_root, cache)) == 35
    (image_root / "train/ant").mkdir()  # raises all other labels by one
    shutil.copy(image_root / "train/dog/00.jpg", image_root / "train/ant")
    images_of(image_root, cache)
    assert decoded() == 35 + 12 + 36
    assert len(list(cache.iterdir())) == 2, "train and test: what is stale is replaced"
    images_of(image_root, cache, size=20)
    assert decoded() == 36 + 12
    assert len(list(cache.iterdir())) == 4


def test_links_that_lead_elsewhere(image_root, cache, decoded):
    """The cache notices a folder's new link target, even if its files have the same dates."""
    other = image_root / "other"
    for image in sorted((image_root / "train").rglob("*.*")):
        copy = other / image.relative_to(image_root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(image.read_bytes()[::-1])
        os.utime(copy, ns=(0, image.stat().st_mtime_ns))
    link = image_root / "link"
    link.symlink_to(image_root)
    for expected in (36 + 12, 0):
        images_of(link, cache)
        assert decoded() == expected
    link.unlink()
    link.symlink_to(other)
    with pytest.raises(UserError, match="cannot be read"):
        images_of(link, cache)


@pytest.mark.parametrize("crop", ["none", "random_resized"])
def test_damage_is_noticed(crop, image_root, cache, decoded, capfd):
    """A changed bit in any part of the file is noticed, also if the file keeps its date."""

    def content():
        data = attach(ImageFolder(str(image_root), cache=str(cache), num_workers=0, crop=crop))
        split = data._splits["train"][0]
        images = [image.tolist() for image in split]
        return list(zip(split.names, split.labels.tolist(), images, strict=True))

    expected = content()
    path = next(cache.glob("train-*"))
    whole = path.read_bytes()
    table = whole.rindex(b'{"key"')
    damaged = [whole[:-1], whole[:table], whole[:5], b"", b"\xff" * len(whole)]
    for place in (0, 20, table - 1, table, table + 10, table + 300, -13, -12, -5, -1):
        changed = bytearray(whole)
        changed[place] ^= 1
        damaged.append(changed)
    for wrong in damaged:
        before = path.stat()
        path.write_bytes(wrong)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        decoded()
        capfd.readouterr()
        assert content() == expected
        assert decoded() == 36
        assert capfd.readouterr().err.count(f"{path} cannot be used (") == 1
        assert path.read_bytes()[:table] == whole[:table]
    path.unlink()
    path.mkdir()
    assert content() == expected


def test_a_start_checks_a_large_file_in_part(image_root, cache, decoded, monkeypatch):
    """If a file has been modified since it was written, all of its blocks are checked."""
    monkeypatch.setattr("app.data.cache.BLOCK", 3072)
    monkeypatch.setattr("app.data.cache.SAMPLE", 2)
    images_of(image_root, cache)
    sizes = []

    def noting(content):
        sizes.append(len(content))
        return zlib.crc32(content)

    monkeypatch.setattr("app.data.cache.crc32", noting)
    images_of(image_root, cache)
    assert sizes.count(3072) == 2 + 2, "blocks of train and test"
    path = next(cache.glob("train-*"))
    path.touch()
    sizes.clear()
    decoded()
    images_of(image_root, cache)
    assert sizes.count(3072) == 36 + 2
    with path.open("r+b") as file:
        file.seek(35 * 3072)
        file.write(b"x")
    images_of(image_root, cache)
    assert decoded() == 36


def test_unfinished_files_are_removed(image_root, cache):
    cache.mkdir()
    left = cache / f".train-x.0{PART}"
    left.touch()
    images_of(image_root, cache)
    assert not left.exists()


@pytest.mark.parametrize("obstacle", ["no folder", "full", "full later on"])
def test_no_room_for_a_cache(obstacle, image_root, cache, app, monkeypatch):
    reason = "No space left on device"
    if obstacle == "no folder":
        cache.touch()
        reason = "File exists"
    elif obstacle == "full":
        usage = shutil.disk_usage(image_root)._replace(free=2**10)
        monkeypatch.setattr("app.data.cache.shutil.disk_usage", lambda place: usage)
        reason = "over half of the free space"
    else:
        monkeypatch.setattr(
            "app.data.cache.remove_parts", Mock(side_effect=OSError(errno.ENOSPC, reason))
        )
    out = app("fit", *folder(image_root, cache=cache), *STEPS)
    (message,) = [line for line in out.splitlines() if "Decoded images cannot be kept" in line]
    assert all(text in message for text in (str(cache), reason, "--data.cache"))
    assert cache.is_file() or not list(cache.iterdir())


def test_processes_that_write_at_once(image_root, cache):
    together = threading.Barrier(4)

    class Meets(FolderSource):
        def load(self, split):
            together.wait(20)
            return super().load(split)

    def write(_):
        source = EncodedImages(Meets(str(image_root))).source
        ImageCache(str(cache)).write(source, "train", 0)
        cached = ImageCache(str(cache)).open(source, "train")
        assert cached is not None
        return cached.tensor()

    with ThreadPoolExecutor(4) as writers:
        first, *others = writers.map(write, range(4))
    for images in others:
        assert torch.equal(images, first)
    assert len(list(cache.iterdir())) == 1


# -- CIFAR's pickles
# ----------------------------------------------------------------------------------------------


def test_pickles_are_checked_once_and_opened_once(cifar_root, cache, app, fit, monkeypatch):
    load = Mock(side_effect=pickle.load)
    monkeypatch.setattr(pickle, "load", load)
    flags = ["--data=CIFAR10", *options(cache=cache), f"--data.root={cifar_root}", *STEPS]
    fit(*flags)
    opened = load.call_count
    fit(*flags)
    cached = attach(CIFAR10(str(cifar_root), cache=str(cache)))._splits["train"][0]
    assert load.call_count == opened > 0
    plain = attach(CIFAR10(str(cifar_root), cache="off"))._splits["train"][0]
    assert not plain.mapped
    assert cached.mapped
    assert torch.equal(plain.tensor(), cached.tensor())
    assert torch.equal(plain.labels, cached.labels)
    opened = load.call_count
    batch = cifar_root / "cifar-10-batches-py/data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-1] + b"!")
    message = app.error("fit", *flags)
    assert f"{batch.parent} cannot be read (truncated or corrupted files): move it away" in message
    assert load.call_count == opened, "with one wrong checksum, nothing is unpickled"


# -- several ranks
# ------------------------------------------------------------------------------------------------


@SLOW
@pytest.mark.usefixtures("fashion_root", "image_root")
@pytest.mark.parametrize(
    ("data", "root", "strategy", "count"),
    [
        ("FashionMNIST --model=FashionMLP", "data", "ddp_fork", 60),
        ("ImageFolder --model=CIFARCNN", "images", "ddp_spawn", 36),
    ],
)
def test_ranks_share_one_file(data, root, strategy, count, cache, tmp_path):
    flags = ["--data", *data.split(), "--data.root", tmp_path / root, *STEPS, *UNTESTED]
    flags += options(batch_size=8, cache=cache, root=tmp_path)
    flags += ["--trainer.callbacks+=user_code.SaysWhereImagesLie"]
    flags += [f"--trainer.callbacks.directory={tmp_path}"]
    out = fork_app("fit", *flags, *on_cpu(strategy))
    assert out.count(f"Decoding {count} images") == 1
    note = (tmp_path / "rank0").read_text()
    assert note == (tmp_path / "rank1").read_text()
    assert json.loads(note)["path"].startswith(str(cache))
    fork_app("fit", *flags)
    assert note == (tmp_path / "rank0").read_text()


@SLOW
def test_ranks_agree_on_a_placement(tmp_path):
    flags = ["--data=user_code.FillsUpOnRank1", *STEPS, *UNTESTED]
    flags += options(images=200, batch_size=8, num_workers=0)
    assert record_of(fork_fit(tmp_path, *flags, *on_cpu("ddp_fork")))["placement"] == "disk"


def test_images_without_labels_are_another_file(image_root, cache):
    """The test split's images have a second cache file as `predict_dir`, without labels."""
    kept = ImageCache(str(cache))
    unlabelled = ImageFolder(str(image_root), predict_dir=str(image_root / "test")).source
    kept.write(unlabelled, "predict", 0)
    labelled = ImageFolder(str(image_root)).source
    assert kept.open(labelled, "test") is None
    kept.write(labelled, "test", 0)
    for source, split, expected in ((unlabelled, "predict", {-1}), (labelled, "test", {0, 1, 2})):
        made = kept.open(source, split)
        assert made is not None
        assert set(made.labels.tolist()) == expected


def test_training_images_in_other_splits_are_named(image_root, app):
    """One line names a pair of files, even if training images are cropped.

    A copy in another format has the same pixels.
    """
    shutil.copytree(image_root / "test", image_root / "val")
    shutil.copy(image_root / "train/cat/05.png", image_root / "val/dog/z.jpg")
    with Image.open(image_root / "train/cat/05.png") as picture:
        picture.save(image_root / "test/eel/01.bmp")
    out = app("fit", *folder(image_root, crop="random"), *STEPS, *UNTESTED)
    pair = f"{image_root}/val/dog/z.jpg = {image_root}/train/cat/05.png"
    assert f"warning: validation or test has training images (2, such as {pair}), which" in out
