"""What `gpu_day.py` measures, a function for each item: `python gpu_items.py ITEM FIGURES.json`.

An item notes each figure as soon as it has it. Rates are samples/s, medians over logging windows.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning
import torch
import torchvision
from harness import QUIET, ROOT, difference, free_port, losses, options, record_of, tiny
from lightning.pytorch import Callback, LightningModule, Trainer
from packaging.version import Version
from torch import nn

from app.cli import main
from app.data import Synthetic
from app.modules import CIFARCNN
from app.networks import LeNet
from app.parallel import DataParallelStrategy
from app.system.machine import hardware
from app.system.machine import versions as installed

CPU = os.environ.get("GPU_DAY_DEVICE") == "cpu"  # to try the items out: everything is smaller
DEVICE = torch.device("cpu" if CPU else "cuda")
SIZE = 1280 if CPU else 25_600
FIGURES = Path(sys.argv[2] if len(sys.argv) > 2 else os.devnull)
PLACE = Path(tempfile.mkdtemp(prefix="gpu_day-"))
ON = options(accelerator=DEVICE.type, wandb=False)
DATA = tiny(SIZE, 64, val_size=128)
SPEED = options(test=False, max_epochs=3, log_every_n_steps=20, limit_val_batches=1, warmup_epochs=1)
_figures: dict[str, Any] = {}


def note(name: str, value: Any) -> None:
    """Keep a figure."""
    _figures[name] = float(f"{value:.4g}") if isinstance(value, float) else value
    FIGURES.write_text(json.dumps(_figures))


def start(*args: Any, env: dict[str, str] | None = None, timeout: float = 100) -> tuple[int, str]:
    """Run `python -m app …` in a process of its own, which ends with this one: exit code, and what it printed."""
    command = [sys.executable, "-m", "app", *map(str, args)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **(env or {})}, timeout=timeout, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return 124, f"{(error.stdout or b'').decode(errors='replace')}\nnot done after {timeout:.0f} s"
    return done.returncode, done.stdout


def fit(name: str, *flags: str | Path) -> Path:
    """A training in this process: its directory."""
    if code := main(["fit", *options(root=PLACE, name=name), *QUIET, *ON, *map(str, flags)]):
        raise SystemExit(f"{name}: exit code {code}")
    return newest(name)


def newest(name: str) -> Path:
    """The newest run of a name."""
    return max((PLACE / name).glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def rate(name: str, *flags: str | Path) -> None:
    """Train, and note samples/s; what cannot run is noted, and the next goes on."""
    try:
        found = record_of(fit(name.replace(" ", "_"), *flags))
    except (Exception, SystemExit) as error:
        note(name, f"failed: {str(error).splitlines()[0] if str(error) else error!r}")
        traceback.print_exc()
        return
    note(name, found["throughput"]["median"])


def versions() -> None:
    """What it runs on; lightning has to be 2.6.6 or later."""
    for name, value in {**installed(), "torchvision": torchvision.__version__, **hardware()}.items():
        note(name, value)
    assert Version(lightning.__version__) >= Version("2.6.6"), lightning.__version__


def cpu_beside_gpu() -> None:
    """A run on the CPU leaves the GPU alone; ddp_powersgd there is refused, and runs where the GPU is hidden."""
    small = tiny(320, 64, accelerator="cpu", max_epochs=1, wandb=False, root=PLACE)
    hook = ["--trainer.strategy", "ddp_powersgd", "--trainer.devices", "2"]
    for name, flags, env in (
        ("one CPU", [], {}),
        ("ddp_powersgd", hook, {}),
        ("ddp_powersgd, GPU hidden", hook, {"CUDA_VISIBLE_DEVICES": ""}),
    ):
        code, out = start("fit", *small, *flags, env=env, timeout=50)
        note(name, f"exit code {code}" + (f", {out.strip().splitlines()[-1]}" if code == 2 else ""))
        print(out)


def gpu_tests() -> None:
    """Tests that need a GPU."""
    pytest("-m", "gpu", "-n", "0", "--timeout", "100")


def pytest(*arguments: str, env: dict[str, str] | None = None) -> None:
    """Note what pytest said at its end, as it goes on."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "tests"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    failed = []
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith(("FAILED", "ERROR")):
            failed.append(line.split(" - ")[0].split("::")[-1].strip())
            note("failed", failed)
        if progress := re.search(r"\[ *(\d+)%\]", line):
            note("done", f"{progress[1]} %")
        if re.search(r"\d+ (passed|failed|skipped).* in ", line):
            note("result", line.strip("= \n"))
    assert process.wait() == 0


WATCHED = r"(cudaLaunchKernel|cudaGraphLaunch|cudaMemcpy|cuda\w*Synchronize|aten::item)"


class Watch(Callback):
    """Notes what makes the host wait in steps 60 to 90, and counts launches and copies in steps 100 to 130."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.counts: dict[str, float] = {}
        self._profile: Any = None
        self._show = warnings.showwarning

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Begin and end."""
        if trainer.global_step == 60 and not CPU:
            warnings.simplefilter("always")
            warnings.showwarning = self._note  # type: ignore[assignment]
            torch.cuda.set_sync_debug_mode("warn")
        if trainer.global_step == 90 and not CPU:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self._show
        if trainer.global_step == 100:
            kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (not CPU)
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()
        if trainer.global_step == 130:
            self._profile.stop()
            for event in self._profile.key_averages():
                if kind := re.match(WATCHED, event.key):
                    self.counts[kind[1]] = self.counts.get(kind[1], 0) + event.count / 30

    def _note(self, message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchroniz" in str(message).lower():
            frames = [f for f in traceback.extract_stack()[:-1] if "warnings.py" not in f.filename]
            own = [f for f in frames if "/app/" in f.filename or "lightning" in f.filename] or frames
            self.waits[f"{Path(own[-1].filename).name}:{own[-1].lineno}"] += 1


def synchronisations() -> None:
    """Per step: what makes the host wait, and from where; launches and copies."""
    import app.fit.command as command

    original = command.CLI.instantiate_trainer
    cases = [("32-true", ()), ("bf16-mixed", ()), ("16-mixed", ())]
    cases += [("32-true", ("--data.placement", "memory")), ("32-true", ("--trainer.enable_progress_bar", "true"))]
    for precision, more in cases:
        watch = Watch()

        def instantiate(self: Any, watch: Watch = watch, **kwargs: Any) -> Trainer:
            trainer = original(self, **kwargs)
            trainer.callbacks.append(watch)
            return trainer

        command.CLI.instantiate_trainer = instantiate  # type: ignore[method-assign]
        flags = options(precision=precision, max_steps=135, test=False, limit_val_batches=0)
        fit("watched", *tiny(10000, 64), *flags, *more)
        name = " ".join((precision, *(part.removeprefix("--") for part in more)))
        note(f"{name}: waits in 30 steps", dict(watch.waits))
        note(f"{name}: per step", {key: round(value, 2) for key, value in watch.counts.items()})
    command.CLI.instantiate_trainer = original  # type: ignore[method-assign]


def lenet() -> None:
    """LeNet at batch 64, one thing changed at a time."""
    slow = ["--data.placement", "memory", "--model.optimizer.fused", "false"]
    sgd = ["--model.optimizer", "SGD", "--model.optimizer.lr", "0.001", "--model.optimizer.momentum", "0.9"]
    flags = [*DATA, *SPEED, *sgd]
    rate("images on the host, not fused", *flags, *slow)
    rate("images on the device", *flags, *slow, "--data.placement", "device")
    rate("fused (the defaults)", *flags)
    rate("with the bar", *flags, "--trainer.enable_progress_bar", "true")
    rate("cuda_graph", *flags, "--model.cuda_graph", "true")
    rate("bf16-mixed", *flags, "--trainer.precision", "bf16-mixed")
    rate("channels_last", *flags, "--model.channels_last", "true")
    rate("compile", *flags, "--model.compile", "default")
    rate("compile reduce-overhead", *flags, "--model.compile", "reduce-overhead")
    best = max(value for value in _figures.values() if isinstance(value, float | int))
    note("seconds for 50 epochs of 50,000 at the best", 50 * 50_000 / best)


def raw(network: nn.Module, batch: int, how: str) -> float:
    """Samples/s of a hand-written loop over images on the device: eager, compiled, or as one CUDA graph."""
    torch.manual_seed(0)
    network = network.to(DEVICE)
    call = torch.compile(network, mode="reduce-overhead") if how == "reduce-overhead" else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9, fused=True)
    images = torch.randint(256, (50 * batch, 3, 32, 32), dtype=torch.uint8, device=DEVICE)
    labels = torch.randint(10, (50 * batch,), device=DEVICE)
    x, y = torch.empty((batch, 3, 32, 32), device=DEVICE), labels[:batch].clone()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(call(x), y).backward()
        optimizer.step()

    replay = step
    for _ in range(3):
        step()
    if how == "graph":
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            nn.functional.cross_entropy(call(x), y).backward()
            optimizer.step()
        replay = graph.replay
    rates = []
    for _ in range(1 if CPU else 5):
        order = torch.randperm(len(images)).to(DEVICE).split(batch)
        synchronize()
        began = time.perf_counter()
        for rows in order:
            x.copy_((images[rows].float() - 127.5) / 127.5)
            y.copy_(labels[rows])
            replay()
        synchronize()
        rates.append(len(images) / (time.perf_counter() - began))
    return sorted(rates)[len(rates) // 2]


def synchronize() -> None:
    """Wait for the device."""
    if not CPU:
        torch.cuda.synchronize()


def floor() -> None:
    """The same step without anything around it."""
    for how in ["eager"] if CPU else ["eager", "graph", "reduce-overhead"]:
        note(how, raw(LeNet(), 64, how))
    note("seconds for 50 epochs of 50,000 at the best", 50 * 50_000 / max(_figures.values()))


def dp() -> None:
    """Two replicas on one device against one: weights, statistics of BatchNorm, a last batch of 1."""
    states: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for network, precision in (("lenet", "32-true"), ("lenet", "bf16-mixed"), ("resnet18_cifar", "32-true")):
        for ways in ("one", "two"):
            torch.manual_seed(0)
            model = CIFARCNN(network=network)  # type: ignore[arg-type]
            several = DataParallelStrategy([torch.device("cpu" if CPU else "cuda:0")] * 2)
            last = {"lenet": 1, "resnet18_cifar": 4}[network]  # BatchNorm needs two images on each device
            trainer = Trainer(
                accelerator=DEVICE.type, devices=1, strategy=several if ways == "two" else "auto", max_epochs=1,
                precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, limit_train_batches=None if network == "lenet" else 3,
            )  # fmt: skip
            data = Synthetic(size=32 * 8 + last + 10, val_size=10, batch_size=32, seed=0)
            trainer.fit(model, datamodule=data)
            found = trainer.test(model, datamodule=data, verbose=False)[0]
            states[network + precision, ways] = {k: v.cpu().float() for k, v in model.state_dict().items()}
            note(f"{network} {precision} {ways}: test", {k: round(v, 5) for k, v in found.items()})
        pair = (states[network + precision, ways] for ways in ("one", "two"))
        note(f"{network} {precision}: largest difference of weights", difference(*pair))


def ddp_gloo() -> None:
    """Two "nodes" on one device, over gloo, against one process: losses; with an empty last share; hooks."""
    flags = [*tiny(331, 32, val_size=10, max_epochs=2, log_every_n_steps=1, root=PLACE), *ON]
    single = losses(fit("single", *flags))
    for strategy in ("ddp", "ddp_fp16", "ddp_localsgd"):
        way = ["--trainer.strategy", strategy, "--trainer.strategy.process_group_backend", "gloo"]
        way += ["--trainer.devices", "1", "--trainer.num_nodes", "2", "--run.name", strategy]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with ThreadPoolExecutor(2) as pool:
            nodes = [pool.submit(start, "fit", *flags, *way, env={**address, "NODE_RANK": n}) for n in ("0", "1")]
        for node in nodes:
            print(node.result()[1])
        codes = [node.result()[0] for node in nodes]
        note(f"{strategy}: exit codes", codes)
        if codes == [0, 0]:
            note(f"{strategy}: largest difference of losses", float(abs(losses(newest(strategy)) - single).max()))


def resume() -> None:
    """Stopped in mid-epoch and resumed: the largest difference of weights, which should be 0."""
    flags = tiny(503, 32, flip=True, test=False, max_epochs=2)
    flags += ["--model.optimizer", "SGD", "--model.optimizer.lr", "0.05", "--model.optimizer.momentum", "0.9"]
    flags += ["--last_checkpoint.save_top_k", "-1", "--last_checkpoint.filename", "{step}"]
    flags += ["--last_checkpoint.every_n_train_steps", "7"]
    for precision in ("32-true", "16-mixed"):
        for deterministic in ("false", "true"):
            more = ["--trainer.precision", precision, "--trainer.deterministic", deterministic]
            whole = fit("whole", *flags, *more) / "checkpoints"
            resumed = fit("resumed", *flags, *more, "--ckpt_path", whole / "step=21.ckpt") / "checkpoints"
            pair = (folder / "step=28.ckpt" for folder in (whole, resumed))
            note(f"{precision}, deterministic {deterministic}", difference(*pair))
    torch.use_deterministic_algorithms(False)


def fsdp() -> None:
    """Fit, resume and test on one device."""
    if CPU:
        return
    flags = tiny(331, 64, strategy="fsdp", devices=1)
    for name, more in (("fit", options(max_epochs=1)), ("resume", [*options(max_epochs=2), "--ckpt_path", "last"])):
        note(name, record_of(fit("fsdp", *flags, *more))["test"])


def nccl() -> None:
    """`ddp` on one device against `auto`: rates, warnings, and whether it ends cleanly."""
    for strategy in ("auto", "ddp"):
        flags = [*DATA, *SPEED, *QUIET, *ON, "--trainer.strategy", strategy, "--trainer.devices", "1"]
        code, out = start("fit", *flags, "--run.root", PLACE, "--run.name", strategy, timeout=40)
        print(out)
        found = record_of(newest(strategy))
        note(f"{strategy}: exit code", code)
        note(f"{strategy}: warnings", [line.strip()[:200] for line in out.splitlines() if "arning" in line])
        note(f"{strategy}: samples/s", found["throughput"]["median"])
        note(f"{strategy}: ms per step", {k: v for k, v in found["time_per_step"].items() if k not in ("n", "unit")})


def resnet() -> None:
    """resnet18_cifar at 512: one thing after the other."""
    flags = ["--model", "CIFARCNN", "--model.network", "lenet" if CPU else "resnet18_cifar", *DATA, *SPEED]
    flags += ["--data.batch_size", "512", "--data.drop_last", "true", "--trainer.log_every_n_steps", "10"]
    half = ["--trainer.precision", "bf16-mixed"]
    rate("float32", *flags)
    if not CPU:
        rate("TF32", *flags, "--model.matmul_precision", "high")
    rate("bf16", *flags, *half, "--model.channels_last", "false")
    rate("bf16, channels_last", *flags, *half, "--model.channels_last", "true")
    if not CPU:
        rate("bf16, channels_last, benchmark", *flags, *half, "--trainer.benchmark", "true")
        rate("bf16, channels_last, cuda_graph", *flags, *half, "--model.cuda_graph", "true")
        note("GiB", record_of(newest("bf16,_channels_last"))["peak_memory"][0])
    rate("bf16, channels_last, compile", *flags, *half, "--model.compile", "default")


def mlp() -> None:
    """The MLP at two widths: precision of products, and where the images are."""
    for repeats in (1, 2) if CPU else (24, 64):
        flags = ["--model", "FashionMLP", "--model.repeats", str(repeats), "--data", "Synthetic", *SPEED]
        flags += options(like="FashionMNIST", size=SIZE if CPU else 60_000, batch_size=0.25)
        flags += options(log_every_n_steps=1, max_epochs=6)
        rate(f"{repeats}", *flags)
        rate(f"{repeats}, images on the host", *flags, "--data.placement", "memory")
        note(f"{repeats}: GiB", record_of(newest(f"{repeats}"))["peak_memory"][0])
        if not CPU:
            rate(f"{repeats}, TF32", *flags, "--model.matmul_precision", "high")


def transfers() -> None:
    """GB/s to the device: pageable, pinned; gather and pin against a gather into pinned memory."""
    if CPU:
        return
    rows = torch.randint(256, (50_000, 3072), dtype=torch.uint8)

    def timed(step: Callable[[], Any], size: int) -> str:
        for _ in range(3):
            step()
        synchronize()
        began = time.perf_counter()
        for _ in range(50):
            step()
        synchronize()
        return f"{50 * size / (time.perf_counter() - began) / 1e9:.2f}"

    for size in (2**14, 2**16, 2**18, 2**20):
        pageable, there = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        pinned = pageable.pin_memory()
        for name, source in (("pageable", pageable), ("pinned", pinned)):
            note(f"{size // 1024} KiB {name}", timed(lambda to=there, s=source: to.copy_(s, non_blocking=True), size))
    for batch in (64, 512):
        index, size = torch.randint(50_000, (batch,)), batch * 3072
        buffer = torch.empty((batch, 3072), dtype=torch.uint8).pin_memory()

        def pin(index: torch.Tensor = index) -> None:
            rows[index].pin_memory().to(DEVICE, non_blocking=True)

        def into(index: torch.Tensor = index, buffer: torch.Tensor = buffer) -> None:
            torch.index_select(rows, 0, index, out=buffer)
            buffer.to(DEVICE, non_blocking=True)

        note(f"{batch}: gather, then pin", timed(pin, size))
        note(f"{batch}: gather into pinned", timed(into, size))


def commands() -> None:
    """Recorded memory against nvidia-smi; doctor, plan and compare."""
    found = record_of(fit("memory", *DATA, "--trainer.max_epochs", "1", "--run.test", "false"))["peak_memory"][0]
    note("recorded", {key: value for key, value in found.items() if key.endswith("gib")})
    if not CPU:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
        note("nvidia-smi", subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())
    code, out = start("doctor", "--json", timeout=80)
    checks = json.loads(out[out.index("{") :])["checks"] if "{" in out else []
    note("doctor", [f"{check['name']}: {check['found']}" for check in checks if check["level"] == "red"] or code)
    machine = ["--per_node", "8", "--bandwidth", "25GB/s", "--latency", "20us"]
    plan = ["plan", *machine, *ON, "--data", "Synthetic", "--data.size", "640"]
    for command in (plan, ["compare", "--quick", "true"]):
        code, out = start(*command, "--root", PLACE, timeout=80)
        note(command[0], f"exit code {code}")
        print(out)


def suite() -> None:
    """The ordinary tests with the GPU hidden, as far as time allows."""
    if not CPU:
        pytest("-n", str(min(os.cpu_count() or 1, 8)), env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.argv, item = sys.argv[:1], sys.argv[1]
    globals()[item]()
