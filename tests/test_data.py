"""Image sources in their real formats, transforms of pixels, and loaders."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import (
    QUIET,
    App,
    error_of,
    fork_app,
    last_of,
    losses,
    on_cpu,
    options,
    output_of,
    record_of,
    tiny,
)
from lightning.fabric.plugins.environments import LightningEnvironment
from PIL import Image

from app.data import FashionMNIST, ImageFolder, Synthetic
from app.data.batches import GlobalBatches
from app.data.module import ImageData
from app.data.sources import split_of
from app.data.synthetic import SyntheticSource
from app.data.transforms import DRAW_RANGE, Transform
from app.errors import UserError
from app.launch.cluster_environment import Slurm

TWO_STEPS = [*options(max_steps=2, max_epochs=1), *QUIET]


def attach(data: ImageData, stage: str = "fit", overfit: float = 0.0) -> ImageData:
    """Set up a data module as a Trainer with one CPU process does."""
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), reduce_boolean_decision=lambda mine, all: mine
    )
    progress = SimpleNamespace(current=SimpleNamespace(ready=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    module = SimpleNamespace(accepts_empty=True)
    fixed = {
        "world_size": 1,
        "num_nodes": 1,
        "global_rank": 0,
        "strategy": strategy,
        "fit_loop": loop,
    }
    data.trainer = SimpleNamespace(**fixed, lightning_module=module, overfit_batches=overfit)  # type: ignore[assignment]
    data.prepare_data(stage)
    data.setup(stage)
    return data


# -- pixels
# -----------------------------------------------------------------------------------------------------


def test_normalisation() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    assert Transform((0.5,), (0.5,))(images).flatten().tolist() == pytest.approx([-1, -0.6, 1])
    assert Transform((0.0,), (256 / 255,))(images).flatten().tolist() == [0, 51 / 256, 255 / 256]


def test_large_batches_are_normalised_alike() -> None:
    images = torch.randint(256, (3, 3, 600, 400), dtype=torch.uint8)
    transform = Transform((0.4, 0.5, 0.6), (0.2, 0.3, 0.5), flip=True)
    drawn = torch.randint(DRAW_RANGE, (3, transform.draws), dtype=torch.int32)
    one_by_one = [(image[None], draws[None]) for image, draws in zip(images, drawn, strict=True)]
    assert torch.equal(transform(images), torch.cat([transform(image) for image, _ in one_by_one]))
    assert torch.equal(
        transform(images, drawn), torch.cat([transform(*sample) for sample in one_by_one])
    )


def test_flip_crop_and_cutout_do_what_they_say() -> None:
    images = torch.randint(256, (64, 3, 8, 6), dtype=torch.uint8)
    drawn = torch.randint(DRAW_RANGE, (64, 5), dtype=torch.int32)
    draws = drawn / DRAW_RANGE
    plain = Transform((0.0,) * 3, (1.0,) * 3)(images)
    flipped = Transform((0.0,) * 3, (1.0,) * 3, flip=True)(images, drawn)
    mirrored = draws[:, 2] < 0.5
    assert torch.equal(flipped[mirrored], plain[mirrored].flip(3))
    assert torch.equal(flipped[~mirrored], plain[~mirrored])

    cropped = Transform((0.0,) * 3, (1.0,) * 3, crop_padding=2)(images, drawn)
    padded = torch.nn.functional.pad(plain, (2, 2, 2, 2))
    for i in range(64):
        top, left = (int(draw * 5) for draw in draws[i, :2])
        assert torch.equal(cropped[i], padded[i, :, top : top + 8, left : left + 6])
    assert {int(draw * 5) for draw in draws[:, 0]} == set(range(5)), "every offset occurs"

    bright = torch.full((64, 3, 8, 6), 255, dtype=torch.uint8)
    holes = Transform((0.0,) * 3, (1.0,) * 3, cutout=3)(bright, drawn)[:, 0] == 0
    assert holes.any((1, 2)).all()
    assert holes.sum((1, 2)).max() == 9
    torch.testing.assert_close(
        Transform((0.5,) * 3, (0.5,) * 3, flip=True, cutout=3)(images), (plain - 0.5) / 0.5
    )


# -- sources
# ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("drawn")
def test_fashion_mnist(fashion_root: Path, app: App, tmp_path: Path) -> None:
    """A batch size may be a fraction of the training images, rounded up: a quarter of 54 is 14."""
    data, root = (
        attach(FashionMNIST(str(fashion_root), batch_size=0.25)),
        ["--data.root", fashion_root],
    )
    assert next(iter(data.train_dataloader())).images.shape == (14, 1, 28, 28)
    assert len(data.train_dataloader()) == 4
    output_of(
        *app(
            "fit", "--config", "configs/fashion_mlp.yaml", "--model.repeats", "1", *root, *TWO_STEPS
        )
    )
    assert (
        tmp_path / "runs" / "fashion_mlp" / "version_0" / "most_wrong.png"
    ).stat().st_size > 1000


@pytest.mark.parametrize(("placement", "folder"), [("disk", None), ("memory", "eel")])
def test_image_folder(
    placement: str, folder: str | None, image_root: Path, app: App, tmp_path: Path
) -> None:
    """`predict` writes labels for the test split, but none for a folder of new images."""
    flags = [
        "--data",
        "ImageFolder",
        "--data.root",
        image_root,
        *options(placement=placement, num_workers=2),
    ]
    output_of(*app("fit", *flags, *TWO_STEPS))
    assert multiprocessing.active_children() == []
    run = tmp_path / "runs" / "LeNet-ImageFolder" / "version_0"
    flags += ["--data.predict_dir", image_root / "test" / folder] if folder else []
    output_of(*app("predict", *flags, "--ckpt_path", last_of(run), *QUIET))
    head, *rows = (run / "predict_1" / "predictions.csv").read_text().splitlines()
    assert head == "file,predicted,name,probability" + ("" if folder else ",label")
    assert rows[0].startswith(str(image_root / "test" / (folder or "cat") / "00.jpg"))
    assert len(rows) == (4 if folder else 12)


def test_names_of_splits() -> None:
    assert {split_of(name) for name in ("train", "Training", "TRAIN ")} == {"train"}
    assert {split_of(name) for name in ("val", "valid", "Validation", "eval", "dev")} == {"val"}
    assert {split_of(name) for name in ("test", "Testing")} == {"test"}
    assert {split_of(name) for name in ("trains", "cat", "", "unsupervised")} == {None}


def lay_out(root: Path, folders: str) -> str:
    """Write an image into each folder, and return the root."""
    for folder in folders.split():
        (root / folder).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / folder / "image.png")
    return str(root)


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
def test_layouts_of_folders(
    folders: str,
    classes: str,
    splits: str,
    remark: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A folder is read as splits or classes, with a remark on folders that are not read, or it is refused."""
    root = lay_out(tmp_path / "images", folders)
    if not classes:
        with pytest.raises(UserError, match=remark):
            ImageFolder(root)
        return
    with caplog.at_level("INFO"):
        data = ImageFolder(root)
    assert list(data.class_names) == classes.split()
    assert {*data.source.splits} == {*splits.split(), *["predict"] * ("test" in folders)}
    assert remark in caplog.text
    assert bool(remark) == bool(caplog.text)


def test_files_are_known_by_their_content(image_root: Path, app: App, tmp_path: Path) -> None:
    """All images are read, whatever their names are. Other files are counted, in training and in prediction."""
    cats = image_root / "train" / "cat"
    kinds = ["gif", "avif", "jfif", "webp", "bmp", "tiff"]
    for number, kind in enumerate(kinds):
        path = cats / f"{number:02}.{'png' if number % 2 else 'jpg'}"
        Image.open(path).save(
            cats / f"{number:02}.{kind}", format="JPEG" if kind == "jfif" else kind
        )
        path.unlink()
    (cats / "06.jpg").rename(cats / "no suffix")
    (cats / "07.png").rename(cats / "picture.2024")
    for place in (
        cats / "a.txt",
        cats / "b.TXT",
        cats / "LICENSE",
        image_root / "train" / "list.csv",
    ):
        place.write_text("text")
    flags = ["--data", "ImageFolder", "--data.root", image_root, *QUIET]
    out = output_of(*app("fit", *flags, *options(max_epochs=1, test=False)))
    assert (
        out.count(
            "Left out, as no images or in no class folder: 2 .txt, 1 .csv, 1 without suffix\n"
        )
        == 1
    )
    run = tmp_path / "runs" / "LeNet-ImageFolder" / "version_0"
    record = record_of(run)
    assert record["data"]["images"] == {"train": 33, "val": 3}
    assert record["data"]["class_names"] == ["cat", "dog", "eel"]
    assert record["files_left_out"] == {".csv": 1, ".txt": 2, "without suffix": 1}
    out = output_of(*app("predict", *flags, "--ckpt_path", "last", "--data.predict_dir", cats))
    assert "no class folder: 2 .txt, 1 without suffix\n" in out
    assert len((run / "predict_1" / "predictions.csv").read_text().splitlines()) == 1 + 12


def test_links_are_followed_and_hidden_names_ignored(image_root: Path, tmp_path: Path) -> None:
    """Links may replace a split, a class and a file. Hidden files of notebooks and desktops are ignored."""
    linked, train = tmp_path / "linked", tmp_path / "split"
    for name in ("cat", "dog"):
        (train / name).mkdir(parents=True)
        for file in (image_root / "train" / name).iterdir():
            (train / name / file.name).symlink_to(file)
    (train / "eel").symlink_to(image_root / "train" / "eel")
    linked.mkdir()
    (linked / "train").symlink_to(train)
    for folder in (linked, train, train / "dog"):
        (folder / ".ipynb_checkpoints").mkdir()
        for name in (".ipynb_checkpoints/00-checkpoint.jpg", ".DS_Store", "._00.jpg"):
            (folder / name).write_bytes(b"")
    plain, data = (attach(ImageFolder(str(root), val_size=0)) for root in (image_root, linked))
    assert (data.class_names, data.content) == (plain.class_names, plain.content)
    assert torch.equal(data._splits["train"][0].tensor(), plain._splits["train"][0].tensor())


def test_a_folder_of_classes(image_root: Path, app: App, tmp_path: Path) -> None:
    """Without splits, validation images are split off, and there is no test. `predict` takes a single file, too."""
    flat = [
        "--data",
        "ImageFolder",
        "--data.root",
        (image_root / "train").rename(image_root / "flat"),
        *QUIET,
    ]
    out = output_of(*app("fit", *flat, "--trainer.max_epochs", "1"))
    assert out.count("no test images") == 1
    assert "python -m app validate --config " in out
    assert "python -m app test " not in out
    record = record_of(tmp_path / "runs" / "LeNet-ImageFolder" / "version_0")
    assert record["data"]["images"] == {"train": 33, "val": 3}
    photo = image_root / "one photo"
    photo.write_bytes((image_root / "test" / "cat" / "00.jpg").read_bytes())
    assert "1 prediction: " in output_of(
        *app("predict", *flat, "--ckpt_path", "last", "--data.predict_dir", photo)
    )
    (_, line) = next(tmp_path.rglob("predictions.csv")).read_text().splitlines()
    assert line.startswith(f"{photo},")
    (image_root / "empty").mkdir()
    for place, problem in (
        ("gone", "cannot be read (No such file or directory)"),
        ("empty", "holds no images"),
    ):
        message = error_of(
            *app("predict", *flat, "--ckpt_path", "last", "--data.predict_dir", image_root / place)
        )
        assert f"{image_root / place} {problem}" in message


def test_image_folder_takes_size_channels_and_a_validation_folder(image_root: Path) -> None:
    (image_root / "test").rename(image_root / "val")
    data = attach(ImageFolder(str(image_root), size=(10, 12), channels=1))
    assert isinstance(data.val_dataloader(), GlobalBatches)
    assert next(iter(data.val_dataloader())).images.shape == (12, 1, 10, 12)
    assert len(data.train_dataloader().rows) == 36
    assert "test" not in data.source.splits


@pytest.mark.parametrize(
    ("like", "shape"), [("CIFAR10", (3, 32, 32)), ("FashionMNIST", (1, 28, 28))]
)
def test_synthetic(like: str, shape: tuple[int, ...]) -> None:
    source = SyntheticSource(like, 300, seed=1)  # type: ignore[arg-type]
    first, again = source.load("train"), source.load("train")
    assert torch.equal(first.tensor(0), again.tensor(0))
    assert first.tensor(0).shape == (300, *shape)
    test = source.load("test")
    assert len(test) == 60
    assert not torch.equal(test.tensor(0), first.tensor(0)[:60])
    other = SyntheticSource(like, 300, seed=2).load("train")  # type: ignore[arg-type]
    assert not torch.equal(other.tensor(0), first.tensor(0))


@pytest.mark.parametrize(
    ("ranks", "slurm", "expected"),
    [(1, None, 6), (4, None, 1), (8, None, 1), (4, "3", 3), (4, "", 1)],
)
def test_workers_follow_the_cores(
    ranks: int, slurm: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.data.module.usable_cores", lambda: 6)
    data = Synthetic(images=10)
    environment = LightningEnvironment() if slurm is None else Slurm()
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        world_size=2 * ranks, num_nodes=2, strategy=SimpleNamespace(cluster_environment=environment)
    )
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", slurm)
    assert data.num_workers == expected


def test_overfitting_repeats_the_same_batches() -> None:
    loader = attach(Synthetic(images=100, batch_size=10), overfit=2).train_dataloader()
    assert torch.equal(next(iter(loader)).labels, next(iter(loader)).labels)
    assert not loader.shuffle


@pytest.mark.parametrize("size", [0, -1, 1.5, -0.1])
def test_sizes_that_make_no_sense(size: float) -> None:
    with pytest.raises(UserError, match="batch_size"):
        Synthetic(batch_size=size)


@pytest.mark.slow
def test_a_last_batch_that_leaves_a_rank_nothing(tmp_path: Path) -> None:
    """With 1 image for 2 ranks, rank 1 steps with an empty batch. The losses equal those of one device."""
    flags = tiny(73, 32, val_size=8, max_epochs=2, log_every_n_steps=1, root=tmp_path)
    for name, more in (("ddp", on_cpu("ddp_fork")), ("single", [])):
        output_of(*fork_app("fit", *flags, *more, "--run.name", name))
    ours, single = (losses(tmp_path / name / "version_0") for name in ("ddp", "single"))
    assert len(single) == 6
    assert ours == pytest.approx(single, abs=1e-5)
