"""Tiny data in the real formats, and the real command."""

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
import yaml
from cluster.hosts import Network, awaited, network
from cluster.slurm import Slurm, cluster
from PIL import Image

from app.cli import main

ROOT = Path(__file__).parent.parent
QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread for each process, no tracker, and nothing left over from another test."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    for name in (
        "APP_DEBUG",
        "PL_GLOBAL_SEED",
        "LOCAL_RANK",
        "RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["app"])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # pytest in the background of a script: children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)


@pytest.fixture
def app(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run `python -m app …` in this process, with runs under tmp_path: exit code and what it printed."""

    def run(*args: str | Path) -> tuple[int, str]:
        capfd.readouterr()
        words = [str(word) for word in args]
        root = "--root" if words[0] in ("compare", "plan") else "--run.root"
        if len(words) > 1 and words[0] != "doctor" and root not in words:
            words[1:1] = [root, str(tmp_path / "runs")]
        try:
            code = main(words)
        except SystemExit as end:  # argparse ends --help and --print_config this way
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out + err

    return run


def start_app(*args: str | Path, timeout: int = 240, env: dict[str, str | None] | None = None) -> tuple[int, str]:
    """Run `python -m app …` as a process of its own; its whole group is ended when time is up.

    Returns:
        Exit code, and what it printed.
    """
    variables: dict[str, str | None] = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **(env or {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "app", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={key: value for key, value in variables.items() if value is not None},
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, 9)
        process.communicate()
        raise
    return process.returncode, out


def error_of(code: int, out: str) -> str:
    """The one line that says what was wrong."""
    assert code == 2, out
    assert "Traceback" not in out
    lines = [line for line in out.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, out
    assert out.strip().splitlines()[-1] == lines[0], "it is the last thing said"
    return lines[0]


def losses(run_dir: Path) -> np.ndarray:
    """Training loss of each window, from metrics.csv."""
    return pd.read_csv(run_dir / "metrics.csv")["train_loss_step"].dropna().to_numpy()


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint."""
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference between the weights of two models."""
    assert a.keys() == b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


@pytest.fixture
def cifar_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's own files, with 10 images in each batch; torchvision is told their checksums."""
    cls = torchvision.datasets.CIFAR10
    folder = tmp_path / "data" / cls.base_folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def write(name: str, content: dict[str, object]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, torchvision.datasets.utils.calculate_md5(str(folder / name))]

    def batch(name: str) -> list[str]:
        labels = list(range(10))
        return write(name, {"data": rng.integers(256, size=(10, 3072), dtype=np.uint8), "labels": labels})

    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    monkeypatch.setattr(cls, "train_list", [batch(f"data_batch_{i}") for i in range(1, 6)])
    monkeypatch.setattr(cls, "test_list", [batch("test_batch")])
    filename, md5 = write("batches.meta", {"label_names": names})
    monkeypatch.setattr(cls, "meta", {"filename": filename, "key": "label_names", "md5": md5})
    return tmp_path / "data"


@pytest.fixture
def fashion_root(tmp_path: Path) -> Path:
    """FashionMNIST's own IDX files, with 60 training and 20 test images."""
    folder = tmp_path / "data" / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 20)):
        images = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes()
        )
        labels = (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())
    return tmp_path / "data"


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """Class folders of JPEG and PNG files of different sizes, with a test split."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for label in ("cat", "dog", "eel"):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(256, size=(20 + i, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:02}.{'png' if i % 2 else 'jpg'}")
    return tmp_path / "images"


SHIPPED = sorted((ROOT / "configs" / "compare").glob("*.yaml"))
TINY = {
    "flags": {
        "trainer.accelerator": "cpu",
        "data": "Synthetic",
        "data.size": 240,
        "data.batch_size": 24,
        "trainer.log_every_n_steps": 2,
    },
    "max_epochs": 2,
    "repeats": 1,
    "time_limit": 60,
}


@pytest.fixture
def experiment(tmp_path: Path) -> Callable[..., Path]:
    """Write an experiment file: TINY with other settings."""

    def write(**settings: Any) -> Path:
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump({**TINY, **settings}, sort_keys=False))
        return path

    return write


def family(mark: str) -> set[int]:
    """The living processes whose environment holds the mark, whoever is their parent."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in (place / "environ").read_bytes() and state != "Z":
                found.add(int(place.name))
        except OSError:  # it has ended
            continue
    return found


class Running:
    """A run that was started, in a session of its own."""

    def __init__(self, root: Path, *flags: str | Path, launcher: Sequence[str], env: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.root = root
        command = [*(launcher or [sys.executable]), "-m", "app", "fit", "--run.root", *map(str, [root, *flags])]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, **env, "APP_TEST_MARK": self.mark},
        )  # fmt: skip

    @property
    def directory(self) -> Path:
        """The newest of this name."""
        found = sorted((self.root / "cifar_cnn").glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        return found[-1] if found else self.root

    @property
    def record(self) -> dict[str, Any]:
        path = self.directory / "run.json"
        return json.loads(path.read_text()) if path.exists() else {"epochs": []}

    def get(self, name: str, whom: str) -> None:
        """Send a signal to the first process (`main`) or to all in its group."""
        send = os.killpg if whom == "group" else os.kill
        send(self.process.pid, getattr(signal, name))

    def trained(self, epochs: int) -> None:
        """Wait until it has trained so many epochs, or has ended."""
        awaited(lambda: len(self.record["epochs"]) >= epochs or self.process.poll() is not None, 240)

    def end(self, seconds: float = 120) -> str:
        """What it printed; none of its processes is left a little later."""
        out, _ = self.process.communicate(timeout=seconds)
        awaited(lambda: not family(self.mark), 10)
        return out


@contextmanager
def started(
    root: Path, *flags: str | Path, launcher: Sequence[str] = (), env: dict[str, str] | None = None
) -> Iterator[Running]:
    """A run of `fit`, by `python` or by the launcher; none of its processes outlives the block."""
    run = Running(root, *flags, launcher=launcher, env=env or {})
    try:
        yield run
    finally:
        for pid in family(run.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.communicate()


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """Four nodes, for this test alone: they stand in a second."""
    with cluster() as found:
        yield found


@pytest.fixture
def hosts() -> Iterator[Network]:
    """Four hosts on a switch."""
    with network(4) as found:
        yield found
