"""Settings that the user left open: `fit --data PHOTOS` chooses network, sizes and recipe."""

from unittest.mock import Mock

import pytest
import torch
import yaml
from harness import SLOW, options

from app.command import defaults
from app.command.configuration import resolve
from app.lab.runs import fit
from app.modules.networks import make_network
from app.record import Record

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@pytest.fixture(autouse=True)
def published(monkeypatch):
    """Replace the function that reads or downloads weights, on a machine without a GPU."""
    read = Mock()
    monkeypatch.setattr(defaults, "read_weights", read)
    monkeypatch.setattr(defaults, "nvidia_smi", lambda field: [])
    return read


def chosen(*flags):
    """Return the settings of model and data, and those of the Trainer."""
    config = resolve(["fit", *map(str, flags)])
    return config.model.init_args, config.data.init_args, config.trainer


def test_a_folder_is_enough(image_root, published):
    model, data, trainer = chosen("--data", image_root)
    published.assert_called_with("DEFAULT", "resnet18")
    assert (model.network, model.weights, model.head) == ("resnet18", "DEFAULT", "auto")
    assert (data.root, data.size, data.resize) == (str(image_root), 224, 256)
    assert (data.mean, data.std, data.interpolation) == (*IMAGENET.values(), "bilinear")
    assert (data.crop, data.flip, data.batch_size) == ("random_resized", True, 32)
    assert (model.schedule, trainer.max_epochs) == ("onecycle", 5)
    assert trainer.precision is None


def test_weights_of_the_user_are_not_downloaded(image_root, published, monkeypatch):
    """`app.fit` asks for no published weights either while it looks up the names of flags."""
    monkeypatch.setattr("app.lab.runs.run_fit", Mock(return_value=Record()))
    weights = image_root / "weights.pth"
    torch.save(make_network("resnet18", 3).state_dict(), weights)
    fit(data=image_root, model="resnet18", lr=1e-5, **{"model.weights": weights})
    published.assert_not_called()


def test_frozen_networks_get_no_augmentation_and_images_in_memory_no_crop(image_root):
    frozen = chosen("--data", image_root, "--model.freeze", "backbone")[1]
    assert (frozen.size, frozen.crop, frozen.flip) == (224, "none", False)
    in_memory = chosen("--data", image_root, "--data.placement", "memory")[1]
    assert (in_memory.crop, in_memory.flip) == ("none", True)


def test_settings_of_the_user_remain(image_root):
    flags = "--data.size=64 --data.crop=random --model.optimizer=Adam --trainer.max_steps=9"
    flags += " --model.scheduler=torch.optim.lr_scheduler.ConstantLR --data.mean=[0,0,0]"
    model, data, trainer = chosen("--data", image_root, *flags.split())
    assert (data.size, data.resize, data.crop) == (64, 256, "random")
    assert (data.mean, data.std) == ([0, 0, 0], IMAGENET["std"])
    assert model.optimizer.class_path == "torch.optim.Adam"
    assert model.optimizer.init_args.lr == 0.001
    assert model.schedule is None
    assert (trainer.max_steps, trainer.max_epochs) == (9, 50)


def test_a_config_with_a_model_is_complete(image_root, tmp_path):
    config = tmp_path / "model.yaml"
    config.write_text(yaml.safe_dump({"model": {"class_path": "ImageClassifier"}}))
    model, data, trainer = chosen("--config", config, "--data", image_root)
    assert (model.weights, model.schedule, data.size, trainer.max_epochs) == (None, None, 32, 50)


def test_the_shipped_config_spells_out_the_defaults(image_root):
    for ours, spelt in zip(
        chosen("--data", image_root),
        chosen("--config", "configs/finetune.yaml", "--data.root", image_root),
        strict=True,
    ):
        assert ours == spelt


@pytest.mark.parametrize("network", ["resnet18", "timm/tf_efficientnet_lite0"])
def test_a_file_of_weights_brings_the_networks_sizes(network, image_root, tmp_path):
    torch.save({}, tmp_path / "x.pth")
    flags = ["--model", network, "--model.weights", tmp_path / "x.pth"]
    model, data, _ = chosen("--data", image_root, *flags)
    assert (data.size, data.resize, model.schedule) == (224, 256, "onecycle")
    is_timm = network.startswith("timm")
    assert data.interpolation == ("bicubic" if is_timm else "bilinear")
    assert data.mean == ([0.5] * 3 if is_timm else IMAGENET["mean"])


@pytest.mark.parametrize(
    ("capabilities", "precision"), [(["8.0", "9.0"], "bf16-mixed"), (["9.0", "7.5"], "16-mixed")]
)
def test_precision_of_a_gpu(capabilities, precision, image_root, monkeypatch):
    monkeypatch.setattr(defaults, "nvidia_smi", lambda field: capabilities)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert chosen("--data", image_root)[2].precision == precision
    assert chosen("--data", image_root, "--trainer.accelerator=cpu")[2].precision is None


@SLOW
def test_from_scratch_without_a_connection(app, image_root, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", Mock(side_effect=OSError("refused")))
    monkeypatch.chdir(tmp_path)
    few = options(
        max_epochs=1, limit_train_batches=1, limit_val_batches=0, test=False, batch_size=2
    )
    out = app("fit", "--data", image_root, *few)
    file = tmp_path / "hub" / "checkpoints"
    line = next(line for line in out.splitlines() if line.startswith("Training from scratch"))
    assert line.startswith("Training from scratch, which takes longer and learns less. --model.wei")
    assert line.endswith(f"pytorch.org/models/resnet18-f37072fd.pth into {file}")
    assert "3 × 128 × 128 → 3 classes" in out
    torch.save(make_network("resnet18", 1000).state_dict(), file / "resnet18-f37072fd.pth")
    out = app("fit", "--data", image_root, *few)
    assert "Weights of DEFAULT: 120 tensors loaded, fc starts anew" in out
    assert "3 × 224 × 224 → 3 classes" in out
    assert "crop random_resized" in out


def test_a_csv_file_is_enough(image_root, tmp_path):
    table = tmp_path / "photos.csv"
    table.write_text(f"file,label\n{image_root}/train/cat/00.jpg,cat\n")
    config = resolve(["fit", "--data", str(table)])
    assert config.data.class_path == "app.data.ImageTable"
    assert config.data.init_args.csv == str(table)


def test_a_missing_folder(app, published):
    message = app.error("fit", "--data", "no/photos")
    assert message.startswith("error: --data.root no/photos: ")
    assert "has no folder no" in message
    published.assert_not_called()
