"""Images of different sizes: resize, crops, cache, and augmentation by name.

Results are equal for any number of ranks.
"""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from forked import fork_fit
from harness import QUIET, assert_same, draw_images, on_cpu, options, slow
from PIL import ExifTags, Image, ImageOps
from test_cache import cache, decoded  # noqa: F401
from test_data import attach, folder
from torchvision.transforms import v2

from app.data import ImageFolder
from app.data.geometry import Geometry
from app.data.image_files import FileSplit, open_image, pixels
from app.errors import UserError

RESIZED = {"size": 16, "resize": 20, "crop": "random_resized", "num_workers": 0}


def sample(path):
    return v2.functional.pil_to_tensor(Image.open(path).convert("RGB"))


def test_aspect_ratio_is_kept(image_root):
    """Evaluation images equal those of torchvision's Resize and CenterCrop.

    Only `squash` changes the aspect ratio.
    """
    reference = v2.Compose([v2.Resize(20), v2.CenterCrop(16)])
    data = attach(ImageFolder(str(image_root), size=16, resize=20, cache="off"), "test")
    split = data._splits["test"][0]
    assert split.names is not None
    for index in range(12):
        assert torch.equal(split[index], reference(sample(Path(split.names[index]))))
    stripes = torch.zeros(3, 40, 20, dtype=torch.uint8)
    stripes[:, 15:25] = 255  # the middle quarter of the rows
    cropped = Geometry((10, 30)).evaluated(stripes)
    assert cropped.shape == (3, 10, 30)
    assert cropped.min() > 200
    squashed = Geometry((10, 30), "squash").evaluated(stripes)
    assert squashed.float().mean() == pytest.approx(255 / 4, abs=9)
    both = Geometry((10, 30), "squash").evaluated(torch.stack((255 - stripes, stripes)))
    assert torch.equal(both[1], squashed)
    small = torch.zeros(3, 4, 6, dtype=torch.uint8)
    assert Geometry((8, 8), crop="random_resized").keep(small).shape == small.shape
    assert Geometry((8, 8), crop="random").keep(small).shape == (3, 8, 12)
    for width in range(20, 26):  # margins of 0 to 5 columns
        image = torch.randint(256, (3, 20, width), dtype=torch.uint8)
        centre = v2.functional.center_crop(image, [20, 20])
        assert torch.equal(Geometry((20, 20)).evaluated(image[None])[0], centre)
    with pytest.raises(UserError, match="give at least 1 pixel"):
        Geometry((8, 0))
    one_pixel = Geometry((1, 1), 1).evaluated(torch.zeros(3, 2, 4, dtype=torch.uint8))
    assert one_pixel.shape == (3, 1, 1)
    crop = Geometry((8, 8), crop="random_resized").random_crop()
    assert crop.scale == v2.RandomResizedCrop(8).scale


@pytest.mark.parametrize(
    ("crop", "sides", "scale"),
    [("random_resized", {20, 21, 22, 23}, {"scale": (0.5, 1.0)}), ("random", {20}, {})],
)
def test_training_images_are_kept_larger(
    crop,
    sides,
    scale,
    image_root,
    cache,  # noqa: F811
    decoded,  # noqa: F811
    monkeypatch,
):
    """Cached images have a shorter side of 20 to 23 pixels, or of 20 for `--data.crop random`.

    Two workers decode them; a damaged image is skipped, and each row still holds its own image.
    Validation always uses the centre crop of an image.
    """
    monkeypatch.setattr("app.data.image_files.BLOCK", 3000)
    monkeypatch.setattr("app.data.module.usable_cores", lambda: 2)
    damaged = image_root / "train/dog/04.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    flags = {**RESIZED, "crop": crop, "cache": str(cache), "on_bad_image": "skip"}
    data = attach(ImageFolder(str(image_root), **flags))
    source = data.source
    split = data._splits["train"][0]
    assert split.mapped
    assert data.placement == "disk"
    assert (len(split), split.left_out) == (35, 1)
    plain = source.load("train")
    for index, name in enumerate(split.names):
        assert split.labels[index] == data.class_names.index(Path(name).parent.name)
        assert torch.equal(split[index], plain[plain.names.index(name)])
        assert min(split[index].shape[1:]) in sides
    assert next(iter(data.train_dataloader())).images.shape == (32, 3, 16, 16)
    loader = data.val_dataloader()
    first = next(iter(loader)).images
    assert torch.equal(first, next(iter(loader)).images)
    row = int(data._splits["val"][1][0])
    assert torch.equal(first[0], source.geometry.evaluated(split[row]))
    decoded()
    attach(ImageFolder(str(image_root), **flags, **scale))
    assert decoded() == 0, "the second start, with another scale"


def test_jpegs_have_the_pixels_of_pil(tmp_path):
    """JPEG files of every kind get the same full-size pixels as from PIL.

    A truncated file raises PIL's error.
    """
    path = tmp_path / "x.jpg"
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(256, size=(37, 51, 3), dtype=np.uint8))
    kinds = [{"subsampling": n} for n in range(3)]
    kinds += [{"progressive": True}, {"keep_rgb": True}, {"quality": 30}]
    pictures = [(colours, kind) for kind in kinds]
    for picture, kind in [*pictures, (colours.convert("L"), {}), (colours.convert("CMYK"), {})]:
        picture.save(path, **kind)
        assert torch.equal(pixels(Image.open(path), 3), sample(path))
    colours.save(path)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(OSError, match="image file is truncated"):
        pixels(Image.open(path), 3)


def corners(image):
    """Return the brightness near the four corners, row by row."""
    return [float(image[:, row, column].float().mean()) for row in (2, -3) for column in (2, -3)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_upright(orientation, kind, tmp_path):
    """Pixels are those of PIL's exif_transpose, for each EXIF orientation.

    A JPEG image that is decoded at a reduced size keeps each corner at its place.
    """
    grey = np.zeros((160, 320), np.uint8)
    grey[:80, 160:] = 80
    grey[80:, :160] = 160
    grey[80:, 160:] = 240
    path = tmp_path / f"x.{kind}"
    exif = Image.Exif()
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


def test_broken_exif_is_ignored(tmp_path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    path = tmp_path / "x.png"
    for exif in (b"MM\0*\xff\xff\xff\xff", b"nonsense", b"II*\0\x08\0\0\0\xff\xff"):
        picture.save(path, exif=exif)
        assert torch.equal(pixels(open_image(str(path)), 3), sample(path))


def test_large_jpegs_are_decoded_smaller(tmp_path, monkeypatch):
    large = tmp_path / "large.jpg"
    Image.fromarray(np.full((400, 800, 3), 77, np.uint8)).save(large)
    keep = Mock(side_effect=lambda image: image)
    monkeypatch.setattr(Geometry, "keep", keep)
    sizes = Geometry((16, 16), 20, crop="random_resized")
    assert sizes.kept == (23, 23)
    assert FileSplit([str(large)], [0], (3, 16, 16), sizes, sizes)[0].shape == (3, 50, 100)
    assert keep.call_count == 1


RECIPE = options(
    resize=36, crop="random_resized", augment="RandAugment", batch_size=8, num_workers=1
)
RECIPE += options(max_epochs=3, log_every_n_steps=1, flip=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Flags of a training with crops and RandAugment, and its run's directory on one device."""
    root = tmp_path_factory.mktemp("alone")
    flags = folder(draw_images(root / "images", ("cat", "dog", "eel"), train=12))
    flags += [*RECIPE, "--run.test=false"]
    return flags, fork_fit(root, *flags)


@pytest.mark.parametrize("variant", ["ddp_fork", slow("resumed"), "decoded"])
def test_every_variant_crops_and_augments_alike(alone, variant, tmp_path):
    flags, expected = alone
    flags = [*flags]
    tolerance = 1e-12
    if variant == "ddp_fork":
        flags += on_cpu(variant)
        tolerance = 1e-5
    elif variant == "decoded":
        flags += ["--data.cache=off", "--data.num_workers=0"]
    else:
        fork_fit(tmp_path, *flags, "--trainer.max_steps=7")
        flags += ["--ckpt_path=last"]
    assert_same(fork_fit(tmp_path, *flags), expected, tolerance)


WRONG = [
    (options(size=0), "--data.size (0, 0): give at least 1 pixel"),
    (options(size=16, resize=12), "--data.resize 12 is smaller than --data.size 16"),
    (options(scale="[0.5,1]"), "--data.scale works with --data.crop random_resized only"),
    (options(crop="random_resized", placement="memory"), "--data.crop runs in worker processes"),
    (
        options(augment="RandAugmnt"),
        "--data.augment RandAugmnt: there is no such class: did you mean RandAugment?",
    ),
    (options(augment="[RandAugment,RandomCrop]"), "--data.augment"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_conflicting_flags_are_refused(flags, message, app, image_root):
    assert message in app.error("fit", *folder(image_root), *flags)


def test_augmentations_by_name(image_root, fit, tmp_path):
    erasing = {"class_path": "RandomErasing", "init_args": {"p": 1.0, "value": 7}}
    settings = {"augment": ["TrivialAugmentWide", erasing, "user_code.Inverted"]}
    config = tmp_path / "augment.yaml"
    config.write_text(
        yaml.safe_dump({"data": {"class_path": "ImageFolder", "init_args": settings}})
    )
    flags = [f"--config={config}", f"--data.root={image_root}", "--model=CIFARCNN", *QUIET]
    flags += options(max_epochs=1, num_workers=0, test=False)
    saved = (fit(*flags) / "config.yaml").read_text()
    for name in ("v2.TrivialAugmentWide", "v2.RandomErasing", "user_code.Inverted"):
        assert name in saved
    fit(*flags, "--data.augment=ColorJitter", "--data.augment.brightness=0.4")
