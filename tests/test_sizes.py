"""Images of different sizes: resize, crops, cache, and augmentation by name; equal for any number of ranks."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from harness import (
    QUIET,
    App,
    assert_same,
    draw_images,
    error_of,
    fork_app,
    on_cpu,
    options,
    output_of,
)
from PIL import ExifTags, Image, ImageOps
from test_cache import cache, decoded  # noqa: F401
from test_data import attach
from torchvision.transforms import v2

from app.data import ImageFolder
from app.data.cache import HEADER
from app.data.geometry import Geometry
from app.data.image_files import FileSplit, open_image, pixels

RESIZED: dict[str, Any] = {"size": 16, "resize": 20, "crop": "random_resized", "num_workers": 0}


def sample(path: Path) -> torch.Tensor:
    return v2.functional.pil_to_tensor(Image.open(path).convert("RGB"))


def test_aspect_ratio_is_kept(image_root: Path) -> None:
    """Evaluation images equal those of torchvision's Resize and CenterCrop; only `squash` changes the aspect ratio."""
    reference = v2.Compose([v2.Resize(20), v2.CenterCrop(16)])
    split = attach(ImageFolder(str(image_root), size=16, resize=20, cache="off"), "test")._splits[
        "test"
    ][0]
    assert split.names is not None
    for index in range(12):
        assert torch.equal(split[index], reference(sample(Path(split.names[index]))))
    tall, stripes = Geometry((10, 30)), torch.zeros(3, 40, 20, dtype=torch.uint8)
    stripes[:, 15:25] = 255  # the middle quarter of the rows
    assert tall.evaluated(stripes).shape == (3, 10, 30)
    assert tall.evaluated(stripes).min() > 200
    assert Geometry((10, 30), "squash").evaluated(stripes).float().mean() == pytest.approx(
        255 / 4, abs=9
    )
    assert torch.equal(Geometry((20, 20)).evaluated(stripes[:, 10:30]), stripes[:, 10:30])


def test_training_images_are_kept_larger(image_root: Path, cache: Path, decoded: Any) -> None:  # noqa: F811
    """Cached images have a shorter side of 20 to 23 pixels, or of 20 for `--data.crop random`.

    Validation always uses the centre crop of an image.
    """
    for crop, sides in (("random_resized", (23,)), ("random", (20,))):
        flags = {**RESIZED, "crop": crop, "cache": str(cache)}
        data = attach(ImageFolder(str(image_root), **flags))
        split, _ = data._splits["train"]
        assert split.mapped
        assert data.placement == "disk"
        source = data.source
        plain = FileSplit(
            split.names,
            split.labels.tolist(),
            source.image_shape,
            source.geometry,
            source.ragged("train"),
        )  # type: ignore[attr-defined]
        for index in range(len(split)):
            assert torch.equal(split[index], plain[index])
            assert min(split[index].shape[1:]) in (
                sides if crop == "random" else (*sides, 20, 21, 22)
            )
        assert next(iter(data.train_dataloader())).images.shape == (33, 3, 16, 16)
        first, again = (next(iter(data.val_dataloader())) for _ in range(2))  # type: ignore[arg-type]
        assert torch.equal(first.images, again.images)
        row = int(data._splits["val"][1][0])
        assert torch.equal(first.images[0], data.source.geometry.evaluated(split[row]))  # type: ignore[attr-defined]
        decoded()
        attach(
            ImageFolder(
                str(image_root),
                **flags,
                **({"scale": (0.5, 1.0)} if crop == "random_resized" else {}),
            )
        )
        assert decoded() == 0, "the second start, with another scale"


def test_several_workers_write_one_file(
    image_root: Path,
    cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers append in any order; each row still holds its own image, and a damaged image is skipped."""
    monkeypatch.setattr(FileSplit, "_block", 2)
    monkeypatch.setattr("app.data.module.usable_cores", lambda: 2)
    damaged = image_root / "train" / "dog" / "04.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    split = attach(
        ImageFolder(str(image_root), cache=str(cache), on_bad_image="skip", **RESIZED)
    )._splits["train"][0]
    assert split.names is not None
    assert (len(split), split.left_out) == (35, 1)
    for index, name in enumerate(split.names):
        assert torch.equal(
            split[index], Geometry((16, 16), 20, crop="random_resized").keep(sample(Path(name)))
        )
        assert split.labels[index] == ["cat", "dog", "eel"].index(Path(name).parent.name)


def test_a_worker_without_room(
    image_root: Path,
    cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    monkeypatch.setattr("app.data.module.rank_zero_info", messages.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, before[1]))
    try:
        attach(ImageFolder(str(image_root), cache=str(cache), **RESIZED))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (message,) = messages
    assert message.startswith(
        f"Decoded images cannot be kept in {cache} ([Errno 28] No space left on device), so"
    )
    assert not list(cache.iterdir())


def test_jpegs_have_the_pixels_of_pil(tmp_path: Path) -> None:
    """JPEG files of every kind get the same full-size pixels as from PIL. A truncated file raises PIL's error."""
    path, rng = tmp_path / "x.jpg", np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(256, size=(37, 51, 3), dtype=np.uint8))
    kinds: list[dict[str, Any]] = [{"subsampling": n} for n in range(3)]
    kinds += [{"progressive": True}, {"keep_rgb": True}, {"quality": 30}]
    for picture in (colours, colours.convert("L"), colours.convert("CMYK")):
        for kind in kinds:
            picture.save(path, **({} if picture.mode == "CMYK" else kind))
            assert torch.equal(pixels(Image.open(path), 3), sample(path))
    colours.save(path)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(OSError, match="image file is truncated"):
        pixels(Image.open(path), 3)


def corners(image: torch.Tensor) -> list[float]:
    """Return the brightness near the four corners, row by row."""
    return [float(image[:, row, column].float().mean()) for row in (2, -3) for column in (2, -3)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_upright(orientation: int, kind: str, tmp_path: Path) -> None:
    """Pixels are those of PIL's exif_transpose, for each EXIF orientation.

    A JPEG image that is decoded at a reduced size keeps each corner at its place.
    """
    grey = np.zeros((160, 320), np.uint8)
    grey[:80, 160:], grey[80:, :160], grey[80:, 160:] = 80, 160, 240
    path, exif = tmp_path / f"x.{kind}", Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(grey).convert("RGB").save(path, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(path))
    expected = v2.functional.pil_to_tensor(upright.convert("RGB"))
    assert torch.equal(pixels(open_image(str(path)), 3), expected)
    height, width = expected.shape[1:]
    for scale in (1, 4):
        sizes = Geometry((height // scale, width // scale), crop="random")
        image = FileSplit([str(path)], [0], (3, *sizes.size), sizes, sizes)[0]
        assert image.shape[1:] == sizes.size
        assert corners(image) == pytest.approx(corners(expected), abs=3)


def test_broken_exif_is_ignored(tmp_path: Path) -> None:
    picture, path = (
        Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)),
        tmp_path / "x.png",
    )
    for exif in (b"MM\0*\xff\xff\xff\xff", b"nonsense", b"II*\0\x08\0\0\0\xff\xff"):
        picture.save(path, exif=exif)
        assert torch.equal(pixels(open_image(str(path)), 3), sample(path))


def test_a_damaged_cache_is_made_again(image_root: Path, cache: Path, decoded: Any) -> None:  # noqa: F811
    def images() -> list[torch.Tensor]:
        split = attach(ImageFolder(str(image_root), cache=str(cache), **RESIZED))._splits["train"][
            0
        ]
        return [split[index].clone() for index in range(len(split))]

    expected = images()
    path = next(cache.glob("train-*"))
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[:5000], b"", whole.replace(b'"count": 36', b'"count": 35')):
        path.write_bytes(broken)
        decoded()
        assert all(map(torch.equal, images(), expected))
        assert decoded() == 36
        assert path.read_bytes()[HEADER:] == whole[HEADER:], "apart from the time in the header"


def test_large_jpegs_are_decoded_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_images(tmp_path, ("cat", "dog"), train=2)
    large = tmp_path / "train" / "cat" / "large.jpg"
    Image.fromarray(np.full((400, 800, 3), 77, np.uint8)).save(large)
    sizes, keep = [], Geometry.keep
    monkeypatch.setattr(
        Geometry, "keep", lambda self, image: sizes.append(tuple(image.shape)) or keep(self, image)
    )
    split = attach(ImageFolder(str(tmp_path), cache="off", val_size=0, **RESIZED))._splits["train"][
        0
    ]
    assert split.names is not None
    assert split[split.names.index(str(large))].shape == (3, 23, 46)
    assert sizes == [(3, 50, 100)]


RECIPE = options(
    resize=36, crop="random_resized", augment="RandAugment", batch_size=8, num_workers=1
)
RECIPE += options(max_epochs=3, log_every_n_steps=1, flip=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Flags of a training of LeNet with crops and RandAugment, and the directory of its run on one device."""
    root = tmp_path_factory.mktemp("alone")
    flags = [
        "--data",
        "ImageFolder",
        "--data.root",
        str(draw_images(root / "images", ("cat", "dog", "eel"), train=12)),
    ]
    flags += [*RECIPE, *QUIET, "--run.root", str(root), "--run.test", "false"]
    output_of(*fork_app("fit", *flags, "--run.name", "alone"))
    return flags, root / "alone" / "version_0"


@pytest.mark.parametrize("way", ["ddp_fork", "resumed", "decoded"])
def test_every_way_crops_and_augments_alike(alone: tuple[list[str], Path], way: str) -> None:
    flags, expected = alone
    flags = [*flags, "--run.name", way]
    if way == "ddp_fork":
        flags += on_cpu(way)
    elif way == "decoded":
        flags += ["--data.cache", "off", "--data.num_workers", "0"]
    else:
        output_of(*fork_app("fit", *flags, "--trainer.max_steps", "7"))
        flags += ["--ckpt_path", "last"]
    output_of(*fork_app("fit", *flags))
    assert_same(
        expected.parents[1] / way / "version_0", expected, 1e-5 if way == "ddp_fork" else 1e-12
    )


WRONG = [
    (options(size=0), "--data.size (0, 0): give at least 1 pixel"),
    (options(size=16, resize=12), "--data.resize 12 is smaller than --data.size 16"),
    (
        options(crop="random", resize="squash"),
        "--data.crop random needs images larger than --data.size",
    ),
    (options(scale="[0.5,1]"), "--data.scale works with --data.crop random_resized only"),
    (
        options(crop="random_resized", scale="[0.5,0.1]"),
        "--data.scale (0.5, 0.1): give two numbers above 0 up to 1",
    ),
    (
        options(crop="random_resized", ratio="[0,1]"),
        "--data.ratio (0.0, 1.0): give two numbers above 0",
    ),
    (options(crop="random_resized", placement="memory"), "--data.crop runs in worker processes"),
    (
        options(augment="RandAugmnt"),
        "--data.augment RandAugmnt: there is no such class: did you mean RandAugment?",
    ),
    (options(augment="[RandAugment,RandomCrop]"), "--data.augment"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_what_does_not_go_together(
    flags: list[str], message: str, app: App, image_root: Path
) -> None:
    assert message in error_of(
        *app("fit", "--data", "ImageFolder", "--data.root", image_root, *flags, *QUIET)
    )


def test_augmentations_by_name(image_root: Path, app: App, tmp_path: Path) -> None:
    config, erasing = (
        tmp_path / "augment.yaml",
        {"class_path": "RandomErasing", "init_args": {"p": 1.0, "value": 7}},
    )
    settings = {"augment": ["TrivialAugmentWide", erasing, "user_code.Inverted"]}
    config.write_text(
        yaml.safe_dump({"data": {"class_path": "ImageFolder", "init_args": settings}})
    )
    flags = [
        "--config",
        config,
        "--data.root",
        image_root,
        *options(max_epochs=1, num_workers=0, test=False),
        *QUIET,
    ]
    output_of(*app("fit", *flags))
    saved = (tmp_path / "runs" / "LeNet-ImageFolder" / "version_0" / "config.yaml").read_text()
    names = [
        "torchvision.transforms.v2.TrivialAugmentWide",
        "torchvision.transforms.v2.RandomErasing",
    ]
    assert all(name in saved for name in [*names, "user_code.Inverted"])
    output_of(
        *app("fit", *flags, "--data.augment", "ColorJitter", "--data.augment.brightness", "0.4")
    )
