"""The cache: images are decoded once, into a file that every rank maps."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from harness import QUIET, App, error_of, fork_app, losses, on_cpu, options, output_of, record_of
from test_data import attach

from app.data import CIFAR10, ImageFolder
from app.data.cache import HEADER, ImageCache
from app.data.datasets import EncodedImages
from app.data.image_files import FileSplit, FolderSource
from app.errors import UserError
from app.system.files import PART, whole

SLOW = pytest.mark.slow
STEPS = [*options(max_epochs=1, max_steps=2), *QUIET]
UNTESTED = ["--run.test", "false"]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the files decoded since its last call, in any process."""
    note, decode = tmp_path / "decoded", FileSplit.__getitem__

    def noting(self: FileSplit, index: int) -> torch.Tensor:
        with note.open("ab") as file:
            file.write(b".")
        return decode(self, index)

    def count() -> int:
        size = note.stat().st_size if note.exists() else 0
        note.unlink(missing_ok=True)
        return size

    monkeypatch.setattr(FileSplit, "__getitem__", noting)
    return count


def images_of(root: Path, cache: Path | str, name: str = "train", **kwargs: Any) -> torch.Tensor:
    """Return the images of a split as the application reads them at the start of a command."""
    data = attach(
        ImageFolder(str(root), cache=str(cache), num_workers=0, **kwargs),
        "test" if name == "test" else "fit",
    )
    return data._splits[name][0].tensor()


def test_the_second_start_decodes_nothing(
    image_root: Path, cache: Path, app: App, decoded: Callable[[], int]
) -> None:
    flags = ["--data", "ImageFolder", "--data.root", image_root, "--data.cache", cache, *STEPS]
    out = output_of(*app("fit", *flags))
    assert decoded() == 36 + 12, "train and test"
    assert f"Decoding 36 images, once, into {cache}" in out
    assert multiprocessing.active_children() == []
    for more in (
        [],
        [
            "--data.placement",
            "disk",
            "--data.augment",
            "torchvision.transforms.v2.RandomHorizontalFlip",
        ],
    ):
        out = output_of(*app("fit", *flags, "--data.num_workers", "1", *more))
        assert decoded() == 0
        assert "Decoding" not in out
    code, out = app(
        "predict", *flags, "--ckpt_path", "last", "--data.predict_dir", image_root / "train" / "eel"
    )
    assert (code, decoded()) == (0, 12), out


def test_a_command_decodes_what_it_reads(
    image_root: Path, cache: Path, decoded: Callable[[], int]
) -> None:
    images_of(image_root, cache, "test")
    assert decoded() == 12
    images_of(image_root, cache, "test", batch_size=0.5)
    assert decoded() == 36, "the batch is a fraction of the training images"


def test_all_placements_and_no_cache_train_alike(
    image_root: Path, cache: Path, app: App, tmp_path: Path
) -> None:
    flags = ["--data", "ImageFolder", "--data.root", image_root, *QUIET]
    flags += options(batch_size=8, max_epochs=2, num_workers=1, log_every_n_steps=1, test=False)
    curves = []
    for place, placement in (
        (cache, "memory"),
        (cache, "disk"),
        (cache, "device"),
        ("off", "memory"),
        ("off", "disk"),
    ):
        name = f"{placement}-{place == cache}"
        output_of(
            *app("fit", *flags, *options(placement=placement, name=name), "--data.cache", place)
        )
        curves.append(losses(tmp_path / "runs" / name / "version_0").tolist())
    assert len(curves[0]) == 10
    assert all(others == curves[0] for others in curves)


def test_off(image_root: Path, tmp_path: Path, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    config = tmp_path / "off.yaml"
    config.write_text("data:\n  class_path: ImageFolder\n  init_args:\n    cache: off\n")
    for off in (["--config", config], ["--data", "ImageFolder", "--data.cache", "off"]):
        output_of(*app("fit", *off, "--data.root", image_root, *STEPS, *UNTESTED))
        assert not (tmp_path / "home" / "data-parallel-lab").exists()
    attach(ImageFolder(str(image_root)))
    assert len(list((tmp_path / "home" / "data-parallel-lab").iterdir())) == 2


def test_what_is_stale_is_decoded_again(
    image_root: Path, cache: Path, decoded: Callable[[], int]
) -> None:
    first = images_of(image_root, cache)
    image = image_root / "train" / "cat" / "00.jpg"
    decoded()
    assert torch.equal(images_of(image_root, cache), first)
    assert decoded() == 0

    shutil.copy(image_root / "train" / "dog" / "00.jpg", image)
    second = images_of(image_root, cache)
    assert decoded() == 36
    assert not torch.equal(second, first)
    os.utime(image, (1, 1))
    images_of(image_root, cache)
    assert decoded() == 36
    image.unlink()
    assert len(images_of(image_root, cache)) == 35
    (image_root / "train" / "ant").mkdir()  # raises all other labels by one
    shutil.copy(image_root / "train" / "dog" / "00.jpg", image_root / "train" / "ant")
    images_of(image_root, cache)
    assert decoded() == 35 + 12 + 36
    assert len(list(cache.iterdir())) == 2, "train and test: what is stale is replaced"
    images_of(image_root, cache, size=20)
    images_of(image_root, cache, size=20, channels=1)
    assert decoded() == 2 * (36 + 12)
    assert len(list(cache.iterdir())) == 6
    images_of(image_root, cache, size=20)
    assert decoded() == 0


def test_links_that_lead_elsewhere(
    image_root: Path, cache: Path, decoded: Callable[[], int]
) -> None:
    """The cache notices a new link target, even if its files have the same names, sizes and modification times."""
    other = image_root / "other"
    for image in sorted((image_root / "train").rglob("*.*")):
        copy = other / image.relative_to(image_root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(image.read_bytes()[::-1])
        os.utime(copy, ns=(0, image.stat().st_mtime_ns))
    link, file = image_root / "link", image_root / "train" / "dog" / "00.jpg"
    file.rename(image_root / "kept.jpg")
    file.symlink_to(image_root / "kept.jpg")
    for root, place, first, then in (
        (link, link, image_root, other),
        (image_root, file, "../../kept.jpg", copy),
    ):
        place.unlink(missing_ok=True)
        place.symlink_to(first)
        for again in (36 + 12, 0):
            images_of(root, cache)
            assert decoded() == again
        place.unlink()
        place.symlink_to(then)
        with pytest.raises(UserError, match="cannot be read"):
            images_of(root, cache)
        decoded()


def test_what_is_broken_or_foreign_is_made_anew(
    image_root: Path, cache: Path, decoded: Callable[[], int]
) -> None:
    expected = images_of(image_root, cache).clone()
    path = next(cache.glob("train-*"))
    whole = path.read_bytes()
    foreign = b'{"key": "another", "shape": [36, 3, 32, 32], "count": 36, "names": 0, "left_out": 0}'.ljust(
        len(whole)
    )
    for broken in (
        whole[:-1],
        whole[:5000],
        whole[:100],
        b"",
        b"\xff" * len(whole),
        foreign,
        b"[]",
        b'{"shape": 1}',
    ):
        path.write_bytes(broken)
        decoded()
        assert torch.equal(images_of(image_root, cache), expected)
        assert decoded() == 36
        assert path.read_bytes()[HEADER:] == whole[HEADER:], "the header has the time of writing"
    path.unlink()
    path.mkdir()
    assert torch.equal(images_of(image_root, cache), expected)


@pytest.mark.parametrize("crop", ["none", "random_resized"])
def test_a_changed_bit_is_noticed(
    crop: str,
    image_root: Path,
    cache: Path,
    decoded: Callable[[], int],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A changed bit in any part of the file is noticed, also if the file keeps its date."""

    def content() -> list[Any]:
        split = attach(
            ImageFolder(str(image_root), cache=str(cache), num_workers=0, crop=crop)
        )._splits["train"][0]
        images = zip(
            split.names, split.labels.tolist(), map(torch.Tensor.tolist, split), strict=True
        )
        return sorted(images, key=lambda image: image[0])

    expected = content()
    path = next(cache.glob("train-*"))
    size = path.stat().st_size
    names = path.read_bytes().rindex(b"[[")
    for place in (
        0,
        20,
        HEADER - 1,
        HEADER,
        names - 300,
        names - 100,
        names - 5,
        names - 1,
        names + 10,
        size - 3,
    ):
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        decoded()
        capfd.readouterr()
        assert content() == expected
        assert decoded() == 36
        assert capfd.readouterr().err.count(f"{path} is damaged, or of another version\n") == 1


def test_a_start_checks_a_large_file_in_part(
    image_root: Path, cache: Path, decoded: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large file, random blocks are checked; if it has been modified since it was written, all blocks."""
    monkeypatch.setattr("app.data.cache.BLOCK", 3072)
    monkeypatch.setattr("app.data.cache.SAMPLE", 2)
    images_of(image_root, cache)
    sizes: list[int] = []
    monkeypatch.setattr(
        "app.data.cache.crc32", lambda content: sizes.append(len(content)) or zlib.crc32(content)
    )
    images_of(image_root, cache)
    assert sizes.count(3072) == 2 + 2, "blocks of train and test"
    path = next(cache.glob("train-*"))
    path.touch()
    sizes.clear()
    decoded()
    images_of(image_root, cache)
    assert sizes.count(3072) == 36 + 2
    with path.open("r+b") as file:
        file.seek(HEADER + 35 * 3072)
        file.write(b"x")
    images_of(image_root, cache)
    assert decoded() == 36


def test_a_half_file_goes(image_root: Path, cache: Path) -> None:
    """Unfinished files of a killed process are removed; those of a writing process are kept."""
    images_of(image_root, cache)
    next(cache.glob("train-*")).write_bytes(b"")
    left = cache / f".train-x.0{PART}"
    left.touch()
    with whole(cache / "another"):
        images_of(image_root, cache)
        assert not left.exists()
        assert len(list(cache.glob(f".*{PART}"))) == 1


@pytest.mark.parametrize("obstacle", ["no folder", "full", "full later on"])
def test_no_room_for_a_cache(
    obstacle: str, image_root: Path, cache: Path, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    flags = ["--data", "ImageFolder", "--data.root", image_root, "--data.cache", cache, *STEPS]
    out = output_of(*app("fit", *flags))
    (message,) = [line for line in out.splitlines() if "Decoded images cannot be kept" in line]
    assert all(text in message for text in (str(cache), reason, "--data.cache"))
    assert cache.is_file() or not list(cache.iterdir())


def test_processes_that_write_at_once(image_root: Path, cache: Path) -> None:
    together = threading.Barrier(4)

    class Meets(FolderSource):
        def load(self, split: Any) -> Any:
            together.wait(20)
            return super().load(split)

    def write(_: int) -> torch.Tensor:
        source = EncodedImages(Meets(str(image_root))).source
        ImageCache(str(cache)).write(source, "train", 0)
        cached = ImageCache(str(cache)).open(source, "train")
        assert cached is not None
        assert cached.mapped
        return cached.tensor()

    with ThreadPoolExecutor(4) as writers:
        first, *others = writers.map(write, range(4))
    assert all(torch.equal(other, first) for other in others)
    assert len(list(cache.iterdir())) == 1


# -- CIFAR's pickles
# ----------------------------------------------------------------------------------------------


def test_pickles_are_checked_once_and_opened_once(
    cifar_root: Path, cache: Path, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    load = pickle.load
    monkeypatch.setattr(
        pickle, "load", lambda *args, **kwargs: calls.append(1) or load(*args, **kwargs)
    )
    flags = ["--data", "CIFAR10", "--data.root", cifar_root, "--data.cache", cache, *STEPS]
    output_of(*app("fit", *flags))
    opened = len(calls)
    output_of(*app("fit", *flags))
    assert opened == len(calls) > 0
    batch = cifar_root / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-1] + b"!")
    assert f"{batch.parent} cannot be read (truncated or corrupted files)" in error_of(
        *app("fit", *flags)
    )
    assert opened == len(calls), "with one wrong checksum, nothing is unpickled"


def test_the_cache_holds_what_the_pickles_hold(cifar_root: Path, cache: Path) -> None:
    splits = [
        attach(CIFAR10(str(cifar_root), cache=place))._splits["train"][0]
        for place in ("off", str(cache))
    ]
    assert [split.mapped for split in splits] == [False, True]
    assert torch.equal(splits[0].tensor(), splits[1].tensor())
    assert torch.equal(splits[0].labels, splits[1].labels)


# -- several ranks
# ------------------------------------------------------------------------------------------------


def notes(directory: Path, ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((directory / f"rank{rank}").read_text()) for rank in range(ranks)]


@SLOW
@pytest.mark.parametrize(
    ("name", "strategy"), [("FashionMNIST", "ddp_fork"), ("ImageFolder", "ddp_spawn")]
)
def test_however_ranks_start(
    name: str, strategy: str, fashion_root: Path, image_root: Path, cache: Path, tmp_path: Path
) -> None:
    flags = {
        "FashionMNIST": ["--data.root", fashion_root, "--model", "FashionMLP"],
        "ImageFolder": ["--data.root", image_root],
    }
    data = [
        "--data",
        name,
        *flags[name],
        "--data.batch_size",
        "8",
        "--data.cache",
        cache,
        *STEPS,
        *UNTESTED,
    ]
    data += [
        "--trainer.callbacks+=user_code.SaysWhereImagesLie",
        "--trainer.callbacks.directory",
        tmp_path,
    ]
    out = output_of(*fork_app("fit", *data, *on_cpu(strategy), "--run.root", tmp_path))
    assert out.count("Decoding 36 images") == (name == "ImageFolder")
    assert out.count("Decoding 60 images") == (name == "FashionMNIST")
    first, second = notes(tmp_path)
    assert first["path"] == second["path"]
    assert first["path"].startswith(str(cache))
    output_of(*fork_app("fit", *data, "--run.root", tmp_path))
    assert notes(tmp_path, 1)[0]["sums"] == first["sums"] == second["sums"]


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_broken_image_is_reported_once(strategy: str, image_root: Path, tmp_path: Path) -> None:
    image = image_root / "train" / "dog" / "02.jpg"
    image.write_bytes(b"not an image")
    flags = [
        "--data",
        "ImageFolder",
        "--data.root",
        image_root,
        "--data.batch_size",
        "8",
        "--run.root",
        tmp_path,
    ]
    message = error_of(*fork_app("fit", *flags, *on_cpu(strategy), *QUIET))
    assert message.startswith(f"error: {image} cannot be read (not an image): replace")


@SLOW
def test_ranks_agree_on_a_placement(tmp_path: Path) -> None:
    flags = [
        "--data",
        "user_code.FillsUpOnRank1",
        *options(images=200, batch_size=8, root=tmp_path),
        *UNTESTED,
    ]
    output_of(*fork_app("fit", *flags, *on_cpu("ddp_fork"), *STEPS, "--data.num_workers", "0"))
    assert record_of(next(tmp_path.glob("*/version_0")))["placement"] == "disk"


@SLOW
def test_a_batch_that_is_a_fraction_of_what_is_not_otherwise_read(tmp_path: Path) -> None:
    """`test` works with a batch size that is a fraction of the training images, although it must count them first."""
    flags = [
        "--data",
        "Synthetic",
        "--data.images",
        "100",
        "--data.batch_size",
        "0.25",
        *QUIET,
        "--run.root",
        tmp_path,
    ]
    output_of(*fork_app("fit", *flags, "--data.batch_size", "24", *STEPS, *UNTESTED))
    output_of(
        *fork_app(
            "test", *flags, *on_cpu("ddp_fork"), "--data.val_size", "20", "--ckpt_path", "last"
        )
    )


def test_images_without_labels_are_another_file(image_root: Path, cache: Path) -> None:
    """The test split's images have a second cache file if they are given as `predict_dir`, which has no labels."""
    kept = ImageCache(str(cache))
    unlabelled = ImageFolder(str(image_root), predict_dir=str(image_root / "test")).source
    kept.write(unlabelled, "predict", 0)
    labelled = ImageFolder(str(image_root)).source
    assert kept.open(labelled, "test") is None
    kept.write(labelled, "test", 0)
    splits = [
        kept.open(source, split) for source, split in ((unlabelled, "predict"), (labelled, "test"))
    ]
    assert [set(split.labels.tolist()) for split in splits if split] == [{-1}, {0, 1, 2}]
