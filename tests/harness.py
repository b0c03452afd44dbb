"""Helpers that start, watch and stop the real command, and read the files of its runs."""

import hashlib
import inspect
import ipaddress
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from cluster.hosts import awaited
from fork_server import ROOT
from lightning import Trainer
from PIL import Image

from app.command.run_options import Run

SLOW = pytest.mark.slow


def slow(*case):
    """Return a case of a parametrized test that is slow."""
    return pytest.param(*case, marks=SLOW)


NO_GPU = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
ON_GPU = [pytest.mark.gpu, NO_GPU]


def on_gpu(test):
    """Mark a test that needs a GPU."""
    return pytest.mark.gpu(NO_GPU(test))


QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
TRAINER, RUN = set(inspect.signature(Trainer).parameters), {field.name for field in fields(Run)}


def options(**settings):
    """Return flags of the Trainer, the run or the data.

    Settings have names without a section: `options(max_epochs=1, test=False, flip=True)`.
    """
    words = []
    for name, value in settings.items():
        section = "data"
        if name in TRAINER:
            section = "trainer"
        elif name in RUN:
            section = "run"
        text = str(value)
        if isinstance(value, bool):
            text = text.lower()
        words += [f"--{section}.{name}", text]
    return words


def tiny(images=64, batch_size=16, model=None, **settings):
    """Return flags of `fit` for a few synthetic images, without bar and model summary.

    Further settings become flags as in `options`.
    """
    words = ["--data", "Synthetic", *options(images=images, batch_size=batch_size, **settings)]
    return [*words, *(["--model", model] if model else []), *QUIET]


# flags for every feature of a training recipe at once
RECIPE = [
    *options(mixup=0.3, cutmix=1),
    "--model.optimizer.lr=0.02",
    "--model.optimizer.weight_decay=0.01",
    "--model.no_decay=norm,bias",
    "--model.schedule=cosine",
    "--model.warmup=1ep",
    "--model.label_smoothing=0.1",
    "--model.ema=0.9",
    "--model.head_lr=3",
    "--model.class_weights=balanced",
    "--model.freeze=1",
    "--data.balance=true",
]


def acts(action, batches):
    """Return flags for the callback `user_code.ActsAfter`."""
    settings = [f"--trainer.callbacks.action={action}", f"--trainer.callbacks.batches={batches}"]
    return ["--trainer.callbacks+=user_code.ActsAfter", *settings]


def on_cpu(strategy, devices=None, **settings):
    """Return flags for a strategy on CPU devices: by default one for `auto`, two for others."""
    if devices is None:
        devices = 1 if strategy == "auto" else 2
    return options(accelerator="cpu", strategy=strategy, devices=devices, **settings)


def on_two_nodes(*args):
    """Run a command twice at once, as two nodes on this machine; return the results of both."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as pool:
        nodes = [
            pool.submit(start_app.run, *args, env={**address, "NODE_RANK": str(node)})
            for node in (0, 1)
        ]
        return [node.result() for node in nodes]


def output_of(code, out, expected=0):
    """Return a command's output. Check that its exit code is the expected one, by default 0."""
    assert code == expected, out
    return out


def error_of(code, out):
    """Return a command's error line. Check that it is the only one, and the output's last line."""
    assert code == 2, out
    assert "Traceback" not in out
    lines = [line for line in out.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, out
    assert out.strip().endswith(lines[0]), "it is the last thing said"
    return lines[0]


class App:
    """A way to run command lines, such as the fixture `app`.

    Args:
        run: Function that runs a command line, and returns exit code and output.
    """

    def __init__(self, run):
        self.run = run

    def __call__(self, *args, code=0, **settings):
        """Run a command, check its exit code, and return its output."""
        return output_of(*self.run(*args, **settings), code)

    def error(self, *args, **settings):
        """Run a command that must fail, and return its error line."""
        return error_of(*self.run(*args, **settings))


def refusals(cases, *flags, command="fit"):
    """Return a test that a command rejects each of these flags, beside others, with its message."""

    @pytest.mark.parametrize(("words", "message"), cases.items())
    def test(words, message, app):
        line = app.error(command, *flags, *shlex.split(words))
        assert message in line, line

    return test


def free_port():
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def newest_run(root):
    """Return the directory of the run below a folder that was written last, or the folder."""
    runs = root.glob("*/version_*")
    return max(runs, key=lambda run: run.stat().st_mtime_ns, default=root)


def losses(run_dir):
    """Return the training loss of each logging window, from metrics.csv."""
    return pd.read_csv(run_dir / "metrics.csv")["train_loss_step"].dropna().to_numpy()


def record_of(run):
    """Return a run's record, without epochs if it has none yet."""
    file = run / "run.json"
    return json.loads(file.read_text()) if file.exists() else {"epochs": []}


def record(root, version=0):
    """Return the record of the only run below a folder, without epochs if it has none yet."""
    return record_of(next(root.glob(f"*/version_{version}"), root))


def last_of(run):
    """Return the path of a run's last checkpoint."""
    return run / "checkpoints/last.ckpt"


def bit_flipped(path):
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def weights(place):
    """Return the weights of a checkpoint, or of a run's last checkpoint."""
    return torch.load(last_of(place) if place.is_dir() else place, weights_only=True)["state_dict"]


def digest(run):
    """Return the SHA-256 of the weights and buffers in a run's last checkpoint."""
    values = sorted(weights(run).items())
    return hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in values)).hexdigest()


def difference(first, second):
    """Return the largest absolute difference between the weights of two models."""
    a, b = (weights(model) if isinstance(model, Path) else model for model in (first, second))
    assert a.keys() == b.keys()
    return max((a[key] - b[key]).abs().max().item() for key in a)


def assert_same(run, expected, tolerance=1e-5):
    """Check that two runs have the same loss in each logging window, and the same final weights."""
    np.testing.assert_allclose(losses(run), losses(expected), rtol=0, atol=tolerance)
    assert difference(run, expected) < tolerance


def leave_undrawn(patch):
    """Patch drawing to write empty pictures and reports: it takes half of a short run's time.

    Args:
        patch: Function that sets a dotted name to a value, such as `monkeypatch.setattr`.
    """

    def savefig(figure, file, *, format, **_):
        if format == "svg":
            file.write('<svg viewBox="0 0 9 9"></svg>')
        else:
            Image.new("RGB", (9, 9)).save(file, format)

    patch("matplotlib.figure.Figure.savefig", savefig)
    patch("app.monitor.report.make_report", lambda folder, record: "")


SHIPPED = sorted((ROOT / "configs/compare").glob("*.yaml"))


TINY = {
    "flags": {
        "trainer.accelerator": "cpu",
        "trainer.log_every_n_steps": 2,
        "data": "Synthetic",
        "data.images": 240,
        "data.batch_size": 24,
    },
    "max_epochs": 2,
    "repeats": 1,
    "time_limit": 60,
}


def draw_images(folder, labels, **splits):
    """Write JPEG and PNG files of different sizes. `train=12` writes 12 files per class folder."""
    rng = np.random.default_rng(0)
    for (split, count), label in itertools.product(splits.items(), labels):
        (folder / split / label).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(256, size=(20 + i, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(
                folder / split / label / f"{i:02}.{'png' if i % 2 else 'jpg'}"
            )
    return folder


def seen_colours(page, *flags):
    """Return a page's number of pixels of each colour in Chromium. Check that it logs nothing."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium")
    with tempfile.TemporaryDirectory() as folder:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", *flags]
        command += ["--enable-logging=stderr", f"--user-data-dir={folder}/profile"]
        command += [f"--screenshot={folder}/seen.png", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert "CONSOLE" not in done.stderr, done.stderr
        with Image.open(f"{folder}/seen.png") as picture:
            counts = picture.convert("RGB").getcolors(1 << 22) or []
        return {colour: count for count, colour in counts}


def family(mark):
    """Return the ids of all living processes whose environment has a mark, whatever the parent."""
    pids = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in (place / "environ").read_bytes() and state != "Z":
                pids.add(int(place.name))
        except OSError:  # the process has ended
            continue
    return pids


def listening(processes):
    """Return the addresses on which processes listen.

    Unlike psutil, read each process's own network namespace.
    """
    addresses = set()
    for place in (Path(f"/proc/{pid}") for pid in processes):
        with suppress(OSError):  # the process has ended
            sockets = {os.readlink(descriptor) for descriptor in (place / "fd").iterdir()}
            for table, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
                for line in (place / "net" / table).read_text().splitlines()[1:]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == "0A" and f"socket:[{inode}]" in sockets:
                        raw = bytes.fromhex(local.partition(":")[0])
                        words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                        addresses.add(
                            socket.inet_ntop(kind, b"".join(words)).removeprefix("::ffff:")
                        )
    return addresses


class Running:
    """A started command in its own session, usually a run of `fit`."""

    def __init__(self, words, launcher, env, cwd):
        self.mark = uuid.uuid4().hex
        self.words, self.launcher = words, launcher
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "APP_TEST_MARK": self.mark,
            **env,
        }
        self.process = subprocess.Popen(
            [*(launcher or [sys.executable]), "-m", "app", *map(str, words)],
            cwd=cwd, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={name: value for name, value in variables.items() if value is not None},
        )  # fmt: skip

    @property
    def directory(self):
        """Directory of the newest run below `--run.root`; before the first run, `--run.root`."""
        root = Path(self.words[self.words.index("--run.root") + 1])
        return newest_run(root)

    @property
    def record(self):
        return record_of(self.directory)

    def get(self, name, whom):
        """Send a signal to the first process (`main`), its group (`group`), or all (`all`)."""
        for pid in family(self.mark) if whom == "all" else [self.process.pid]:
            with suppress(ProcessLookupError):
                (os.killpg if whom == "group" else os.kill)(pid, getattr(signal, name))
        return self

    def trained(self, epochs):
        """Wait until the run has trained at least `epochs` epochs, or has ended.

        Check that no process listens on all interfaces, except if a launcher started the run.
        """
        awaited(
            lambda: len(self.record["epochs"]) >= epochs or self.process.poll() is not None, 240
        )
        if not self.launcher:
            assert not listening(family(self.mark)) & {"0.0.0.0", "::"}
        return self

    def on_loopback(self):
        """Wait for the end, and return the output.

        Check that the run listened, and only on the loopback interface.
        """
        seen, out = set(), ""
        while self.process.returncode is None:
            seen |= listening(family(self.mark))
            with suppress(subprocess.TimeoutExpired):
                out, _ = self.process.communicate(timeout=0.5)
        assert seen
        assert all(ipaddress.ip_address(address).is_loopback for address in seen), seen
        return out

    def end(self, seconds=120, code=None):
        """Wait for the end, and return the output.

        Check the exit code, and that all processes end within 10 s more.
        """
        out, _ = self.process.communicate(timeout=seconds)
        awaited(lambda: not family(self.mark), 10)
        if code is not None:
            output_of(self.process.returncode, out, code)
        return out


@contextmanager
def running(*words, launcher=(), env=None, cwd=ROOT):
    """Start a command with `python` or a launcher; kill remaining processes after the block."""
    run = Running(words, launcher, env or {}, cwd)
    try:
        yield run
    finally:
        run.get("SIGKILL", "all")
        run.process.communicate()


@contextmanager
def started(root, *flags, launcher=(), env=None):
    """Start a run of `fit` in a folder."""
    with running("fit", "--run.root", root, *flags, launcher=launcher, env=env) as run:
        yield run


@App
def start_app(*args, timeout=240, env=None):
    """Run `python -m app …` in a separate process; return exit code and output."""
    with running(*args, env=env) as run:
        out, _ = run.process.communicate(timeout=timeout)
        return run.process.returncode, out
