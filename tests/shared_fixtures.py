"""Fixtures: tiny data sets in real formats, the real command, a SLURM cluster, networked hosts."""

import atexit
import gc
import os
import pickle
import signal
import struct
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torchvision
import yaml
from cluster.hosts import network
from cluster.slurm import cluster
from forked import fork_run
from harness import TINY, App, draw_images, leave_undrawn, newest_run
from torch.utils import data

from app.cli import main

# otherwise garbage collection would scan all imported modules, which takes a fifth of the tests'
# time
gc.freeze()
atexit.register(gc.unfreeze)  # otherwise nanobind, on which triton is built, reports leaks
data._utils.MP_STATUS_CHECK_INTERVAL = (
    0.5  # seconds, by default 5, that a deleted loader waits for its workers
)


@pytest.fixture(autouse=True, scope="session")
def user_cache(tmp_path_factory):
    """Set the user's cache directory to a temporary one, also for started processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user_cache")))
        yield


@pytest.fixture
def drawn():
    """Draw pictures and reports; tests without this fixture leave them empty."""


@pytest.fixture(autouse=True, scope="module")
def environment_of_module():
    """Undo what runs of a module's fixtures change in the environment."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def environment():
    """Use one thread per process and no tracker, and undo what runs change in the environment."""
    with patch.dict(
        os.environ,
        OMP_NUM_THREADS="1",
        WANDB_MODE="disabled",
        # deterministic runs need it; set for every test, as cuBLAS reads it only once per process
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    ):
        yield


@pytest.fixture(autouse=True)
def process(environment, request, monkeypatch):
    """Draw no pictures, use one thread and an empty command line, and let SIGINT interrupt."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setenv("APP_TEST_UNDRAWN", "1")
        leave_undrawn(monkeypatch.setattr)
    monkeypatch.setattr(sys, "argv", ["app"])
    # a shell's background job ignores SIGINT, and child processes would inherit this
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)


@pytest.fixture
def forked_runs(monkeypatch):
    """Let the fork server run each `fit` that a command starts."""
    monkeypatch.setattr(
        "app.lab.runs.subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": fork_run})
    )


@pytest.fixture
def app(tmp_path, capfd, forked_runs):
    """Run `python -m app …` in this process, runs under tmp_path."""

    def run(*args):
        capfd.readouterr()
        words = [str(word) for word in args]
        root = "--root" if words[0] in ("compare", "verify") else "--run.root"
        if len(words) > 1 and words[0] not in ("doctor", "replay", "runs") and root not in words:
            words[1:1] = [root, str(tmp_path / "runs")]
        try:
            code = main(words)
        except SystemExit as end:  # argparse ends --help and --print_config this way
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out + err

    return App(run)


@pytest.fixture
def fit(app, tmp_path):
    """Run `fit` in this process, and return the run's directory."""

    def run(*flags):
        app("fit", *flags)
        return newest_run(tmp_path / "runs")

    return run


@pytest.fixture
def cifar_root(tmp_path, monkeypatch):
    """Write files in CIFAR-10's format, 10 images per batch, and patch torchvision's checksums."""
    cls = torchvision.datasets.CIFAR10
    folder = tmp_path / "data" / cls.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, torchvision.datasets.utils.calculate_md5(str(folder / name))]

    def batch(name):
        pixels = rng.integers(256, size=(10, 3072), dtype=np.uint8)
        return write(name, {"data": pixels, "labels": list(range(10))})

    names = [f"class {number}" for number in range(10)]
    monkeypatch.setattr(cls, "train_list", [batch(f"data_batch_{i}") for i in range(1, 6)])
    monkeypatch.setattr(cls, "test_list", [batch("test_batch")])
    filename, md5 = write("batches.meta", {"label_names": names})
    monkeypatch.setattr(cls, "meta", {"filename": filename, "key": "label_names", "md5": md5})
    return tmp_path / "data"


@pytest.fixture
def fashion_root(tmp_path):
    """Files in FashionMNIST's IDX format, with 60 training and 20 test images."""
    folder = tmp_path / "data/FashionMNIST/raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("t10k", 20)):
        images = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes()
        )
        labels = (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + labels.tobytes()
        )
    return tmp_path / "data"


@pytest.fixture
def image_root(tmp_path):
    """Class folders of JPEG and PNG files of different sizes, with a test split."""
    return draw_images(tmp_path / "images", ("cat", "dog", "eel"), train=12, test=4)


@pytest.fixture
def experiment(tmp_path):
    """Return a writer of experiment files with the settings of TINY, updated by its arguments."""

    def write(**settings):
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump({**TINY, **settings}, sort_keys=False))
        return path

    return write


@pytest.fixture
def slurm():
    """A SLURM cluster of four nodes for one test; it starts in a second."""
    with cluster() as running_cluster:
        yield running_cluster


@pytest.fixture
def hosts():
    """Four hosts, connected by a switch."""
    with network(4) as running_network:
        yield running_network


@pytest.fixture
def tally(record_property):
    """Return a function that adds a fault and its survival count to the table after the tests."""
    return record_property
