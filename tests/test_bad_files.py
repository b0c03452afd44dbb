"""Data and checkpoints that are missing or broken: one line that names the file, exit code 2."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import QUIET, ROOT, error_of, start_app

App = Callable[..., tuple[int, str]]
SMALL = ["--data", "Synthetic", "--data.size", "64", "--data.batch_size", "16", *QUIET]


def test_no_data_and_no_network(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    def refuse(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    for data, file in (("CIFAR10", "cifar-10-python.tar.gz"), ("FashionMNIST", "train-images-idx3-ubyte.gz")):
        model = "FashionMLP" if data == "FashionMNIST" else "CIFARCNN"
        said = error_of(*app("fit", "--model", model, "--data", data, "--data.root", tmp_path / "none"))
        for part in (str(tmp_path / "none"), file, "--data Synthetic", "could not be downloaded"):
            assert part in said
    said = error_of(*app("fit", "--data", "ImageFolder", "--data.root", tmp_path / "none"))
    assert said.startswith(f"error: {tmp_path / 'none' / 'train'} has no class folders")
    assert "--data Synthetic" in said
    (tmp_path / "mine" / "train" / "cat").mkdir(parents=True)
    said = error_of(*app("fit", "--data", "ImageFolder", "--data.root", tmp_path / "mine" / "train"))
    assert f"so give {tmp_path / 'mine'}" in said


def test_corrupted_data(app: App, cifar_root: Path, fashion_root: Path, image_root: Path) -> None:
    batch = cifar_root / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-100])
    assert str(batch) in error_of(*app("fit", "--data", "CIFAR10", "--data.root", cifar_root, *QUIET))

    idx = fashion_root / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte"
    whole = idx.read_bytes()
    for broken in (whole[:-1], whole[:7], b"\x00" * len(whole)):
        idx.write_bytes(broken)
        flags = ["--config", ROOT / "configs" / "fashion_mlp.yaml", "--data.root", fashion_root, *QUIET]
        assert str(idx) in error_of(*app("fit", *flags))

    image = image_root / "train" / "dog" / "02.jpg"
    for broken in (image.read_bytes()[:200], b"not an image"):
        image.write_bytes(broken)
        reason = "not an image" if broken == b"not an image" else "Truncated File Read"
        for where in (["cache", "auto"], ["placement", "memory"], ["placement", "disk"]):
            flags = ["--data", "ImageFolder", "--data.root", image_root, "--data.cache", "off", *QUIET]
            flags += ["--data.num_workers", "2", f"--data.{where[0]}", where[1]]
            said = error_of(*app("fit", *flags))
            assert said == f"error: {image} cannot be read ({reason}): replace or remove this file"
    shutil.rmtree(image_root / "train" / "dog")
    assert "dog" in error_of(*app("fit", "--data", "ImageFolder", "--data.root", image_root, *QUIET))


def test_bad_checkpoints(app: App, tmp_path: Path) -> None:
    code, out = app("fit", *SMALL, "--trainer.max_epochs", "1", "--run.name", "x")
    assert code == 0, out
    good = tmp_path / "runs" / "x" / "version_0" / "checkpoints" / "last.ckpt"
    other = ["--model.network", "resnet18", "--ckpt_path", good]
    for command in ("fit", "validate", "test", "predict"):
        said = error_of(*app(command, *SMALL, *other))
        assert "of another model than CIFARCNN: network.conv1.weight" in said
    bad = tmp_path / "bad.ckpt"
    for content in (good.read_bytes()[:2000], b"", b"text"):
        bad.write_bytes(content)
        said = error_of(*app("test", *SMALL, "--ckpt_path", bad))
        assert re.match(rf"error: --ckpt_path {bad}: (damaged or truncated|not a checkpoint, or damaged)", said)
    torch.save({"foo": torch.zeros(2)}, bad)
    assert "not a checkpoint" in error_of(*app("test", *SMALL, "--ckpt_path", bad))


@pytest.mark.slow
def test_spawned_and_forked_errors_are_one_line_too(image_root: Path, tmp_path: Path) -> None:
    image = image_root / "train" / "dog" / "02.jpg"
    image.write_bytes(b"not an image")
    flags = [
        "--data",
        "ImageFolder",
        "--data.root",
        image_root,
        "--data.batch_size",
        "8",
        "--trainer.devices",
        "2",
    ]
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", "ddp_spawn", "--run.root", tmp_path, *QUIET]
    code, out = start_app("fit", *flags, *way)
    assert str(image) in error_of(code, out)
