"""`validate`, `test` and `predict` see every sample exactly once, for any world size.

`test_parity.py` checks `fit`.
"""

import csv
import shutil
from collections import Counter

import pytest
from forked import fork_app, fork_fit
from harness import on_cpu, record_of, slow, tiny
from PIL import Image
from test_data import folder

from app.data.synthetic import SHAPES
from app.modules import CIFARCNN

# 1,003 test images in batches of 64: 15 full ones and one of 43, which neither 2 nor 4 divides
DATA = tiny(5015, 64, val_size=1003)


def result(run):
    return record_of(run)["test"]


def best_of(run):
    return ["--ckpt_path", run / "checkpoints/best.ckpt"]


def confusion(run):
    return list(csv.reader((run / "confusion_matrix.csv").open()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    learn = ["--model.optimizer=Adam", "--model.optimizer.lr=0.002", "--trainer.max_epochs=1"]
    return fork_fit(tmp_path_factory.mktemp("trained"), *DATA, *learn, "--run.name=x")


@pytest.mark.parametrize(("strategy", "devices"), [("dp", 4), slow("ddp_fork", 2)])
def test_test(trained, strategy, devices, tmp_path):
    flags = [*on_cpu(strategy, devices, root=tmp_path, name="t"), *best_of(trained)]
    fork_app("test", *DATA, *flags)
    ours = result(tmp_path / "t/version_0")
    single = result(trained)
    assert ours["acc"] == single["acc"]
    assert ours["acc"] > 0.2, "a comparison of models that have learnt nothing says little"
    assert ours["loss"] == pytest.approx(single["loss"], abs=1e-6)
    assert confusion(tmp_path / "t/version_0") == confusion(trained)
    assert sum(int(n) for row in confusion(trained)[1:] for n in row[1:]) == 1003


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("dp", 4), slow("ddp_fork", 4)])
def test_predict(trained, strategy, devices, tmp_path):
    flags = [*on_cpu(strategy, devices, root=tmp_path, name="p"), *best_of(trained)]
    fork_app("predict", *DATA, *flags)
    rows = list(csv.DictReader((tmp_path / "p/version_0/predictions.csv").open()))
    assert list(rows[0]) == ["index", "predicted", "name", "probability", "label"]
    assert [int(row["index"]) for row in rows] == list(range(1003))
    for row in rows:
        assert row["name"] == SHAPES[int(row["predicted"])].__name__
        assert 0.1 <= float(row["probability"]) <= 1
    pairs = Counter((int(row["label"]), int(row["predicted"])) for row in rows)
    for label, row in enumerate(confusion(trained)[1:]):
        assert [pairs[label, predicted] for predicted in range(10)] == list(map(int, row[1:]))


def test_validate_equals_the_validation_of_fit(trained, app, tmp_path):
    flags = ["--config", trained / "config.yaml", *best_of(trained)]
    app("validate", *flags, *on_cpu("dp", 3, root=tmp_path, name="v"))
    metrics = list(csv.DictReader((tmp_path / "v/version_0/metrics.csv").open()))[-1]
    epoch = record_of(trained)["epochs"][-1]
    assert float(metrics["val_acc"]) == epoch["val_acc"]
    assert float(metrics["val_loss"]) == pytest.approx(epoch["val_loss"], abs=1e-6)


@pytest.mark.parametrize("by", ["path", "name"])
def test_a_checkpoint_brings_its_config(by, trained, app):
    """Without flags for model and data, a test uses those of the checkpoint's run."""
    flags = {"path": best_of(trained), "name": ["--ckpt_path=best", "--run.name=x"]}[by]
    app("test", *flags, "--run.root", trained.parents[1])
    tests = sorted(trained.glob("test_*"), key=lambda run: run.stat().st_mtime)
    assert result(tests[-1]) == result(trained)
    assert "class_path: app.data.Synthetic" in (tests[-1] / "config.yaml").read_text()


def test_images_that_lack_a_class_are_tested_by_name(image_root, app, fit):
    """Without a class's images, the confusions of the other classes are those of the whole test."""
    flags = folder(image_root)
    run = fit(*flags, "--trainer.max_epochs=2", "--model.optimizer.lr=0.1")
    for split in ("train", "test"):
        shutil.rmtree(image_root / split / "cat")
    app("test", *flags, "--ckpt_path=best")
    whole = confusion(run)
    assert confusion(run / "test_1") == [whole[0], ["cat", "0", "0", "0"], *whole[2:]]


def test_a_checkpoint_can_be_used_alone(trained, app, tmp_path):
    """A checkpoint holds class names, image size and normalisation.

    Images of other classes are refused.
    """
    checkpoint = tmp_path / "alone.ckpt"
    shutil.copy(trained / "checkpoints/best.ckpt", checkpoint)
    model = CIFARCNN.load_from_checkpoint(checkpoint, map_location="cpu")
    names = [shape.__name__ for shape in SHAPES]
    assert model.images == {
        "class_names": names,
        "image_shape": [3, 32, 32],
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    for name in [*names[1:], "zebra"]:
        (tmp_path / "test" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "test" / name / "0.png")
    shutil.copytree(tmp_path / "test", tmp_path / "train")
    message = app.error("test", *folder(tmp_path), f"--ckpt_path={checkpoint}")
    problem = "was trained on other classes (circle, zebra) than --data has: give images"
    assert f"{checkpoint} {problem}" in message
