"""Weights & Biases: one offline run per training has all results; a failing tracker never stops training."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from harness import (
    QUIET,
    App,
    fork_app,
    free_port,
    on_cpu,
    options,
    output_of,
    record_of,
    start_app,
    tiny,
)

from app.command.configuration import resolve
from app.monitor.loggers import tracking_mode

KEY = "5ec2e7" * 6 + "5ec2"
SMALL = tiny(200, 20)
SLOW = pytest.mark.slow


def inspect(run: Path) -> tuple[Path, dict[str, Any]]:
    """Read an offline run with wandb's own tool; return its file and its summary."""
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    command = [
        str(Path(sys.executable).parent / "wandb"),
        "leet",
        "inspect",
        "--summary",
        "--json",
        str(file),
    ]
    return file, json.loads(
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    )


MODES = [
    ("", "", "offline"), ("", "online", "online"), ("", "dryrun", "offline"), ("", "disabled", "off"),
    ("online", "", "online"), ("online", "offline", "offline"), ("offline", "online", "offline"),
    ("off", "online", "off"), ("true", "", "offline"), ("false", "online", "off"),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "variable", "mode"), MODES)
def test_the_more_private_wish_holds(
    flag: str, variable: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    assert (
        tracking_mode(resolve(["fit", *SMALL, *["--run.wandb", flag][: 2 * bool(flag)]]).run.wandb)
        == mode
    )


def test_what_is_private_stays(image_root: Path, tmp_path: Path) -> None:
    """Even with a key, the run does not connect; the tracker's files hold no test image, image name or git remote."""
    for image in image_root.rglob("*.*"):
        image.rename(image.with_stem(f"patient-{image.stem}"))
    flags = [
        "--data",
        "ImageFolder",
        "--data.root",
        image_root,
        "--trainer.max_epochs",
        "1",
        *QUIET,
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_MODE": None}
        output_of(*fork_app("fit", *flags, "--run.root", tmp_path / "runs", env=env))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    run = tmp_path / "runs" / "LeNet-ImageFolder" / "version_0"
    file, _ = inspect(run)
    (picture,) = (file.parent / "files").rglob("*.png")
    assert picture.name.startswith("confusion_matrix_picture")
    kept = [path.read_bytes() for path in (run / "wandb").rglob("*") if path.is_file()]
    assert not [
        content
        for content in kept
        if any(word in content for word in (b"patient-", b"most_wrong", b"remote"))
    ]


@pytest.mark.parametrize("strategy", ["auto", pytest.param("ddp_fork", marks=SLOW)])
def test_one_offline_run_holds_everything(strategy: str, tmp_path: Path) -> None:
    """One offline run has all results of any number of processes, and a read-only home causes no message."""
    env = {"WANDB_MODE": None, "WANDB_API_KEY": None, "HOME": "/proc/home", "XDG_CACHE_HOME": None}
    flags = on_cpu(
        strategy, 1 if strategy == "auto" else 2, max_epochs=2, root=tmp_path, track_images=True
    )
    out = output_of(
        *(start_app if strategy == "auto" else fork_app)("fit", *SMALL, *flags, env=env)
    )
    assert not re.search("INFO|ERROR|/proc/home|fail", out), out
    run = tmp_path / "LeNet-Synthetic" / "version_0"
    file, summary = inspect(run)
    assert f"wandb sync {file.parent}" in out
    text = json.dumps(summary)
    media = set(re.findall(r'"path": "(media/[^"]+)"', text))
    assert media, text
    assert all((file.parent / "files" / path).exists() for path in media)
    assert not list((run.parent).glob("version_[1-9]*")), "only rank zero makes directories"
    words = (
        "train_loss",
        "val_acc",
        "test_acc",
        "confusion_matrix",
        "most_wrong",
        "throughput",
        "peak_memory",
    )
    assert not [word for word in (*words, "CIFARCNN", "batch_size") if word not in text]


@pytest.mark.slow
def test_without_a_key_it_is_offline(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "WANDB_API_KEY": None, "WANDB_MODE": "online"}
    out = output_of(*fork_app("fit", *SMALL, *options(max_epochs=1, root=tmp_path), env=home))
    assert "has no key (wandb login, or WANDB_API_KEY): offline from here on" in out
    assert "wandb sync" in out


class OutOfQuota(BaseHTTPRequestHandler):
    """Server of Weights & Biases that answers every request with an exceeded quota."""

    def _answer(self) -> None:
        body = json.dumps({"errors": [{"message": "storage limit reached"}]}).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *args: Any) -> None:
        pass


class Dripping(OutOfQuota):
    """Weights & Biases server that sends its answer one byte at a time."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # the client has disconnected
            for _ in range(10_000):
                self.wfile.write(b" ")
                time.sleep(0.1)


SERVERS = {"is out of quota": OutOfQuota, "drips": Dripping}


@contextmanager
def tracker(server: str) -> Iterator[str]:
    """Start a server of Weights & Biases that fails in the given way; yield its address."""
    if server in SERVERS:
        with ThreadingHTTPServer(("127.0.0.1", 0), SERVERS[server]) as running:
            threading.Thread(target=running.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{running.server_port}"
            running.shutdown()
        return
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if server == "refuses":
            silent.close()
            yield f"http://127.0.0.1:{free_port()}"
        else:
            yield f"http://127.0.0.1:{silent.getsockname()[1]}"


DOWN = [
    "drips",
    *(pytest.param(how, marks=SLOW) for how in ("refuses", "never answers", "is out of quota")),
]


@pytest.mark.parametrize("server", DOWN)
def test_a_tracker_that_is_down(server: str, tmp_path: Path) -> None:
    """The run is complete offline, the printed command uploads it, and training waits at most half a minute."""
    with tracker(server) as url:
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_MODE": None}
        flags = [*SMALL, *options(max_epochs=2, root=tmp_path, wandb="online")]
        out = output_of(*fork_app("fit", *flags, env=env, timeout=120))
    assert out.count("Weights & Biases") == 1, "it is said once"
    assert re.search("Weights & Biases does not start (.*): offline from here on", out)
    run = tmp_path / "LeNet-Synthetic" / "version_0"
    file, summary = inspect(run)
    assert f"wandb sync {file.parent}\n" in out
    assert record_of(run)["tracker"] in file.name
    assert summary
    assert KEY not in out
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 10
    assert not [path for path in kept if KEY.encode() in path.read_bytes()], "no file holds the key"


def test_a_failing_tracker_does_not_stop_training(
    app: App, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    broken, init = Mock(side_effect=wandb.errors.CommError("the tracker is down")), wandb.init
    monkeypatch.setattr(wandb, "init", broken)
    out = output_of(*app("fit", *SMALL, "--trainer.max_epochs", "1"))
    assert (
        out.count("Weights & Biases does not start (the tracker is down)") == broken.call_count == 2
    )
    run = tmp_path / "runs" / "LeNet-Synthetic" / "version_0"
    assert record_of(run)["status"] == "completed"
    assert (run / "metrics.csv").exists()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb.Run, "log", broken)
    with pytest.warns(UserWarning, match="continues without it"):
        output_of(
            *app("fit", *SMALL, "--trainer.max_epochs", "1", "--run.root", tmp_path / "again")
        )
