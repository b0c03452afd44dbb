"""Weights & Biases: one offline run holds everything, and a tracker that fails stops no training."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from harness import QUIET, free_port, start_app

KEY = "5ec2e7" * 6 + "5ec2"
App = Callable[..., tuple[int, str]]
SMALL = ["--data", "Synthetic", "--data.size", "200", "--data.batch_size", "20", *QUIET]
SLOW = pytest.mark.slow


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def inspect(run: Path) -> tuple[Path, dict[str, Any]]:
    """Read an offline run with the tracker's own tool: its file, and its summary."""
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--summary", "--json", str(file)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return file, json.loads(read.stdout)


@pytest.mark.parametrize("strategy", ["auto", *(pytest.param(f"ddp_{how}", marks=SLOW) for how in ("spawn", "fork"))])
def test_one_offline_run_holds_everything(strategy: str, tmp_path: Path) -> None:
    devices = "1" if strategy == "auto" else "2"
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", devices]
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": None}
    code, out = start_app("fit", *SMALL, *way, "--trainer.max_epochs", "2", "--run.root", tmp_path, env=env)
    assert code == 0, out
    run = tmp_path / "LeNet-Synthetic" / "version_0"
    file, summary = inspect(run)
    assert f"wandb sync {file.parent}" in out
    text = json.dumps(summary)
    media = set(re.findall(r'"path": "(media/[^"]+)"', text))
    assert media, text
    assert all((file.parent / "files" / path).exists() for path in media)
    assert not list((run.parent).glob("version_[1-9]*")), "only rank zero makes directories"
    for part in ("train_loss", "val_acc", "test_acc", "confusion_matrix", "most_wrong", "throughput", "peak_memory"):
        assert part in text
    assert "CIFARCNN" in text
    assert "batch_size" in text


@pytest.mark.slow
def test_without_a_key_it_is_offline_and_disabled_is_obeyed(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "WANDB_API_KEY": None, "WANDB_MODE": None}
    flags = [*SMALL, "--trainer.max_epochs", "1", "--run.root", tmp_path]
    code, out = start_app("fit", *flags, env=home)
    assert code == 0, out
    assert "wandb sync" in out
    code, out = start_app("fit", *flags, env={"WANDB_MODE": "disabled"})
    assert code == 0, out
    assert not (tmp_path / "LeNet-Synthetic" / "version_1" / "wandb").exists()
    assert (tmp_path / "LeNet-Synthetic" / "version_1" / "metrics.csv").exists()


class OutOfQuota(BaseHTTPRequestHandler):
    """Weights & Biases with no room left, to whatever is asked."""

    def _answer(self) -> None:
        said = json.dumps({"errors": [{"message": "storage limit reached"}]}).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def tracker(server: str) -> Iterator[str]:
    """The address of a server of Weights & Biases that does not take the run."""
    if server == "is out of quota":
        with ThreadingHTTPServer(("127.0.0.1", 0), OutOfQuota) as full:
            threading.Thread(target=full.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{full.server_port}"
            full.shutdown()
        return
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if server == "refuses":
            silent.close()
            yield f"http://127.0.0.1:{free_port()}"
        else:
            yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("server", ["refuses", "never answers", "is out of quota"])
def test_a_tracker_that_is_down(server: str, tmp_path: Path) -> None:
    """The run is kept offline, whole, under the command that is printed; training begins within seconds of it."""
    with tracker(server) as url:
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_MODE": None}
        flags = [*SMALL, "--trainer.max_epochs", "2", "--run.root", tmp_path]
        code, out = start_app("fit", *flags, env=env)
    assert code == 0, out
    assert out.count("Weights & Biases") == 1, "it is said once"
    said = "does not start (.*limit reached.*)" if server == "is out of quota" else "does not answer"
    assert re.search(f"Weights & Biases {said}: offline from here on", out)
    run = tmp_path / "LeNet-Synthetic" / "version_0"
    file, summary = inspect(run)
    assert f"wandb sync {file.parent}\n" in out
    assert record(run)["tracker"] in file.name
    assert summary
    assert KEY not in out
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 10
    assert not [path for path in kept if KEY.encode() in path.read_bytes()], "no file holds the key"


def test_a_failing_tracker_does_not_stop_training(app: App, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    calls = []

    def broken(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        raise wandb.errors.CommError("the tracker is down")

    init = wandb.init
    monkeypatch.setattr(wandb, "init", broken)
    with pytest.warns(UserWarning, match="the tracker is down"):
        code, out = app("fit", *SMALL, "--trainer.max_epochs", "1")
    assert code == 0, out
    assert calls
    run = tmp_path / "runs" / "LeNet-Synthetic" / "version_0"
    assert record(run)["status"] == "completed"
    assert (run / "metrics.csv").exists()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb.Run, "log", broken)
    with pytest.warns(UserWarning, match="goes on without it"):
        code, out = app("fit", *SMALL, "--trainer.max_epochs", "1", "--run.root", tmp_path / "again")
    assert code == 0, out
