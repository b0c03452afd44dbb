"""Many faults: kills, signals, damaged files. A table of survived faults is printed at the end.

`pytest -m slow` injects a few of each; `FAULTS=10 pytest -m slow tests/test_faults.py` injects ten
times as many.
"""

import json
import os
import random
import shutil
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from forked import ForkServer
from harness import (
    RECIPE,
    SLOW,
    acts,
    difference,
    family,
    on_cpu,
    options,
    output_of,
    started,
    tiny,
    weights,
)
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz import TIMES, examples

from app.command.checkpoint_file import read
from app.data import CIFAR10, FashionMNIST, ImageFolder
from app.errors import UserError

pytestmark = [SLOW, pytest.mark.usefixtures("drawn")]
FIT = tiny(700, test=False)
SHORT = [*FIT, *options(max_epochs=1, strategy="ddp", devices=2)]
SAVES = ["--last_checkpoint.every_n_train_steps=3", "--trainer.log_every_n_steps=5"]


@pytest.fixture
def server(tmp_path):
    with ForkServer(tmp_path) as running:
        yield running


def newest(root):
    """Return the most recently written `last.ckpt` below a folder."""
    return max(root.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def test_kills_at_random_moments(server, tmp_path, tally):
    """After a kill at any moment, the resumed run ends like an undisturbed one."""
    kills = 0
    seed = random.Random(7)
    flags = [*FIT, *SAVES, "--trainer.max_epochs=6", "--run.root", tmp_path / "runs"]
    elsewhere = Path("/dev/shm/app-faults")  # $TMPDIR on another file system
    elsewhere.mkdir(exist_ok=True)
    output_of(*server.run("fit", *flags, "--run.name=undisturbed"))
    expected = weights(tmp_path / "runs/undisturbed/version_0")
    chain = 0
    while kills < 20 * TIMES:
        chain += 1
        name = [f"--run.name=chain{chain}", "--ckpt_path=auto"]
        folder = tmp_path / f"runs/chain{chain}"
        for _ in range(12):
            kill = (signal.SIGKILL, seed.uniform(0.4, 2.0))
            code, out = server.run(
                "fit", *flags, *name, signal_after=kill, env={"TMPDIR": str(elsewhere)}
            )
            if code != -signal.SIGKILL:
                break
            kills += 1
            assert not list(folder.rglob("last.ckpt")) or read(newest(folder))["global_step"] > 0
        else:
            code, out = server.run("fit", *flags, *name, seconds=120)
        assert code == 0, out
        assert difference(newest(folder), expected) == 0
        assert not list(folder.rglob(".*.part")), "what a killed one has left is removed"
        shutil.rmtree(folder)
    assert not list(elsewhere.iterdir())
    elsewhere.rmdir()
    tally("SIGKILL at a random moment of a run that saves every 3 steps", kills)


def test_killed_inside_accumulation_windows(server, tmp_path, tally):
    """A run with a recipe, killed after any batches, ends with an undisturbed run's weights.

    Each of its parts runs on another number of processes.
    """
    kill = st.tuples(st.integers(1, 30), st.integers(1, 3))
    kills = st.lists(kill, min_size=2, max_size=3).map(sorted)
    intervals = ["every_n_train_steps=1", "every_n_train_steps=2", "train_time_interval=0:00:00"]
    done = []

    @examples(6)
    @given(st.integers(2, 5), st.sampled_from(intervals), kills)
    def run(accumulated, interval, kills):
        flags = [*tiny(270, 16, "CIFARCNN"), *RECIPE, f"--last_checkpoint.{interval}"]
        flags += options(test=False, max_epochs=2, accumulate_grad_batches=accumulated)
        flags += options(virtual_devices=4, threads=1, root=tmp_path / "runs")
        output_of(*server.run("fit", *flags, "--run.name=undisturbed"))
        killed = [*flags, "--run.name=killed", "--ckpt_path=auto"]
        for batch, devices in kills:
            part = [*killed, *on_cpu("ddp_fork", devices), *acts("exit", batch)]
            code, out = server.run("fit", *part)
            assert code in (1, 9), out
        output_of(*server.run("fit", *killed))
        undisturbed = newest(tmp_path / "runs/undisturbed")
        assert difference(undisturbed, newest(tmp_path / "runs/killed")) == 0
        done.append(len(kills))
        shutil.rmtree(tmp_path / "runs")

    run()
    tally("exits between two batches of an optimizer step, on other processes then", sum(done))


def test_two_processes_killed_at_random_moments(tmp_path, tally):
    seed = random.Random(3)
    flags = [*SHORT, *SAVES, "--trainer.max_epochs=3"]
    results = []
    for kills in (0, TIMES):
        root = tmp_path / str(kills)
        for turn in range(kills + 1):
            with started(root, *flags, "--ckpt_path=auto") as run:
                if turn < kills:
                    time.sleep(seed.uniform(5.0, 14.0))
                    victims = list(family(run.mark))
                    if victims:
                        os.kill(seed.choice(victims), signal.SIGKILL)
                out = run.end()
        assert run.process.returncode == 0, out
        results.append(newest(root))
    assert difference(*results) == 0
    tally("SIGKILL of any process of `ddp` on two devices", TIMES)


def test_signals_at_random_moments(server, tmp_path, tally):
    """After a signal at any moment, the exit code is the signal's, or 0 for a completed run.

    There is no traceback, all checkpoints load, and each record says `completed` or `interrupted`.
    """
    seed = random.Random(5)
    count = 10 * TIMES
    flags = [*FIT, *SAVES, "--trainer.max_epochs=4", "--run.root", tmp_path / "runs"]
    for turn in range(count):
        number = (signal.SIGINT, signal.SIGTERM)[turn % 2]
        code, out = server.run("fit", *flags, signal_after=(number, seed.uniform(0.0, 2.2)))
        assert code in (128 + number, -number, 0), out
        assert "Traceback" not in out, out
    for path in (tmp_path / "runs").rglob("*.ckpt"):
        read(path)
    for record in (tmp_path / "runs").rglob("run.json"):
        assert json.loads(record.read_text())["status"] in ("completed", "interrupted")
    tally("Ctrl-C or SIGTERM at a random moment", count)


def damage(content, seed):
    """Truncate a file, overwrite a part with zeros, or change some bits."""
    place = seed.randrange(len(content))
    kind = seed.choice(["cut", "zeros", "bits"])
    if kind == "cut":
        return content[:place]
    changed = bytearray(content)
    if kind == "zeros":
        end = min(place + 512, len(content))
        changed[place:end] = bytes(end - place)
    else:
        for _ in range(seed.randrange(1, 4)):
            index = seed.randrange(min(len(content), 10 ** seed.randrange(2, 6)))
            changed[index] ^= 1 << seed.randrange(8)
    return bytes(changed)


def test_damaged_data(cifar_root, fashion_root, image_root, tmp_path, tally, monkeypatch):
    """A damaged file of images or of the cache is read, or rejected by name."""
    monkeypatch.setattr("app.data.module.usable_cores", lambda: 0)
    seed = random.Random(13)
    cache = tmp_path / "cache"
    count = 0
    sets = [
        (CIFAR10, cifar_root, "cifar-10-batches-py"),
        (FashionMNIST, fashion_root, "FashionMNIST/raw"),
        (ImageFolder, image_root, "train"),
    ]
    for cls, root, name in sets:
        make = partial(cls, str(root), cache=str(cache), num_workers=0)
        folder = root / name
        make().prepare_data("fit")
        for turn in range(100 * TIMES):
            files = [
                path for path in (cache if turn % 3 == 0 else folder).rglob("*") if path.is_file()
            ]
            file = seed.choice(sorted(files))
            whole = file.read_bytes()
            file.write_bytes(damage(whole, seed))
            count += 1
            refused = ""
            try:
                data = make()
                data.prepare_data("fit")
                split = (data.cache and data.cache.open(data.source, "train")) or data.source.load(
                    "train"
                )
                assert len(split.labels) == len(split.tensor())
                assert int(split.labels.max()) < data.num_classes
            except UserError as error:
                refused = str(error)
            finally:
                file.write_bytes(whole)
            assert not refused or str(file) in refused or str(file.parent) in refused
    tally("files of images and caches, cut off or with changed bytes", count)


def test_flipped_bits(server, tmp_path, tally):
    """A flipped bit in a file of an earlier run is reported by name, or changes no weight."""
    seed = random.Random(17)
    runs = tmp_path / "runs"
    flags = [*FIT, *SAVES, "--run.root", runs, "--run.name=x", "--ckpt_path=auto"]
    output_of(*server.run("fit", *flags, "--trainer.max_epochs=1"))
    whole = runs.rename(tmp_path / "whole")
    shutil.copytree(whole, runs)
    output_of(*server.run("fit", *flags, "--trainer.max_epochs=2"))
    expected = weights(newest(runs))
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    for file in files * TIMES:
        shutil.rmtree(runs)
        shutil.copytree(whole, runs)
        content = bytearray((runs / file).read_bytes())
        content[seed.randrange(len(content))] ^= 1 << seed.randrange(8)
        (runs / file).write_bytes(content)
        code, out = server.run("fit", *flags, "--trainer.max_epochs=2")
        assert "Traceback" not in out, out
        if code:
            assert code == 2, out
            assert file.name in out, out
        else:
            assert difference(newest(runs), expected) == 0, file
    tally("bits flipped in files of a run that is resumed", len(files) * TIMES)


def test_strangers_on_the_ports(tmp_path, tally):
    """Whatever a stranger sends to the ports of a run under `ddp` has no effect."""
    seed = random.Random(19)
    count = 0
    results = []
    for is_disturbed in (False, True):
        with started(tmp_path / str(is_disturbed), *SHORT) as run:
            while is_disturbed and run.process.poll() is None:
                for pid in family(run.mark):
                    with suppress(psutil.Error, OSError):
                        for row in psutil.Process(pid).net_connections("tcp"):
                            if row.status == psutil.CONN_LISTEN:
                                with socket.create_connection(row.laddr, timeout=5) as stranger:
                                    stranger.sendall(seed.randbytes(seed.randrange(200)))
                                    count += 1
            run.end(code=0)
        results.append(run.directory)
    assert difference(*results) == 0
    tally("connections of strangers that send random bytes to the ports of `ddp`", count)


def test_starts_and_stops(tmp_path, tally):
    """No run hangs or leaves a process or file, whether it completes or Ctrl-C ends it."""
    seed = random.Random(11)
    count = 2 * TIMES
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for turn in range(count):
        with started(tmp_path / "runs", *SHORT, env={"TMPDIR": str(temporary)}) as run:
            if turn % 2:
                time.sleep(seed.uniform(0.5, 9.0))
                run.get("SIGINT", "group")
            out = run.end(60)
        assert run.process.returncode in ((0, 130, -signal.SIGINT) if turn % 2 else (0,)), out
        assert not list(temporary.iterdir())
    tally(
        "start and stop of `ddp` on two devices, half of them by Ctrl-C at a random moment", count
    )


def test_long_run_leaks_nothing(tmp_path, tally):
    """Memory, threads and open files of each rank do not grow, with all default features."""
    flags = ["--model=FashionMLP", "--model.repeats=1", "--model.hidden=[8]", "--data=Synthetic"]
    flags += options(like="FashionMNIST", images=2000, batch_size=8, flip=True)
    flags += ["--trainer.strategy=ddp", "--trainer.devices=2"]
    flags += ["--last_checkpoint.every_n_train_steps=50"]
    steps = 1000 * TIMES
    env = {"WANDB_MODE": "offline"}
    states = []
    with started(tmp_path, *flags, f"--trainer.max_epochs={steps // 225 + 1}", env=env) as run:
        run.trained(2)
        ranks = sorted(
            pid for pid in family(run.mark) if "LOCAL_RANK" in psutil.Process(pid).environ()
        )
        seen = 0
        while run.process.poll() is None:
            done = len(run.record["epochs"])
            if done > seen:
                seen = done
                with suppress(psutil.Error):
                    processes = [psutil.Process(pid) for pid in ranks]
                    states.append(
                        [(p.memory_info().rss, p.num_threads(), p.num_fds()) for p in processes]
                    )
            time.sleep(0.05)
        run.end(code=0)
    # not up to the last state, because drawing pictures takes memory
    growth = np.subtract(states[-2], states[len(states) // 4])
    assert (growth <= [16 * 2**20, 1, 2]).all(), growth
    tally(
        "steps of `ddp` on two devices with constant memory, threads and open files",
        run.record["steps"],
    )
