"""Weights & Biases: one offline run has all results; a failing tracker never stops training."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
from forked import fork_app
from harness import QUIET, SLOW, free_port, on_cpu, options, record_of, slow, start_app, tiny

from app.command.configuration import resolve
from app.monitor.loggers import tracking_mode

KEY = "5ec2e7" * 6 + "5ec2"
SMALL = tiny(200, 20)


def inspect(run):
    """Read an offline run with wandb's own tool; return its file and its summary."""
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    wandb = Path(sys.executable).parent / "wandb"
    command = [wandb, "leet", "inspect", "--summary", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return file, json.loads(done.stdout)


MODES = [
    ("", "", "offline"), ("", "online", "online"),
    ("", "disabled", "off"),
    ("online", "", "online"), ("online", "offline", "offline"), ("offline", "online", "offline"),
    ("off", "online", "off"), ("true", "", "offline"), ("false", "online", "off"),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "variable", "mode"), MODES)
def test_more_private_mode_wins(flag, variable, mode, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", variable)
    flags = [f"--run.wandb={flag}"] if flag else []
    assert tracking_mode(resolve(["fit", *SMALL, *flags]).run.wandb) == mode


@SLOW
def test_private_data_stays_local(image_root, tmp_path):
    """Without `online`, the run does not connect. Its files hold no image, name or git remote."""
    for image in image_root.rglob("*.*"):
        image.rename(image.with_stem(f"patient-{image.stem}"))
    flags = [f"--data={image_root}", "--model=CIFARCNN", *options(max_epochs=1), *QUIET]
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_MODE": None}
        fork_app("fit", *flags, "--run.root", tmp_path / "runs", env=env)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    run = tmp_path / "runs/LeNet-ImageFolder/version_0"
    file, _ = inspect(run)
    (picture,) = (file.parent / "files").rglob("*.png")
    assert picture.name.startswith("confusion_matrix_picture")
    kept = [path.read_bytes() for path in (run / "wandb").rglob("*") if path.is_file()]
    for content in kept:
        assert not re.search(b"patient-|most_wrong|remote", content)


@SLOW
@pytest.mark.parametrize("strategy", ["auto", slow("ddp_fork")])
def test_one_offline_run_has_all_results(strategy, tmp_path):
    """One run has the results of all processes, and a read-only home causes no message."""
    env = {"WANDB_MODE": None, "WANDB_API_KEY": None, "HOME": "/proc/home", "XDG_CACHE_HOME": None}
    flags = on_cpu(strategy, max_epochs=2, root=tmp_path, track_images=True)
    start = fork_app
    if strategy == "auto":
        start = start_app
    out = start("fit", *SMALL, *flags, env=env)
    assert not re.search("INFO|ERROR|/proc/home|fail", out), out
    run = tmp_path / "LeNet-Synthetic/version_0"
    file, summary = inspect(run)
    assert f"wandb sync {file.parent}" in out
    text = json.dumps(summary)
    media = set(re.findall(r'"(media/[^"]+)"', text))
    assert media, text
    assert all((file.parent / "files" / path).exists() for path in media)
    assert not list((run.parent).glob("version_[1-9]*")), "only rank zero makes directories"
    results = "train_loss val_acc test_acc confusion_matrix most_wrong throughput peak_memory"
    for word in f"{results} CIFARCNN batch_size".split():
        assert word in text


@SLOW
def test_offline_without_a_key(tmp_path):
    home = {"HOME": str(tmp_path), "WANDB_API_KEY": None, "WANDB_MODE": "online"}
    out = fork_app("fit", *SMALL, *options(max_epochs=1, root=tmp_path), env=home)
    assert "has no key (wandb login, or WANDB_API_KEY): offline from here on" in out
    assert "wandb sync" in out


class OutOfQuota(BaseHTTPRequestHandler):
    """Server of Weights & Biases that answers every request with an exceeded quota."""

    def _answer(self):
        self.send_error(403, "storage limit reached")

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *args):
        pass


class Dripping(OutOfQuota):
    """Weights & Biases server that sends its answer one byte at a time."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # the client has disconnected
            for _ in range(10_000):
                self.wfile.write(b" ")
                time.sleep(0.1)


@contextmanager
def server_that(fails):
    """Start a server of Weights & Biases that fails in the given way; yield its address."""
    if fails == "refuses":
        yield f"http://127.0.0.1:{free_port()}"
        return
    handler = Dripping if fails == "drips" else OutOfQuota
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@SLOW
@pytest.mark.parametrize("fails", ["drips", slow("refuses"), slow("is out of quota")])
def test_offline_when_the_server_is_down(fails, tmp_path):
    """The run is complete offline, and the printed command uploads it."""
    with server_that(fails) as url:
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_MODE": None}
        flags = [*SMALL, *options(max_epochs=2, root=tmp_path, wandb="online")]
        out = fork_app("fit", *flags, env=env, timeout=120)
    assert out.count("Weights & Biases") == 1, "it is said once"
    assert re.search("Weights & Biases does not start (.*): offline from here on", out)
    run = tmp_path / "LeNet-Synthetic/version_0"
    file, summary = inspect(run)
    assert f"wandb sync {file.parent}\n" in out
    assert record_of(run)["tracker"] in file.name
    assert summary
    assert KEY not in out
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 10
    assert not [path for path in kept if KEY.encode() in path.read_bytes()], "no file holds the key"


def test_a_failing_tracker_does_not_stop_training(app, monkeypatch, tmp_path):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    broken = Mock(side_effect=wandb.errors.CommError("the tracker is down"))
    flags = [*SMALL, *options(max_epochs=1)]
    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", broken)
        out = app("fit", *flags)
    assert broken.call_count == 2
    assert out.count("Weights & Biases does not start (the tracker is down)") == 2
    run = tmp_path / "runs/LeNet-Synthetic/version_0"
    assert record_of(run)["status"] == "completed"
    assert (run / "metrics.csv").exists()

    monkeypatch.setattr(wandb.Run, "log", broken)
    with pytest.warns(UserWarning, match="continues without it"):
        app("fit", *flags, "--run.root", tmp_path / "again")
