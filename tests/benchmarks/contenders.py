"""Contenders of `speed.py`: hand-written loops and pipelines, and this application beside them.

`python contenders.py NAME` measures the contender NAME, and prints its figures as one line of JSON.
"""

import contextlib
import io
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

ROOT = Path(__file__).parents[2]
FIT = "fit --trainer.accelerator cpu --run.test false --run.wandb false"
QUIET = "--trainer.enable_progress_bar false --trainer.enable_model_summary false"
UNTOUCHED = "--trainer.limit_val_batches 0 --trainer.enable_checkpointing false"
SGD = partial(torch.optim.SGD, lr=0.001, momentum=0.9)


class Clock(Callback):
    """Clock of a training's epochs; as a callback, it writes the figures into the file `$CLOCK`."""

    def __init__(self):
        self.walls = []
        self.cpus = []

    def start(self, *_):
        """Start an epoch."""
        self.wall = time.perf_counter()
        self.cpu = time.process_time()

    def stop(self, *_):
        """End an epoch; as a callback, before the checkpoint is written."""
        self.walls.append(time.perf_counter() - self.wall)
        self.cpus.append(time.process_time() - self.cpu)

    def figures(self, steps):
        """Return the figures of all epochs but the first, of `steps` steps each."""
        measured = steps * (len(self.walls) - 1)
        return {
            "cpu_us_per_step": 1e6 * sum(self.cpus[1:]) / measured,
            "ms_per_step": 1e3 * sum(self.walls[1:]) / measured,
            "epoch_s": statistics.median(self.walls[1:]),
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }

    on_train_epoch_start = start
    on_train_epoch_end = stop

    def on_train_end(self, trainer, pl_module):
        """Write the figures."""
        if trainer.is_global_zero:
            figures = self.figures(int(trainer.num_training_batches))
            Path(os.environ["CLOCK"]).write_text(json.dumps(figures))


def cost_of(command, **settings):
    """Run a command, and return its CPU seconds and its duration."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr, **settings)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu, "seconds": seconds}


def ours(flags, clock=True):
    """Return a contender that measures `python -m app fit` with these flags."""

    def contender():
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


def synthetic(like, size):
    """Return the synthetic data set: images uint8 (n, C, H, W) and labels (n,)."""
    from app.data.synthetic import SyntheticSource

    split = SyntheticSource(like, size, 0).load("train")
    return split.tensor(0), split.labels


class Shuffled:
    """Batches of resident images, in a new order in each epoch."""

    def __init__(self, images, labels, batch):
        self.images, self.labels, self.batch = images, labels, batch

    def __iter__(self):
        for rows in torch.randperm(len(self.labels)).split(self.batch):
            yield self.images[rows], self.labels[rows]

    def __len__(self):
        return math.ceil(len(self.labels) / self.batch)


def loop(network, optimizer, batches, epochs):
    """Measure a hand-written training loop."""
    # Lightning sets it when it is imported, and it makes each optimizer step slower
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    clock = Clock()
    for _ in range(epochs):
        clock.start()
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
        clock.stop()
    return clock.figures(len(batches))


TINY = """
--model FashionMLP --model.repeats 1 --model.hidden [4] --data Synthetic --data.like FashionMNIST
--data.images 8100 --data.val_size 100 --data.batch_size 16 --trainer.max_epochs 4
"""


def _tiny():
    images, labels = synthetic("FashionMNIST", 8000)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.ReLU(), nn.Linear(4, 10))
    return network, Shuffled(images.float() / 255, labels, 16)


def overhead_raw():
    """A hand-written loop over resident images."""
    network, batches = _tiny()
    return loop(network, torch.optim.Adam(network.parameters()), batches, 4)


def overhead_stock():
    """Lightning's Trainer with its progress bar, CSV file and checkpoints."""
    network, batches = _tiny()

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.environ["CLOCK"] = f"{folder}/clock.json"
        logger = CSVLogger(folder)
        trainer = Trainer(max_epochs=4, accelerator="cpu", callbacks=[clock], logger=logger)
        trainer.fit(Module(), batches)
    return clock.figures(len(batches))


overhead_ours = ours(TINY)


LENET = f"""
--model CIFARCNN --data Synthetic --data.images 50000 --data.val_size 0 --data.batch_size 64
--trainer.max_epochs 3 {UNTOUCHED}
"""


def lenet_raw():
    """A hand-written loop over resident images in channels_last, with pooling before ReLU."""
    images, labels = synthetic("CIFAR10", 50_000)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    resident = (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
    return loop(network, SGD(network.parameters(), fused=True), Shuffled(resident, labels, 64), 3)


lenet_ours = ours(LENET)


def start_import():
    """`python -c "import lightning"`."""
    return cost_of([sys.executable, "-c", "import lightning"])


start_ours = ours("--data Synthetic --data.images 640 --trainer.max_steps 1", clock=False)
start_quickstart = ours("--config configs/quickstart.yaml --run.test true", clock=False)


DDP = f"""
--model CIFARCNN --data Synthetic --data.images 12800 --data.val_size 0 --data.batch_size 64
--trainer.max_epochs 3 {UNTOUCHED} {QUIET}
"""


def _ddp_rank(rank, folder):
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from app.modules.networks import LeNet

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    images, labels = synthetic("CIFAR10", 12_800)
    share = (images.float() / 127.5 - 1)[rank::2]
    network = DistributedDataParallel(LeNet())
    batches = Shuffled(share, labels[rank::2], 32)
    measured = loop(network, SGD(network.parameters()), batches, 3)
    Path(folder, f"{rank}.json").write_text(json.dumps(measured))
    distributed.destroy_process_group()


def ddp_raw():
    """A hand-written loop with DistributedDataParallel, two processes, gloo."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_ddp_rank, (folder,), nprocs=2)
        return json.loads(Path(folder, "0.json").read_text())


TWO = "--trainer.strategy ddp --trainer.devices 2"
ddp_ours = ours(f"{DDP} {TWO}")


SHARDED = f"""
--model CIFARCNN --model.network resnet18_cifar --data Synthetic --data.images 512
--data.val_size 0 --data.batch_size 128 --trainer.max_epochs 2 {UNTOUCHED} {QUIET}
"""


CROPS = v2.Compose(
    [
        v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,) * 3, (0.5,) * 3),
    ]
)  # fmt: skip


class Pictures(Dataset[tuple[Tensor, int]]):
    """Photos as most people load them: JPEG files of 480 × 360 pixels, cropped by torchvision."""

    def __init__(self):
        self.files = []
        for values in np.random.default_rng(0).integers(0, 256, (512, 9, 12, 3), dtype=np.uint8):
            file = io.BytesIO()
            Image.fromarray(values).resize((480, 360)).save(file, "JPEG")
            self.files.append(file)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return CROPS(Image.open(self.files[index]).convert("RGB")), index % 10


class OrdinaryData(LightningDataModule):
    """Ordinary data module, whose loader has two workers."""

    def train_dataloader(self):
        return DataLoader(
            Pictures(), batch_size=64, shuffle=True, num_workers=2, persistent_workers=True
        )


class OrdinaryModel(LightningModule):
    """Ordinary module with SGD. Its network is small, so that the workers limit the training."""

    def __init__(self):
        super().__init__()
        from app.modules.networks import LeNet

        self.network = nn.Sequential(nn.AvgPool2d(7), LeNet())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return SGD(self.parameters())


ORDINARY = f"--model contenders.OrdinaryModel --data contenders.OrdinaryData {QUIET} {UNTOUCHED}"
ORDINARY += " --trainer.max_epochs 6"
loader_lightning = ours(f"{ORDINARY} --run.loader lightning")
loader_exact = ours(ORDINARY)
shards_plain = ours(f"{SHARDED} {TWO}")
shards_ours = ours(f"{SHARDED} {TWO} --run.virtual_devices 8")
live = ours(f"{SHARDED} {TWO} --run.virtual_devices 8 --cluster.live true")
one_plain = ours(SHARDED)
one_ours = ours(f"{SHARDED} --run.virtual_devices 1")


PHOTOS = int(os.environ.get("PHOTOS", 2000))
WORKERS = 2
CROPPED = 64  # images of a batch


def _photos(folder):
    """Write JPEG files of 500 × 375 pixels and 55 kB, like photographs."""
    rng = np.random.default_rng(0)
    for number in range(PHOTOS):
        place = Path(folder, "train", f"class{number % 10}")
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(256, size=(24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        pixels = (smooth + rng.integers(-8, 9, size=smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg", quality=90)


def _read(begin):
    """Measure images/s of the first epoch, including set-up, and the median of nine later ones."""
    walls = []
    began = time.perf_counter()
    batches = begin()
    for _ in range(10):
        assert sum(len(images) for images, *_ in batches()) == PHOTOS
        walls.append(time.perf_counter() - began)
        began = time.perf_counter()
    return {
        "first_epoch_images_per_s": PHOTOS / walls[0],
        "images_per_s": PHOTOS / statistics.median(walls[1:]),
    }


def crops_torchvision():
    """ImageFolder, transforms and DataLoader of torchvision's reference training, two workers."""
    from torchvision.datasets import ImageFolder

    with tempfile.TemporaryDirectory() as folder:
        _photos(folder)

        def begin():
            images = ImageFolder(f"{folder}/train", CROPS)
            loader = torch.utils.data.DataLoader(
                images, CROPPED, num_workers=WORKERS, shuffle=True, persistent_workers=True
            )
            return loader.__iter__

        return _read(begin)


def crops_ours():
    """`--data ImageFolder --data.crop random_resized --data.flip true`: crops of mapped pixels."""
    from app.data import ImageFolder
    from app.system.program import set_up

    set_up()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        _photos(folder)
        trainer = Trainer(accelerator="cpu", barebones=True)

        def begin():
            data = ImageFolder(
                folder,
                size=224,
                resize=256,
                crop="random_resized",
                flip=True,
                val_size=0,
                batch_size=CROPPED,
                num_workers=WORKERS,
                cache=f"{folder}/cache",
            )
            data.trainer = trainer
            data.prepare_data("fit")
            data.setup("fit")
            loader = data.train_dataloader()
            return lambda: (data.on_after_batch_transfer(batch, 0) for batch in loader)

        return _read(begin)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
