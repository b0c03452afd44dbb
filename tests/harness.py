"""The real command, started, watched and ended; what is read from its runs."""

import atexit
import inspect
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cluster.hosts import awaited
from lightning.pytorch import Trainer
from PIL import Image

from app.fit.run_options import Run

ROOT = Path(__file__).parent.parent
App = Callable[..., tuple[int, str]]  # the fixture `app`: exit code, and what it printed
Signal = tuple[int, float] | None  # its number, and when it is sent
Environment = Mapping[str, str | None]  # None: without the variable


def on_gpu(test: Any) -> Any:
    """Mark a test that needs a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")(test))


QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
TRAINER, RUN = set(inspect.signature(Trainer).parameters), {field.name for field in fields(Run)}


def options(**settings: object) -> list[str]:
    """Flags of the Trainer, the run or the data, by their last names: `max_epochs=1, test=False, flip=True`."""
    words = []
    for name, value in settings.items():
        section = "trainer" if name in TRAINER else "run" if name in RUN else "data"
        words += [f"--{section}.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def tiny(size: int = 64, batch_size: int = 16, model: str | None = None, **settings: object) -> list[str]:
    """Flags of `fit` for a few drawn images, without progress bar and summary, and other `options`."""
    words = ["--data", "Synthetic", *options(size=size, batch_size=batch_size, **settings)]
    return [*words, *(["--model", model] if model else []), *QUIET]


# every feature of a recipe at once
RECIPE = [
    *options(mixup=0.3, cutmix=1, gradient_clip_val=1),
    *("--data.balance", "true"),
    *("--model.optimizer.lr", "0.02", "--model.optimizer.weight_decay", "0.01", "--model.no_decay", "norm,bias"),
    *("--model.schedule", "cosine", "--model.warmup", "1ep", "--model.label_smoothing", "0.1", "--model.ema", "0.9"),
    *("--model.head_lr", "3", "--model.class_weights", "balanced", "--model.freeze", "1"),
]


def on_cpu(strategy: str, devices: int = 2, **settings: object) -> list[str]:
    """Flags for a strategy on several devices of the CPU."""
    return options(accelerator="cpu", strategy=strategy, devices=devices, **settings)


def on_two_nodes(*args: str | Path) -> list[tuple[int, str]]:
    """Run a command as two nodes of this machine."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(start_app, *args, env={**address, "NODE_RANK": str(node)}) for node in (0, 1)]
        return [node.result() for node in nodes]


def output_of(code: int, out: str) -> str:
    """Output of a command that succeeded."""
    assert code == 0, out
    return out


def error_of(code: int, out: str) -> str:
    """The one line that says what was wrong."""
    assert code == 2, out
    assert "Traceback" not in out
    lines = [line for line in out.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, out
    assert out.strip().splitlines()[-1] == lines[0], "it is the last thing said"
    return lines[0]


def free_port() -> int:
    """Find a port of this machine on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def losses(run_dir: Path) -> np.ndarray:
    """Training loss of each window, from metrics.csv."""
    return pd.read_csv(run_dir / "metrics.csv")["train_loss_step"].dropna().to_numpy()


def record_of(run: Path) -> dict[str, Any]:
    """A run's record."""
    return json.loads((run / "run.json").read_text())


def last_of(run: Path) -> Path:
    """A run's last checkpoint."""
    return run / "checkpoints" / "last.ckpt"


def weights(place: Path) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint, or of a run's last one."""
    return torch.load(last_of(place) if place.is_dir() else place, weights_only=True)["state_dict"]


Trained = Path | dict[str, torch.Tensor]  # a run or a checkpoint, or its weights


def difference(first: Trained, second: Trained) -> float:
    """Largest difference between the weights of two models."""
    a, b = (weights(each) if isinstance(each, Path) else each for each in (first, second))
    assert a.keys() == b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


def assert_same(run: Path, expected: Path, tolerance: float = 1e-5) -> None:
    """Losses of every step and the last weights of two runs agree."""
    np.testing.assert_allclose(losses(run), losses(expected), rtol=0, atol=tolerance)
    assert difference(run, expected) < tolerance


SHIPPED = sorted((ROOT / "configs" / "compare").glob("*.yaml"))


SIZES = {"data": "Synthetic", "data.size": 240, "data.batch_size": 24}
TINY: dict[str, Any] = {"flags": {"trainer.accelerator": "cpu", **SIZES, "trainer.log_every_n_steps": 2}}
TINY |= {"max_epochs": 2, "repeats": 1, "time_limit": 60}


def draw_images(folder: Path, labels: Sequence[str], **splits: int) -> Path:
    """So many JPEG and PNG files of different sizes in the folder of each class, for each split."""
    rng = np.random.default_rng(0)
    for (split, count), label in itertools.product(splits.items(), labels):
        (folder / split / label).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(256, size=(20 + i, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / label / f"{i:02}.{'png' if i % 2 else 'jpg'}")
    return folder


def seen_colours(page: Path, *flags: str) -> dict[tuple[int, ...], int]:
    """Pixels of each colour of a page that chromium shows, without a word on its console."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium")
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        command = [browser, *fixed, *flags, f"--user-data-dir={folder}/profile", f"--screenshot={folder}/seen.png"]
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=100, check=True)
        assert "CONSOLE" not in done.stderr, done.stderr
        with Image.open(f"{folder}/seen.png") as picture:
            return {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 22) or []}


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


def listening(processes: Iterable[int]) -> set[str]:
    """Addresses on which processes listen, each in its own network namespace, where psutil does not look."""
    found = set()
    for place in (Path(f"/proc/{pid}") for pid in processes):
        with suppress(OSError):  # it has ended
            sockets = {os.readlink(descriptor) for descriptor in (place / "fd").iterdir()}
            for table, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
                for line in (place / "net" / table).read_text().splitlines()[1:]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == "0A" and f"socket:[{inode}]" in sockets:
                        raw = bytes.fromhex(local.partition(":")[0])
                        words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                        found.add(socket.inet_ntop(kind, b"".join(words)).removeprefix("::ffff:"))
    return found


class Running:
    """A command that was started, in a session of its own: a run of `fit`, or another one."""

    def __init__(self, words: Sequence[str | Path], launcher: Sequence[str], env: Environment, cwd: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.words, self.launcher = words, launcher
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "APP_TEST_MARK": self.mark, **env}
        self.process = subprocess.Popen(
            [*(launcher or [sys.executable]), "-m", "app", *map(str, words)], cwd=cwd, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={name: value for name, value in variables.items() if value is not None},
        )  # fmt: skip

    @property
    def directory(self) -> Path:
        """The newest of this name."""
        root = Path(self.words[self.words.index("--run.root") + 1])
        return max(root.glob("*/version_*"), key=lambda path: int(path.name.rpartition("_")[2]), default=root)

    @property
    def record(self) -> dict[str, Any]:
        return record_of(self.directory) if (self.directory / "run.json").exists() else {"epochs": []}

    def get(self, name: str, whom: str) -> None:
        """Send a signal to the first process (`main`), to its `group`, or to `all` of the run."""
        if whom == "group":
            os.killpg(self.process.pid, getattr(signal, name))
            return
        for pid in family(self.mark) if whom == "all" else [self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))

    def trained(self, epochs: int) -> None:
        """Wait until it has trained so many epochs, or has ended; nothing of it listens on all interfaces."""
        awaited(lambda: len(self.record["epochs"]) >= epochs or self.process.poll() is not None, 240)
        if not self.launcher:
            assert not listening(family(self.mark)) & {"0.0.0.0", "::"}

    def end(self, seconds: float = 120) -> str:
        """What it printed; none of its processes is left a little later."""
        out, _ = self.process.communicate(timeout=seconds)
        awaited(lambda: not family(self.mark), 10)
        return out


@contextmanager
def running(
    *words: str | Path, launcher: Sequence[str] = (), env: Environment | None = None, cwd: Path = ROOT
) -> Iterator[Running]:
    """A command, by `python` or by the launcher; none of its processes outlives the block."""
    run = Running(words, launcher, env or {}, cwd)
    try:
        yield run
    finally:
        run.get("SIGKILL", "all")
        run.process.communicate()


@contextmanager
def started(
    root: Path, *flags: str | Path, launcher: Sequence[str] = (), env: Environment | None = None
) -> Iterator[Running]:
    """A run of `fit` in a folder."""
    with running("fit", "--run.root", root, *flags, launcher=launcher, env=env) as run:
        yield run


def start_app(*args: str | Path, timeout: int = 240, env: Environment | None = None) -> tuple[int, str]:
    """Run `python -m app …` as a process of its own: exit code, and what it printed."""
    with running(*args, env=env) as run:
        out, _ = run.process.communicate(timeout=timeout)
        return run.process.returncode, out


SERVER = """
import gc, json, os, resource, sys, traceback
gc.disable()
import app.fit.command, app.compare.command, app.plan.command, app.doctor, app.monitor.report
import matplotlib.backends.backend_agg, matplotlib.backends.backend_svg
from app.cli import main
gc.freeze()
gc.enable()
os.environ["OMP_NUM_THREADS"] = "1"
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if not pid:
        os.setsid()
        out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        if job["limit"]:
            resource.setrlimit(resource.RLIMIT_DATA, (job["limit"], job["limit"]))
        code = 1
        try:
            code = main(job["argv"])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class ForkServer:
    """Runs commands in processes that have imported everything: hundreds of them in minutes. One at a time.

    Args:
        folder: Where their output is kept, one over the other.
        cwd: Where they run; by default in that folder.
        limit: Bytes of memory that each may take.
    """

    def __init__(self, folder: Path, cwd: Path | None = None, limit: int | None = 4 * 2**30) -> None:
        self.cwd, self.out, self.limit = cwd or folder, folder / "output.txt", limit
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        )  # fmt: skip

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.kill()
        self.server.communicate()

    def run(
        self, *args: str | Path, seconds: float = 60, signal_after: Signal = None, env: Environment | None = None
    ) -> tuple[int, str]:
        """Exit code, below zero for a signal, and what it printed; it may be sent a signal after some seconds.

        Raises:
            TimeoutError: When it did not end in time.
        """
        assert self.server.stdin
        assert self.server.stdout
        variables = {key: value for key, value in {**os.environ, **(env or {})}.items() if value is not None}
        place = {"out": str(self.out), "cwd": str(self.cwd), "limit": self.limit}
        job = {"argv": [*map(str, args)], "env": variables, **place}
        print(json.dumps(job), file=self.server.stdin, flush=True)
        pid = int(self.server.stdout.readline())
        timers = [threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))]
        if signal_after:
            timers.append(threading.Timer(signal_after[1], os.kill, (pid, signal_after[0])))
        for timer in timers:
            timer.start()
        code = int(self.server.stdout.readline())
        for timer in timers:
            timer.cancel()
        out = self.out.read_text(errors="replace")
        if code == -signal.SIGKILL and (not signal_after or signal_after[0] != signal.SIGKILL):
            raise TimeoutError(f"{args} did not end in {seconds} s, or took too much memory: {out[-2000:]}")
        return code, out


@cache
def _server() -> ForkServer:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    server = ForkServer(Path(folder.name), ROOT, limit=None)
    atexit.register(server.__exit__)
    return server


def fork_app(*args: str | Path, timeout: int = 240, env: Environment | None = None) -> tuple[int, str]:
    """Run a command line as `start_app` does, in a fork of a process that has imported everything: 5 s less of it.

    For what does not ask how processes are started. Under `ddp_fork` its ranks begin so, too.
    """
    return _server().run(*args, seconds=timeout, env={"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **(env or {})})
