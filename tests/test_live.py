"""`--cluster.live`: ranks come and go, and the results keep their bits."""

import os
import random
import re
import shlex
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
from cluster.hosts import awaited
from fork_server import PATHS
from forked import fork_fit
from harness import (
    QUIET,
    RECIPE,
    SLOW,
    digest,
    last_of,
    options,
    refusals,
    running,
    start_app,
    started,
    tiny,
)
from pandas import read_csv
from pandas.testing import assert_frame_equal

from app.command.checkpoint_file import read
from app.launch.live import Member, choose_device
from app.record import Record
from app.system.connections import disconnect, form

BASE = options(accelerator="cpu", virtual_devices=4, threads=1, log_every_n_steps=2, name="x")
IMAGES = [*tiny(100, 20, "ImageClassifier", flip=True, max_epochs=3), *RECIPE, *BASE]
IMAGES += ["--model.network=timm/test_efficientnet", "--trainer.gradient_clip_val=1"]
IMAGES += options(accumulate_grad_batches=2, val_check_interval=2)
THEIRS = ["--model=live_code.Everything", "--data=exact_code.Ordinary", *QUIET, *BASE]
THEIRS += ["--data.count=90", "--data.train=workers", *options(global_batch=20, max_epochs=3)]
THEIRS += ["--trainer.precision=64-true"]
LIVE = [*options(strategy="ddp", devices=2), "--cluster.live=true", "--cluster.timeout=120"]


def train(folder, flags, kills=None):
    """Train undisturbed on one process, or live, while ranks are killed; return the directory."""
    if kills is None:
        return fork_fit(folder, *flags, *options(strategy="auto", devices=1))
    (folder / "kills").mkdir(parents=True)
    words = [*LIVE, *options(root=folder), "--cluster.max_restarts=9"]
    words += ["--trainer.callbacks+=dying_code.Kills", f"--trainer.callbacks.at={[*kills]}"]
    words += [f"--trainer.callbacks.folder={folder / 'kills'}"]
    out = start_app("fit", *flags, *words)
    assert {path.name for path in (folder / "kills").iterdir()} == {*kills}
    assert len(kills) > 1 or re.search(r"rank \d left at step \d+; 1 go on", out), out
    return folder / "x/version_0"


def assert_undisturbed(run, alone):
    """Check that a run's weights have another run's bits, and its metrics the same rows."""
    assert digest(run) == digest(alone)
    # the sums of an evaluation depend on the number of processes that it ends with
    rows = read_csv(run / "metrics.csv")
    expected = read_csv(alone / "metrics.csv")
    assert_frame_equal(rows, expected, rtol=1e-6)


def assert_undisturbed_up_to_its_end(run, flags):
    """Check that a run's weights have the bits of an undisturbed run of as many steps."""
    steps = read(last_of(run))["global_step"]
    alone = train(run.parents[1] / "alone", [*flags, f"--trainer.max_steps={steps}"])
    assert digest(run) == digest(alone)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Directory of an undisturbed run on images, with all features of a recipe."""
    return train(tmp_path_factory.mktemp("images"), IMAGES)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Directory of an undisturbed run of a user's module on a DataLoader with workers."""
    return train(tmp_path_factory.mktemp("theirs"), THEIRS)


@SLOW
def test_rank_zero_is_killed(images, tmp_path):
    run = train(tmp_path, IMAGES, ["backward:2:0"])
    assert_undisturbed(run, images)
    first = Record.load(run / "run.json").parts[0]
    assert (first.status, first.error, first.world_size) == ("continued", "rank 0 left", 2)
    assert first.steps == 2


@SLOW
def test_validation_is_repeated(theirs, tmp_path):
    assert_undisturbed(train(tmp_path, THEIRS, ["validation:5:1"]), theirs)


KILLS = [
    ("images", ["save:4:0"]),
    ("images", ["epoch:3:0"]),
    ("images", ["validated:3:1", "test:9:0"]),
    ("images", ["step:4:0", "step:4:1"]),
    ("theirs", ["step:3:1"]),
    ("theirs", ["step:5:1"]),
    ("theirs", ["validation:5:0", "step:8:0"]),
    ("theirs", ["epoch:5:1"]),
]


@SLOW
@pytest.mark.parametrize(("what", "kills"), KILLS)
def test_kills(what, kills, images, theirs, tmp_path):
    flags = {"images": IMAGES, "theirs": THEIRS}[what]
    alone = {"images": images, "theirs": theirs}[what]
    assert_undisturbed(train(tmp_path, flags, kills), alone)


def await_ranks(run, ranks):
    """Wait until a part of the run on this many ranks has begun, or the run has ended."""
    awaited(lambda: run.record.get("world_size") == ranks or run.process.poll() is not None, 300)


LONG = [*IMAGES, "--trainer.max_epochs=-1", "--model.schedule=null", "--model.warmup=0"]
ONE = [*LIVE, "--trainer.devices=1"]


@contextmanager
def live(root, flags=LONG):
    """Start a live run of one rank; yield it and its address after an epoch."""
    with started(root, *flags, *ONE) as run:
        line = run.process.stdout.readline()
        run.trained(1)
        yield run, line.split()[-1]


@SLOW
def test_a_machine_joins_and_leaves(tmp_path):
    """The machine's Ctrl-C ends its ranks only; the first node's ends all."""
    with live(tmp_path) as (run, address):
        wrong = start_app.run("join", address, "--model.optimizer.lr=3")
        assert "model.optimizer.lr is 3.0 here and 0.02 in the live" in wrong[1]
        with running("join", address, "--trainer.devices=2") as other:
            await_ranks(run, 3)
            other.get("SIGINT", "main")
            other.end(code=130)
        await_ranks(run, 1)
        run.get("SIGTERM", "main")
        out = run.end(code=143)
    assert re.search(r"rank \d(, \d)? left at step \d+; [12] go on", out), out
    assert_undisturbed_up_to_its_end(run.directory, LONG)


@SLOW
def test_the_first_node_is_lost(tmp_path):
    """The others save the newest step, and end with one line."""
    with live(tmp_path) as (run, at), running("join", at, "--trainer.devices=1") as other:
        await_ranks(run, 2)
        run.get("SIGKILL", "main")
        out = other.end(code=2)
    assert f"start again with --ckpt_path {last_of(run.directory)}" in out
    assert_undisturbed_up_to_its_end(run.directory, LONG)


@SLOW
def test_any_moment(tmp_path):
    """Ranks are killed at random moments: in training, while they start, while they join."""
    flags = [*LIVE, "--trainer.devices=3", "--cluster.max_restarts=999"]
    with started(tmp_path, *LONG, *flags) as run:
        run.trained(1)
        for _ in range(50):
            time.sleep(random.uniform(0, 3))  # to reach any moment
            ranks = psutil.Process(run.process.pid).children()
            random.choice(ranks).send_signal(signal.SIGKILL)
        run.get("SIGTERM", "main")
        run.end(code=143)
    assert_undisturbed_up_to_its_end(run.directory, LONG)


REFUSED = {
    "--run.virtual_devices=null": "needs --run.virtual_devices, so that results stay the same",
    "--trainer.strategy=auto --trainer.devices=1": "needs --trainer.strategy ddp, not auto",
    "--trainer.num_nodes=2": "starts one machine: leave --trainer.num_nodes out",
    "--cluster.init_method=file:///x": "needs tcp://HOST:PORT, not --cluster.init_method file",
    "--run.find_lr=true": "does not work with --run.find_lr",
    "--cluster.live=false --cluster.min_ranks=2": "--cluster.min_ranks 2: add --cluster.live true",
}


test_what_cannot_be_live = refusals(REFUSED, *IMAGES, *LIVE)


def test_nobody_answers(app):
    assert "no live run answers there" in app.error("join", "127.0.0.1:9")


@SLOW
def test_torchrun_joins(tmp_path):
    """Torchrun starts `join` once for a machine. 16-mixed scales the losses."""
    flags = [*LONG, "--trainer.precision=16-mixed"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with live(tmp_path, flags) as (run, address):
        with running("join", address, launcher=torchrun) as other:
            await_ranks(run, 2)
            other.get("SIGTERM", "main")
            other.end()
        await_ranks(run, 1)
        run.get("SIGTERM", "main")
        run.end(code=143)
    assert_undisturbed_up_to_its_end(run.directory, flags)


@pytest.mark.cluster
def test_a_job_joins_and_is_requeued(slurm, tmp_path):
    """Each node is a job of its own; the second one is requeued, and joins again."""
    env = {"PYTHONPATH": PATHS}
    place = "10.77.0.1:29400"
    flags = [*LONG, *ONE, f"--cluster.init_method=tcp://{place}", f"--run.root={tmp_path}"]
    commands = {
        "h1": f"exec {sys.executable} -m app {shlex.join(['fit', *flags])}",
        "h2": f"exec srun --ntasks 1 {sys.executable} -m app join {place}",
    }
    first = slurm.submit("--nodelist=h1", "--wrap", commands["h1"], env=env)
    run = tmp_path / "x/version_0"

    def has_parts(count):
        return len(Record.load(run / "run.json").parts) >= count

    def outputs():
        return slurm.output(first) + slurm.output(second)

    awaited((run / "checkpoints/best.ckpt").exists, 240, lambda: slurm.output(first))
    second = slurm.submit("--nodelist=h2", "--requeue", "--wrap", commands["h2"], env=env)
    awaited(lambda: has_parts(1), 240, outputs)
    slurm.run("scontrol", "requeue", second)
    awaited(lambda: has_parts(2), 240, outputs)
    slurm.start_again(second)
    awaited(lambda: has_parts(3), 240, outputs)
    slurm.run("scancel", first)
    slurm.reaches(first, "CANCELLED")
    assert [part.error for part in Record.load(run / "run.json").parts] == [
        "rank 1 (10.77.0.2) joined",
        "rank 1 (10.77.0.2) left",
        "rank 2 (10.77.0.2) joined",
    ]
    assert_undisturbed_up_to_its_end(run, LONG)


def test_nccl_is_aborted_when_a_rank_ends(monkeypatch):
    """A fake stands in for NCCL, whose blocked calls end only if somebody aborts them."""
    aborted = threading.Event()
    monkeypatch.setattr("app.launch.failures.abort_process_group", aborted.set)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    server = socket.create_server(("127.0.0.1", 0))
    of_group = form(lambda: socket.create_connection(server.getsockname()))
    there, peer = socket.socketpair()
    member = Member.__new__(Member)
    member._peers = [peer]
    lost = threading.Event()
    watcher = threading.Thread(target=member._watch_peers, args=(member._peers, lost), daemon=True)
    watcher.start()
    assert not aborted.wait(0.3), "the other rank lives"
    there.close()
    assert aborted.wait(10)
    assert lost.is_set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        form(threading.Event().wait)  # as a rank that waits for another one to connect
    assert of_group.recv(1) == b""
    other = socket.create_connection(server.getsockname())
    disconnect()
    other.send(b"x")
    member._peers = []
    watcher.join(10)


DEVICES = [(None, "0", "0"), (None, "3", "3"), ("2,5", "1", "5"), ("GPU-a,GPU-b", "0", "GPU-a")]


@pytest.mark.parametrize(("visible", "place", "device"), DEVICES)
def test_each_rank_sees_its_own_gpu(visible, place, device, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"app_12345678_{place}")
    choose_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == device
