"""Image sources in their real formats, transforms of pixels, and loaders."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import QUIET, SLOW, options, record_of
from lightning.fabric.plugins.environments import LightningEnvironment
from PIL import Image

from app.data import FashionMNIST, ImageFolder, Synthetic
from app.data.batches import GlobalBatches
from app.data.placement import workers_of
from app.data.synthetic import SyntheticSource
from app.data.transforms import DRAW_RANGE, Transform
from app.errors import UserError
from app.launch.cluster_environment import Slurm

TWO_STEPS = [*options(max_steps=2, max_epochs=1), *QUIET]


def attach(data, stage="fit", overfit=0.0):
    """Set up a data module as a Trainer with one CPU process does."""
    progress = SimpleNamespace(current=SimpleNamespace(ready=0))
    data.trainer = SimpleNamespace(
        world_size=1,
        num_nodes=1,
        global_rank=0,
        strategy=SimpleNamespace(
            root_device=torch.device("cpu"), reduce_boolean_decision=lambda mine, all: mine
        ),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        lightning_module=SimpleNamespace(accepts_empty=True),
        overfit_batches=overfit,
    )
    data.prepare_data(stage)
    data.setup(stage)
    return data


def refusal(cls, path, **settings):
    """Read image files or a table, which must fail, and return the error message."""
    with pytest.raises(UserError) as error:
        attach(cls(str(path), num_workers=0, **settings))
    return str(error.value)


def folder(root: Path, /, **settings):
    """Return flags to read a folder of images, without bar and model summary.

    Settings as in `options`.
    """
    flags = [f"--data={root}", "--model=CIFARCNN"]
    return [*flags, *options(**settings), *QUIET]


# -- pixels
# --------------------------------------------------------------------------------------------------


def test_normalisation():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    assert Transform((0.5,), (0.5,))(images).flatten().tolist() == pytest.approx([-1, -0.6, 1])
    assert Transform((0.0,), (256 / 255,))(images).flatten().tolist() == [0, 51 / 256, 255 / 256]
    pixels = Transform((0.5,), (0.5,)).undo(torch.tensor([-2, -1, -0.6, 1, 2]).view(5, 1, 1, 1))
    assert pixels.flatten().tolist() == [0, 0, 51, 255, 255]


def test_flip_crop_and_cutout_do_what_they_say():
    transform = partial(Transform, (0.0,) * 3, (1.0,) * 3)
    images = torch.randint(256, (64, 3, 8, 6), dtype=torch.uint8)
    drawn = torch.randint(DRAW_RANGE, (64, 5), dtype=torch.int32)
    draws = drawn / DRAW_RANGE
    plain = transform()(images)
    flipped = transform(flip=True)(images, drawn)
    mirrored = draws[:, 2] < 0.5
    assert torch.equal(flipped[mirrored], plain[mirrored].flip(3))
    assert torch.equal(flipped[~mirrored], plain[~mirrored])

    cropped = transform(crop_padding=2)(images, drawn)
    padded = torch.nn.functional.pad(plain, (2, 2, 2, 2))
    for i in range(64):
        top, left = (int(draw * 5) for draw in draws[i, :2])
        assert torch.equal(cropped[i], padded[i, :, top : top + 8, left : left + 6])
    assert {int(draw * 5) for draw in draws[:, 0]} == set(range(5)), "every offset occurs"

    bright = torch.full((64, 3, 8, 6), 255, dtype=torch.uint8)
    holes = transform(cutout=3)(bright, drawn)[:, 0] == 0
    for i in range(64):
        y = int(draws[i, 3] * 8)
        x = int(draws[i, 4] * 6)
        hole = torch.zeros(8, 6, dtype=torch.bool)
        hole[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2] = True
        assert torch.equal(holes[i], hole)
    torch.testing.assert_close(
        Transform((0.5,) * 3, (0.5,) * 3, flip=True, cutout=3)(images), (plain - 0.5) / 0.5
    )


# -- sources
# --------------------------------------------------------------------------------------------------


@SLOW
@pytest.mark.usefixtures("drawn")
def test_fashion_mnist(fashion_root, fit):
    """A batch size may be a fraction of the training images, rounded up: a quarter of 54 is 14."""
    data = attach(FashionMNIST(str(fashion_root), batch_size=0.25))
    assert next(iter(data.train_dataloader())).images.shape == (14, 1, 28, 28)
    assert len(data.train_dataloader()) == 4
    config = ["--config=configs/fashion_mlp.yaml", "--model.repeats=1"]
    run = fit(*config, f"--data.root={fashion_root}", *TWO_STEPS)
    assert (run / "most_wrong.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("folders", "classes", "splits", "remark"),
    [
        ("train/cat train/dog valid/cat valid/dog", "cat dog", "train val", ""),
        ("TRAINING/cat TRAINING/dog Val/cat testing/dog", "cat dog", "train val test", ""),
        ("data/data/train/cat data/data/train/dog data/data/dev/cat", "cat dog", "train val", ""),
        ("train/train/cat train/train/dog test/test", "cat dog", "train", "only `predict` reads"),
        ("train/cat train/dog test val", "cat dog", "train", "only `predict` reads"),
        ("train/cat train/dog extra/cat notes", "cat dog", "train", "extra, notes not read"),
        ("train", "", "", "has no class folders"),
        ("bus car train", "bus car train", "train", ""),
        ("cat/persian cat/siamese dog", "cat dog", "train", ""),
        (
            "train/cat train/dog val/cat valid/cat",
            "",
            "",
            "val and valid, which mean the same split val",
        ),
        ("cat dog test", "", "", "cat, dog, test, which look like classes and splits: move"),
        (
            "seg_train/cat seg_train/dog seg_test/cat",
            "",
            "",
            "which look like classes and splits: move",
        ),
    ],
)
def test_layouts_of_folders(folders, classes, splits, remark, tmp_path, caplog):
    """A folder is read as splits or classes, with a remark on unread folders, or refused."""
    for name in folders.split():
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "images" / name / "image.png")
    root = str(tmp_path / "images")
    if not classes:
        with pytest.raises(UserError, match=remark):
            ImageFolder(root)
        return
    with caplog.at_level("INFO"):
        data = ImageFolder(root)
    expected = set(splits.split())
    if "test" in folders:
        expected.add("predict")
    assert data.class_names == classes.split()
    assert set(data.source.splits) == expected
    assert remark in caplog.text
    assert bool(remark) == bool(caplog.text)


@SLOW
def test_files_are_known_by_their_content(image_root, app, tmp_path):
    """All images are read, whatever their names are.

    Other files are counted, in training and in prediction.
    """
    cats = image_root / "train/cat"
    suffixes = (".gif", ".avif", ".jfif", ".webp", ".tiff")
    for path, suffix in zip(sorted(cats.iterdir()), suffixes, strict=False):
        Image.open(path).save(path.with_suffix(suffix))
        path.unlink()
    (cats / "06.jpg").rename(cats / "no suffix")
    (cats / "07.png").rename(cats / "picture.2024")
    for name in ("cat/a.txt", "cat/b.TXT", "cat/LICENSE", "list.csv"):
        (cats.parent / name).write_text("text")
    flags = folder(image_root)
    out = app("fit", *flags, *options(max_epochs=1, test=False))
    others = "2 .txt, 1 .csv, 1 without suffix\n"
    assert out.count(f"Left out, as no images or in no class folder: {others}") == 1
    run = tmp_path / "runs/LeNet-ImageFolder/version_0"
    record = record_of(run)
    assert record["data"]["images"] == {"train": 33, "val": 3}
    assert record["data"]["class_names"] == ["cat", "dog", "eel"]
    assert record["files_left_out"] == {".csv": 1, ".txt": 2, "without suffix": 1}
    out = app("predict", *flags, "--ckpt_path=last", f"--data.predict_dir={cats}")
    assert "no class folder: 2 .txt, 1 without suffix\n" in out
    assert len((run / "predict_1/predictions.csv").read_text().splitlines()) == 1 + 12


def test_links_are_followed_and_hidden_names_ignored(image_root, tmp_path):
    """Links may replace a split, a class and a file.

    Hidden files of notebooks and desktops are ignored.
    """
    linked = tmp_path / "linked"
    train = tmp_path / "split"
    for name in ("cat", "dog"):
        (train / name).mkdir(parents=True)
        for file in (image_root / "train" / name).iterdir():
            (train / name / file.name).symlink_to(file)
    (train / "eel").symlink_to(image_root / "train/eel")
    linked.mkdir()
    (linked / "train").symlink_to(train)
    for folder in (linked, train, train / "dog"):
        (folder / ".ipynb_checkpoints").mkdir()
        for name in (".ipynb_checkpoints/00-checkpoint.jpg", ".DS_Store", "._00.jpg"):
            (folder / name).write_bytes(b"")
    plain = attach(ImageFolder(str(image_root), val_size=0))
    data = attach(ImageFolder(str(linked), val_size=0))
    assert data.class_names == plain.class_names
    assert data.content == plain.content
    assert torch.equal(data._splits["train"][0].tensor(), plain._splits["train"][0].tensor())


@SLOW
def test_a_folder_of_classes(image_root, app, tmp_path):
    """Without splits, validation images are split off, and there is no test.

    `predict` takes a single file, too.
    """
    flags = folder((image_root / "train").rename(image_root / "flat"))
    predict = ["predict", *flags, "--ckpt_path=last", "--data.predict_dir"]
    out = app("fit", *flags, "--trainer.max_epochs=1")
    assert out.count("no test images") == 1
    assert "python -m app validate --config " in out
    assert "python -m app test " not in out
    record = record_of(tmp_path / "runs/LeNet-ImageFolder/version_0")
    assert record["data"]["images"] == {"train": 33, "val": 3}
    photo = image_root / "one photo"
    photo.write_bytes((image_root / "test/cat/00.jpg").read_bytes())
    assert "1 prediction: " in app(*predict, photo)
    (_, line) = next(tmp_path.rglob("predictions.csv")).read_text().splitlines()
    assert line.startswith(f"{photo},")
    (image_root / "empty").mkdir()
    missing = f"{image_root / 'gone'} cannot be read (No such file or directory)"
    assert missing in app.error(*predict, image_root / "gone")
    assert f"{image_root / 'empty'} holds no images" in app.error(*predict, image_root / "empty")


def test_image_folder_takes_size_channels_and_a_validation_folder(image_root):
    (image_root / "test").rename(image_root / "val")
    data = attach(ImageFolder(str(image_root), size=(10, 12), channels=1))
    assert isinstance(data.val_dataloader(), GlobalBatches)
    assert next(iter(data.val_dataloader())).images.shape == (12, 1, 10, 12)
    assert len(data.train_dataloader().order.rows) == 36
    assert "test" not in data.source.splits


def test_synthetic():
    def images(split, seed):
        return SyntheticSource("FashionMNIST", 300, seed).load(split).tensor()

    train = images("train", 1)
    test = images("test", 1)
    assert train.shape == (300, 1, 28, 28)
    assert len(test) == 60
    assert torch.equal(images("train", 1), train)
    assert not torch.equal(test, train[:60])
    assert not torch.equal(images("train", 2), train)


@pytest.mark.parametrize(
    ("ranks", "slurm", "expected"), [(1, None, 6), (8, None, 1), (4, "3", 3), (4, "", 1)]
)
def test_workers_follow_the_cores(ranks, slurm, expected, monkeypatch):
    monkeypatch.setattr("app.data.placement.usable_cores", lambda: 6)
    environment = LightningEnvironment()
    if slurm is not None:
        for name, value in (("STEP_NODELIST", "node"), ("JOB_ID", "1"), ("STEP_ID", "0")):
            monkeypatch.setenv(f"SLURM_{name}", value)
        environment = Slurm()
    trainer = SimpleNamespace(
        world_size=2 * ranks, num_nodes=2, strategy=SimpleNamespace(cluster_environment=environment)
    )
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm)
    assert workers_of(trainer) == expected


def test_overfitting_repeats_the_same_batches():
    loader = attach(Synthetic(images=100, batch_size=10), overfit=2).train_dataloader()
    assert torch.equal(next(iter(loader)).labels, next(iter(loader)).labels)
    assert not loader.shuffle


@pytest.mark.parametrize("size", [0, 1.5, -0.1])
def test_wrong_batch_size_is_refused(size):
    with pytest.raises(UserError, match="batch_size"):
        Synthetic(batch_size=size)
