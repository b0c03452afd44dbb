"""Contenders of `speed.py`: hand-written loops and pipelines, and this application beside them.

`python contenders.py NAME` measures the contender NAME, and prints its figures as one line of JSON.
"""

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from input_pipelines import (
    crops_ours,
    crops_torchvision,
    feed_ours,
    feed_torchvision,
    shuffled,
    synthetic,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

__all__ = ["crops_ours", "crops_torchvision", "feed_ours", "feed_torchvision"]

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))
FIT = "fit --trainer.accelerator cpu --run.test false --run.wandb false"
QUIET = "--trainer.enable_progress_bar false --trainer.enable_model_summary false"
UNTOUCHED = "--trainer.limit_val_batches 0 --trainer.enable_checkpointing false"
SGD = partial(torch.optim.SGD, lr=0.001, momentum=0.9)


class Clock(Callback):
    """Callback that times the epochs after the first, without validation, and writes `$CLOCK`."""

    def __init__(self) -> None:
        self.began = (0.0, 0.0)
        self.cpu = 0.0
        self.steps = 0.0
        self.epochs: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.began = time.process_time(), time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, before the checkpoint is written."""
        if trainer.current_epoch:
            self.cpu += time.process_time() - self.began[0]
            self.epochs.append(time.perf_counter() - self.began[1])
            self.steps += trainer.num_training_batches

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the figures."""
        if trainer.is_global_zero and self.steps:
            Path(os.environ["CLOCK"]).write_text(json.dumps(self.figures()))

    def figures(self) -> dict[str, float]:
        """Return the figures of all measured epochs."""
        return figures(self.cpu, self.epochs, self.steps)


def figures(cpu: float, epochs: list[float], steps: int) -> dict[str, float]:
    """Return figures from CPU seconds, each epoch's seconds, and the number of steps."""
    return {
        "cpu_us_per_step": 1e6 * cpu / steps,
        "ms_per_step": 1e3 * sum(epochs) / steps,
        "epoch_s": statistics.median(epochs),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def cost_of(command: list[str], **settings: Any) -> dict[str, float]:
    """Run a command, and return its CPU seconds and its duration."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr, **settings)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu, "seconds": seconds}


def ours(flags: str, clock: bool = True) -> Callable[[], dict[str, float]]:
    """Return a contender that measures `python -m app fit` with these flags."""

    def contender() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "CLOCK": f"{folder}/clock.json", "WANDB_MODE": "disabled"}
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
            words = f"{FIT} {flags} --run.root {folder}".split()
            command = [sys.executable, "-m", "app", *words]
            if not clock:
                return cost_of(command, env=environment)
            cost = cost_of([*command, "--trainer.callbacks+=contenders.Clock"], env=environment)
            return cost | json.loads(Path(environment["CLOCK"]).read_text())

    contender.__doc__ = f"`fit {' '.join(flags.split())}`"
    return contender


def loop(
    network: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]],
    epochs: int,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> dict[str, float]:
    """Measure a hand-written training loop."""
    walls = []
    cpus = []
    for _ in range(epochs):
        wall = time.perf_counter()
        cpu = time.process_time()
        steps = 0
        for images, labels in batches():
            optimizer.zero_grad()
            loss(network(images), labels).backward()
            optimizer.step()
            steps += 1
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return figures(sum(cpus[1:]), walls[1:], (epochs - 1) * steps)


TINY = """
--model FashionMLP --model.repeats 1 --model.hidden [4] --data Synthetic --data.like FashionMNIST
--data.images 8100 --data.val_size 100 --data.batch_size 16 --trainer.max_epochs 4
"""


def _tiny() -> tuple[nn.Module, Tensor, Tensor]:
    images, labels = synthetic("FashionMNIST", 8000)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.ReLU(), nn.Linear(4, 10))
    return network, images.float() / 255, labels


def overhead_raw() -> dict[str, float]:
    """A hand-written loop over resident images."""
    network, images, labels = _tiny()
    return loop(network, torch.optim.Adam(network.parameters()), shuffled(images, labels, 16), 4)


def _stock(**settings: Any) -> dict[str, float]:
    network, images, labels = _tiny()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return shuffled(images, labels, 16)()

        def __len__(self) -> int:
            return 500

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CLOCK"] = f"{folder}/clock.json"
        with contextlib.redirect_stdout(sys.stderr):
            trainer = Trainer(
                max_epochs=4,
                accelerator="cpu",
                callbacks=[clock],
                default_root_dir=folder,
                **settings,
            )
            trainer.fit(Module(), Batches())
    return clock.figures()


def overhead_stock() -> dict[str, float]:
    """Lightning's Trainer with its progress bar, CSV file and checkpoints."""
    from lightning.pytorch.loggers import CSVLogger

    return _stock(logger=CSVLogger(tempfile.mkdtemp()))


def overhead_stock_quiet() -> dict[str, float]:
    """Lightning's Trainer without logger, progress bar and checkpoints."""
    return _stock(
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


overhead_ours = ours(TINY)
overhead_ours_fast = ours(f"--config configs/fast.yaml {TINY}")


LENET = f"""
--model CIFARCNN --data Synthetic --data.images 50000 --data.val_size 0 --data.batch_size 64
--trainer.max_epochs 3 {UNTOUCHED}
"""


def lenet_raw() -> dict[str, float]:
    """A hand-written loop over resident images in channels_last, with pooling before ReLU."""
    images, labels = synthetic("CIFAR10", 50_000)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # fmt: skip
    resident = (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
    return loop(network, SGD(network.parameters(), fused=True), shuffled(resident, labels, 64), 3)


class _Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        from torchvision import transforms

        images, labels = synthetic("CIFAR10", 50_000)
        self.images = images.permute(0, 2, 3, 1).numpy()
        self.labels = labels.tolist()
        self.transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def lenet_loader() -> dict[str, float]:
    """The usual loop: PIL images, torchvision's transforms, a DataLoader with two workers."""
    from app.modules.networks import LeNet

    network = LeNet()
    loader = torch.utils.data.DataLoader(_Pictures(), batch_size=64, shuffle=True, num_workers=2)
    return loop(network, SGD(network.parameters()), loader.__iter__, 2)


lenet_ours = ours(LENET)


def start_import() -> dict[str, float]:
    """`python -c "import lightning"`."""
    return cost_of([sys.executable, "-c", "import lightning"])


start_ours = ours("--data Synthetic --data.images 640 --trainer.max_steps 1", clock=False)
start_quickstart = ours("--config configs/quickstart.yaml --run.test true", clock=False)


def start_verify() -> dict[str, float]:
    """`verify --data Synthetic`: one device and all variants."""
    with tempfile.TemporaryDirectory() as folder:
        verify = [sys.executable, "-m", "app", "verify", "--data", "Synthetic", "--root", folder]
        environment = dict(os.environ)
        environment.pop("OMP_NUM_THREADS", None)
        return cost_of(verify, env=environment)


DDP = f"""
--model CIFARCNN --data Synthetic --data.images 12800 --data.val_size 0 --data.batch_size 64
--trainer.max_epochs 3 {UNTOUCHED} {QUIET}
"""


def _ddp_rank(rank: int, store: str, figures: str) -> None:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from app.modules.networks import LeNet

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    images, labels = synthetic("CIFAR10", 12_800)
    share = (images.float() / 127.5 - 1)[rank::2]
    network = DistributedDataParallel(LeNet())
    batches = shuffled(share, labels[rank::2], 32)
    measured = loop(network, SGD(network.parameters()), batches, 3)
    if rank == 0:
        Path(figures).write_text(json.dumps(measured))
    distributed.destroy_process_group()


def ddp_raw() -> dict[str, float]:
    """A hand-written loop with DistributedDataParallel, two processes, gloo."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/figures.json"
        torch.multiprocessing.spawn(_ddp_rank, (f"{folder}/store", place), nprocs=2)
        return json.loads(Path(place).read_text())


TWO = "--trainer.strategy ddp --trainer.devices 2"
ddp_ours = ours(f"{DDP} {TWO}")


SHARDED = f"""
--model CIFARCNN --model.network resnet18_cifar --data Synthetic --data.images 512
--data.val_size 0 --data.batch_size 128 --trainer.max_epochs 2 {UNTOUCHED} {QUIET}
"""
shards_plain = ours(f"{SHARDED} {TWO}")
shards_ours = ours(f"{SHARDED} {TWO} --run.virtual_devices 8")
one_plain = ours(SHARDED)
one_ours = ours(f"{SHARDED} --run.virtual_devices 1")


class Halved(Callback):
    """Callback that halves the second rank's speed: it is stopped for 20 ms of every 40 ms."""

    PROGRAM = """
import os, signal, sys, time
while True:
    for name in ("SIGSTOP", "SIGCONT"):
        os.kill(int(sys.argv[1]), getattr(signal, name))
        time.sleep(0.02)
"""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the program that stops and continues the rank; it ends with the rank."""
        if trainer.global_rank == 1:
            subprocess.Popen(
                [sys.executable, "-c", self.PROGRAM, str(os.getpid())], stderr=subprocess.DEVNULL
            )


# `Halved` leaves the second rank half of its core
UNEQUAL = f"""
{SHARDED} {TWO} --run.virtual_devices 16 --trainer.max_epochs 4
--trainer.callbacks+=contenders.Halved
"""
balance_equal = ours(UNEQUAL)
balance_ours = ours(f"{UNEQUAL} --run.balance true")

WIDE = f"""
--model FashionMLP --model.hidden [256] --data Synthetic --data.like FashionMNIST
--data.images 60000 --data.val_size 0 --data.batch_size=0.25 --trainer.max_epochs 3 {UNTOUCHED}
{QUIET} --model.repeats
"""
mlp24_ours = ours(f"{WIDE} 24")
mlp64_ours = ours(f"{WIDE} 64")


def mlp24_raw() -> dict[str, float]:
    """A hand-written loop over stored images, each repeated 24 times."""
    from app.modules import smooth_l1
    from app.modules.networks import MLP

    images, labels = synthetic("FashionMNIST", 60_000)
    network = MLP(1, [256], 10)
    network.layers[0] = nn.Linear(784 * 24, network.layers[0].out_features)
    stored = (images.float() / 256).flatten(1).repeat(1, 24)
    return loop(
        network.layers, torch.optim.Adam(network.parameters()), shuffled(stored, labels, 15_000), 3,
        lambda scores, target: smooth_l1(scores, target).mean(),
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
