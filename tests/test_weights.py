"""Pretrained weights: where they are found, and what does not fit."""

import os
import re
import shutil
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torchvision
import yaml
from harness import bit_flipped, draw_images, last_of, options, tiny, weights
from safetensors.torch import save_file
from torch import nn
from torch.testing import assert_close

from app.errors import UserError
from app.modules.networks import make_network
from app.modules.weights import image_settings, load_weights, read_weights


def test_weights_of_a_run_with_another_number_of_classes(app, fit, tmp_path):
    folder = draw_images(tmp_path / "images", ("cat", "dog"), train=12)
    flags = ["--data=ImageFolder", f"--data.root={folder}", "--model=resnet18_cifar"]
    flags += options(max_epochs=1, test=False, accelerator="cpu")
    first = fit(*flags, *options(size=12, resize=16, mean=[0.4, 0.5, 0.6], name="first"))
    draw_images(folder, ("eel",), train=12)
    tuned = ["--model.weights", last_of(first), "--model.freeze=backbone", "--run.name=second"]
    assert (
        "120 tensors loaded from state_dict.network, fc starts anew for another number of classes"
        in app("fit", *flags, *tuned)
    )
    second = tmp_path / "runs/second/version_0"
    data = yaml.safe_load((second / "config.yaml").read_text())["data"]["init_args"]
    assert (data["size"], data["resize"], data["mean"]) == ([12, 12], 16, [0.4, 0.5, 0.6])
    before = weights(first)
    after = weights(second)
    changed = {name for name in before if before[name].shape != after[name].shape}
    assert changed == {"network.fc.weight", "network.fc.bias"}
    # the statistics of a frozen BatchNorm do not change, either
    assert all(torch.equal(before[name], after[name]) for name in before if ".fc." not in name)


SQUEEZENET = torchvision.models.squeezenet1_1().state_dict()
ZEROS = {name: torch.zeros_like(value) for name, value in SQUEEZENET.items()}


def prefixed(prefix):
    return {prefix + name: value for name, value in SQUEEZENET.items()}


def loaded(network, content, folder):
    """Load a file of weights into a network, and return the line about it."""
    torch.save(content, folder / "x.pth")
    return load_weights(network, read_weights(str(folder / "x.pth"), ""), "x.pth")[0]


CONTAINERS = {
    "": SQUEEZENET,
    " from model_state_dict": {"epoch": 3, "model_state_dict": SQUEEZENET},
    " from module.model.backbone": prefixed("module._orig_mod.model.backbone."),
    " from state_dict_ema": {"state_dict": ZEROS, "state_dict_ema": SQUEEZENET},
    " from model.encoder_q": {
        "epoch": torch.tensor(3),
        "model": {"encoder_q": SQUEEZENET, "encoder_k": ZEROS},
    },
    " from model": {"model": SQUEEZENET, "args": Namespace(lr=1), "images": torch.zeros(3)},
}


@pytest.mark.parametrize("origin", CONTAINERS)
def test_weights_are_found_under_any_prefix(origin, tmp_path):
    """Weights are found in any container and under any prefix; one line names the chosen set."""
    network = make_network("squeezenet1_1", 4)
    assert loaded(network, CONTAINERS[origin], tmp_path) == (
        f"Weights of x.pth: 50 tensors loaded{origin}, "
        "classifier.1 starts anew for another number of classes"
    )
    assert image_settings(str(tmp_path / "x.pth"), None) == {}
    first = network.features[0].weight.data
    assert_close(first, SQUEEZENET["features.0.weight"], rtol=0.01, atol=0)


def test_weights_of_safetensors(tmp_path):
    save_file(prefixed("model."), tmp_path / "x.safetensors")
    state = read_weights(f"{tmp_path}/x.safetensors", "")
    line = load_weights(make_network("squeezenet1_1", 1000), state, "x")[0]
    assert line == "Weights of x: 52 tensors loaded from model"


def test_weights_without_counters_and_head(tmp_path):
    """Weights load without BatchNorm's counters, with floats in averages, and without a head.

    Old versions of torch have no counters, averages have floats, and a backbone has no head.
    """
    network = make_network("resnet18", 10)
    backbone = {k: v.float() for k, v in network.state_dict().items() if "fc" not in k}
    line = "Weights of x.pth: {} tensors loaded, fc starts anew"
    assert loaded(network, backbone, tmp_path) == line.format(120)
    old = {k: v for k, v in backbone.items() if "num_batches" not in k}
    assert loaded(network, old, tmp_path) == line.format(100)


BIAS = SQUEEZENET["features.0.bias"]
HERE = "here floating-point: convert it, and save it anew"
UNFIT = {  # other biases of the first layer, by the reason why they do not fit
    "1 of 52 tensors differ: features.0.bias is (5,), here (64,)": BIAS[:5],
    f"features.0.bias is complex, {HERE}": BIAS + 1j,
    f"features.0.bias is integer, {HERE}": BIAS.byte(),
    f"features.0.bias is sparse, {HERE}": BIAS.to_sparse(),
    f"features.0.bias is without values (meta), {HERE}": BIAS.to("meta"),
    f"features.0.bias is quantized, {HERE}": torch.quantize_per_tensor(BIAS, 0.1, 0, torch.qint8),
}
UNFIT = {problem: SQUEEZENET | {"features.0.bias": bias} for problem, bias in UNFIT.items()}
UNFIT |= {
    "6 of 52 tensors differ: features.7.squeeze.weight": {
        k: v for k, v in SQUEEZENET.items() if "7" not in k
    },
    "it holds no tensors, where the network has features.0.weight": {},
    "SqueezeNet: a, b, c, where the network has ": dict.fromkeys("abcd", BIAS),
}


@pytest.mark.parametrize("problem", UNFIT)
def test_weights_that_do_not_fit(problem, tmp_path):
    """Weights lost by another kind, shape or name are rejected; the message names the first."""
    with pytest.raises(UserError, match=rf"^--model.weights x.pth.*{re.escape(problem)}"):
        loaded(make_network("squeezenet1_1", 10), UNFIT[problem], tmp_path)


def test_files_without_weights_are_rejected(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "program.pth")
    torch.save(SQUEEZENET, tmp_path / "good.pth")
    bit_flipped(shutil.copy(tmp_path / "good.pth", tmp_path / "flipped.pth"))
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, problem in {
        "model.pth": "it holds torch.nn.modules.linear.Linear, but only tensors and plain values",
        "program.pth": "it holds a TorchScript program, but only tensors",
        "flipped.pth": "damaged (good/data/",
        "pipe.safetensors": "not a file",
        "none.safetensors": "there is no such file",
        "god.pth": f"there is no such file: did you mean {tmp_path}/good.pth?",
    }.items():
        with pytest.raises(UserError, match=rf"^--model.weights {tmp_path}.*{re.escape(problem)}"):
            read_weights(str(tmp_path / name), "")


def test_published_weights(app, tmp_path, monkeypatch):
    """Without a connection, the error names the file to download and the folder to put it into."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", Mock(side_effect=OSError("refused")))
    flags = tiny(40, model="squeezenet1_1", max_epochs=1, test=False, accelerator="cpu")
    flags += ["--model.weights=DEFAULT"]
    message = app.error("fit", *flags)
    match = re.fullmatch(
        r".*: no weights of squeezenet1_1 \(.*refused\): put https://\S+/(\S+) into (\S+)", message
    )
    assert match
    torch.save(SQUEEZENET, Path(match[2], match[1]))
    out = app("fit", *flags)
    assert "Weights of DEFAULT: 50 tensors loaded, classifier.1 starts anew" in out


def test_weights_of_timm_go_by_its_names(monkeypatch):
    timm = Mock()
    monkeypatch.setattr("app.modules.weights.import_timm", lambda _: timm)
    read_weights("DEFAULT", "timm/resnet18")
    timm.create_model.assert_called_once_with("resnet18", pretrained=True)


def test_images_of_published_weights():
    """Image settings of published weights, such as mean and size, are known without a download."""
    known = image_settings("DEFAULT", "resnet50")
    assert known == {
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear", "size": 224,
        "resize": 232,
    }  # fmt: skip
    assert image_settings("DEFAULT", "googlenet")["mean"] == [0.5] * 3
    assert image_settings("DEFAULT", "timm/resnet18")["size"] == 224
