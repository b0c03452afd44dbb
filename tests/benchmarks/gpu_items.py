"""Measurements of `gpu_day.py`, one function per item: `python gpu_items.py ITEM FIGURES.json`.

An item writes each figure as soon as it is known. Rates are samples/s, medians over logging
windows.
"""

import os
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torchvision
from harness import QUIET, ROOT, difference, free_port, losses, options, record_of, tiny
from lightning import Callback, Trainer
from torch import nn

from app.cli import main
from app.data import Synthetic
from app.modules import CIFARCNN
from app.modules.networks import LeNet
from app.system.files import write_json
from app.system.machine import hardware, time_when_done
from app.system.machine import versions as installed
from app.training import DataParallelStrategy

CPU = os.environ.get("GPU_DAY_DEVICE") == "cpu"  # set by a test of the items, with small sizes
DEVICE = torch.device("cpu" if CPU else "cuda")
SIZE = 640 if CPU else 25_600
FIGURES = Path(sys.argv[2] if len(sys.argv) > 2 else "figures.json")
PLACE = Path(tempfile.mkdtemp(prefix="gpu_day-"))
ON = options(accelerator=DEVICE.type, wandb=False)
DATA = tiny(SIZE, 64, val_size=128)
SPEED = options(
    test=False, max_epochs=3, log_every_n_steps=20, limit_val_batches=1, warmup_epochs=1
)
SGD = ["--model.optimizer=SGD", "--model.optimizer.lr=0.001", "--model.optimizer.momentum=0.9"]
BF16 = ["--trainer.precision=bf16-mixed"]
FLOAT16 = ["--trainer.precision=16-mixed"]
TF32 = ["--model.matmul_precision=high"]
COMPILED = ["--model.compile=default"]
REDUCED = ["--model.compile=reduce-overhead"]
_figures = {}
_lock = threading.Lock()


def note(name, value):
    """Add a figure to the file of figures, which is whole at any time."""
    with _lock:
        _figures[name] = float(f"{value:.4g}") if isinstance(value, float) else value
        write_json(FIGURES, _figures)


def start(*args, env=None):
    """Run `python -m app …` in a separate process; return exit code and output."""
    command = [sys.executable, "-m", "app", "--verbose", *map(str, args)]
    limit = 150 if CPU else 65
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **(env or {})},
            timeout=limit, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode(errors="replace")
        return 124, f"{out}\nnot done after {limit} s"
    return done.returncode, done.stdout


def fit(name, *flags, alone=False):
    """Train, and return the run's directory.

    Args:
        name: Name of the run.
        flags: Flags of `fit`.
        alone: Whether to train in a separate process, because the training may leave CUDA unusable.
    """
    torch.backends.cudnn.benchmark = False  # an earlier training may have set it
    words = ["fit", *options(root=PLACE, name=name), *QUIET, *ON, *map(str, flags)]
    if alone:
        code, out = start(*words)
        print(out)
    else:
        code = main(["--verbose", *words])
    if code:
        raise SystemExit(f"{name}: exit code {code}")
    return newest(name)


def newest(name):
    """Return the directory of the newest run of a name."""
    return max((PLACE / name).glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def rate(name, *flags, alone=False):
    """Train, and record the rate in samples/s, or an error."""
    try:
        record = record_of(fit(name.replace(" ", "_"), *flags, alone=alone))
        note(name, record["throughput"]["median"])
    except (Exception, SystemExit) as error:
        note(name, f"failed: {error!r}"[:200])
        traceback.print_exc()


def versions():
    """Record versions and hardware."""
    figures = installed() | hardware() | {"torchvision": torchvision.__version__}
    for name, value in figures.items():
        note(name, value)


def step():
    """Record the training rates with images on device and host, and of a hand-written loop."""
    for placement in ("memory",) if CPU else ("device", "memory"):
        rate(f"images in {placement}", *DATA, *SPEED, *SGD, "--data.placement", placement)
    network = LeNet().to(DEVICE)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9, fused=not CPU)
    table = torch.randint(256, (SIZE, 3, 32, 32), dtype=torch.uint8, device=DEVICE)
    labels = torch.randint(10, (SIZE,), device=DEVICE)
    for _ in range(2):  # the first epoch warms up
        began = time_when_done(DEVICE)
        for rows in torch.randperm(SIZE, device=DEVICE).split(64):
            optimizer.zero_grad()
            scores = network((table[rows].float() - 127.5) / 127.5)
            nn.functional.cross_entropy(scores, labels[rows]).backward()
            optimizer.step()
        seconds = time_when_done(DEVICE) - began
    note("raw", SIZE / seconds)


class Watch(Callback):
    """Callback that counts synchronizations by line of code in steps 60–90."""

    latest: "Watch"  # the newest one

    def __init__(self):
        Watch.latest = self
        self.waits = Counter()
        self._show = warnings.showwarning

    def on_train_batch_end(self, trainer, pl_module, *args):
        """Start and stop counting."""
        if trainer.global_step == 60 and not CPU:
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            torch.cuda.set_sync_debug_mode("warn")
        if trainer.global_step == 90 and not CPU:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self._show

    def _note(self, message, *args, **kwargs):
        if "synchroniz" in str(message).lower():
            frames = [f for f in traceback.extract_stack()[:-1] if "warnings.py" not in f.filename]
            ours = [f for f in frames if "/app/" in f.filename or "lightning" in f.filename]
            line = (ours or frames)[-1]
            self.waits[f"{Path(line.filename).name}:{line.lineno}"] += 1


def synchronisations():
    """Record where LeNet's steps at batch 64 wait for the device."""
    import gpu_items  # the module from which the flag takes the callback; this one is __main__

    flags = tiny(1000 if CPU else 10_000, 64, max_steps=95, test=False, limit_val_batches=0)
    flags += ["--trust=gpu_items", "--trainer.callbacks+=gpu_items.Watch"]
    cases = {"default": []}
    if not CPU:
        cases |= {"memory": ["--data.placement=memory"], "bf16": BF16, "16-mixed": FLOAT16}
    for name, more in cases.items():
        fit("watched", *flags, *more)
        note(f"{name}: waits in 30 steps", dict(gpu_items.Watch.latest.waits))


def of_resnet():
    """Return flags of resnet18_cifar at batch 512."""
    network = "lenet" if CPU else "resnet18_cifar"
    flags = ["--model=CIFARCNN", f"--model.network={network}", *DATA, *SPEED]
    return [*flags, *options(batch_size=512, drop_last=True, log_every_n_steps=10)]


def resnet():
    """Measure resnet18_cifar at batch 512 in four precisions.

    Then measure bf16 with one changed setting at a time.
    """
    flags = of_resnet()
    rate("float32", *flags)
    if CPU:
        return
    rate("bf16", *flags, *BF16)
    note("bf16: GiB", record_of(newest("bf16"))["peak_memory"][0])
    rate("TF32", *flags, *TF32)
    rate("16-mixed", *flags, *FLOAT16)
    rate("bf16, channels_last off", *flags, *BF16, "--model.channels_last=false")
    rate("bf16, benchmark", *flags, *BF16, "--trainer.benchmark=true")


def apart():
    """Measure compiled networks, and `ddp` on one device, each in a separate process."""
    ddp = options(strategy="ddp", devices=1)
    rate("LeNet, ddp", *DATA, *SPEED, *SGD, *ddp, alone=True)
    if not CPU:
        rate("LeNet, reduce-overhead", *DATA, *SPEED, *SGD, *REDUCED, alone=True)
        rate("resnet18_cifar, bf16, compile", *of_resnet(), *BF16, *COMPILED, alone=True)
        rate("LeNet, compile", *DATA, *SPEED, *SGD, *COMPILED, alone=True)


def gpu_tests():
    """Run the tests that need a GPU; on the CPU, only collect them."""
    # a bare machine lacks packages that other test files import
    tests = sorted(ROOT.glob("tests/test_*.py"))
    files = [str(file) for file in tests if "@on_gpu" in file.read_text()]
    limits = "--collect-only -n 0" if CPU else "-n 6 --timeout 60"
    flags = f"-m pytest -q -p no:cacheprovider -m gpu {limits}"
    command = [sys.executable, *flags.split(), *files]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


def dp():
    """Record the largest weight difference between two replicas and one.

    The last batch has a single image.
    """
    for precision in ("32-true", "bf16-mixed"):
        states = []
        for several in (False, True):
            torch.manual_seed(0)
            model = CIFARCNN()
            replicas = DataParallelStrategy([torch.device("cpu" if CPU else "cuda:0")] * 2)
            trainer = Trainer(
                accelerator=DEVICE.type, devices=1, strategy=replicas if several else "auto",
                max_epochs=1, precision=precision, barebones=True,
            )  # fmt: skip
            data = Synthetic(images=32 * 8 + 1 + 10, val_size=10, batch_size=32, seed=0)
            trainer.fit(model, datamodule=data)
            states.append({k: v.cpu().float() for k, v in model.state_dict().items()})
        note(precision, difference(*states))


def same_bits():
    """Compare ranks on one device with one process.

    Over virtual devices, the weights must have the same bits.

    One rank of `ddp` uses NCCL. Two or three ranks, each a "node", share the device and use gloo.
    """
    flags = tiny(331, 32, val_size=10, max_epochs=2, log_every_n_steps=1, threads=1, root=PLACE)
    flags += ON
    virtual = options(virtual_devices=3)
    plain, sharded = fit("auto", *flags), fit("auto-virtual", *flags, *virtual)
    ways = {"ddp-virtual": (1, "ddp"), "gloo-virtual": (2, "ddp")}
    if not CPU:
        ways |= {"gloo-virtual-3": (3, "ddp"), "gloo": (2, "ddp")}
        ways |= {"gloo-ring": (2, "ddp_ring"), "gloo-fp16": (2, "ddp_fp16")}

    def train(name):
        ranks, strategy = ways[name]
        way = [*flags, *options(name=name, strategy=strategy, devices=1)]
        expected = plain
        if "virtual" in name:
            way += virtual
            expected = sharded
        env = [{}]
        if ranks > 1:
            way += options(num_nodes=ranks)
            way += ["--trainer.strategy.process_group_backend=gloo"]
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            env = [{**address, "NODE_RANK": str(rank)} for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as pool:
            done = list(pool.map(lambda variables: start("fit", *way, env=variables), env))
        print(*(out for _, out in done), sep="\n----\n")
        note(f"{name}: exit codes", [code for code, _ in done])
        assert not any(code for code, _ in done), name
        run = newest(name)
        apart = float(abs(losses(run) - losses(expected)).max())
        note(f"{name}: largest difference of losses", apart)
        note(f"{name}: largest difference of weights", difference(run, expected))
        assert expected is plain or difference(run, expected) == 0, name

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(train, name) for name in ways]
    for job in jobs:
        job.result()


def commands():
    """Record a run's memory, by its record and by nvidia-smi.

    Record also the results of doctor, compare and verify.
    """
    memory = record_of(fit("memory", *DATA, *options(max_epochs=1, test=False)))["peak_memory"]
    note("recorded", {key: value for key, value in memory[0].items() if key.endswith("gib")})
    if not CPU:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
        note("nvidia-smi", subprocess.check_output(query, text=True).strip())

    def command(*words):
        code, out = start(*words)
        print(out)
        note(words[0], f"exit code {code}: {out.strip().splitlines()[-1][:200]}")

    jobs = [["doctor"]]
    if not CPU:
        small = options(images=64, batch_size=16, accelerator="cuda", max_epochs=1)
        jobs.append(["verify", "--data=Synthetic", *small])
        jobs.append(["compare", "--quick=true", "--root", PLACE])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda words: command(*words), jobs))


if __name__ == "__main__":
    sys.argv, item = sys.argv[:1], sys.argv[1]
    globals()[item]()
