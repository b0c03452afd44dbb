"""The run's directory and its record, also of runs that fail or are interrupted; the tracker."""

import copy
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from harness import QUIET, error_of, fork_app, free_port, start_app
from PIL import Image
from rich.console import Console

from app.monitor.header import layers
from app.monitor.loggers import claim_version
from app.monitor.progress_bar import ProgressBar
from app.monitor.report import draw_confusion_matrix
from app.monitor.summary import faster
from app.networks import MLP, LeNet, resnet18

KEY = "5ec2e7" * 6 + "5ec2"
App = Callable[..., tuple[int, str]]
SLOW = pytest.mark.slow
SMALL = ["--data", "Synthetic", "--data.size", "200", "--data.batch_size", "20", *QUIET]


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def test_a_run_directory(app: App, tmp_path: Path) -> None:
    flags = ["--trainer.max_epochs", "3", "--trainer.log_every_n_steps", "2", "--run.name", "x"]
    code, out = app("fit", *SMALL, *flags)
    assert code == 0, out
    run = tmp_path / "runs" / "x" / "version_0"
    files = {path.name for path in run.iterdir()}
    assert files >= {"config.yaml", "metrics.csv", "run.json", "checkpoints", "confusion_matrix.png", "most_wrong.png"}
    assert str(run) in out
    assert f"--ckpt_path {run}/checkpoints/last.ckpt --trainer.max_epochs 6" in out

    found = record(run)
    assert (found["status"], found["error"]) == ("completed", None)
    assert found["command"].startswith("python -m app fit --run.root")
    assert Path(found["checkpoint"]["best"]).exists()
    assert Path(found["checkpoint"]["last"]).exists()
    assert yaml.safe_load(Path(found["config"]).read_text())["run"]["name"] == "x"
    resolved = {key: found[key] for key in ("strategy", "devices", "num_nodes", "world_size", "replicas", "precision")}
    assert resolved == {
        "strategy": "single_device",
        "devices": 1,
        "num_nodes": 1,
        "world_size": 1,
        "replicas": 1,
        "precision": "32-true",
    }
    assert (found["global_batch_size"], found["placement"], found["seed"]) == (20, "memory", 42)
    assert [row["epoch"] for row in found["epochs"]] == [0, 1, 2]
    assert all(row["train_loss"] > 0 and row["val_loss"] > 0 and row["seconds"] > 0 for row in found["epochs"])
    losses = [row["train_loss"] for row in found["epochs"]]
    assert found["train_loss"] == {"first": losses[0], "middle": losses[1], "last": losses[2]}
    assert 0 <= found["test"]["acc"] <= 1
    assert found["tested"] == found["checkpoint"]["best"]
    assert found["setup_s"] > 0
    assert found["train_s"] > 0
    # 9 steps of an epoch are 4 windows of 2; the first of the 12 is left out
    speed = found["throughput"]
    assert (speed["n"], speed["unit"]) == (11, "samples/s")
    assert speed["min"] <= speed["median"] <= speed["max"]
    assert found["threads"] == 1
    times = found["time_per_step"]
    phases = ("data", "forward_backward", "communication", "optimizer", "rest")
    assert (times["n"], times["unit"]) == (20, "ms")
    assert all(times[phase] > 0 for phase in phases if phase != "communication")
    assert times["communication"] == 0
    assert found["peak_memory"][0]["rank"] == 0
    assert found["peak_memory"][0]["total_gib"] > found["peak_memory"][0]["host_rss_gib"]
    assert found["peak_memory"][0]["host_rss_gib"] > 0.1
    assert set(found["versions"]) == {"python", "torch", "lightning", "cuda", "app", "commit"}
    assert set(found["hardware"]) == {"cpu", "cores", "gpus"}
    assert app("fit", *SMALL, *flags, "--trainer.max_epochs", "1")[0] == 0
    assert (run.parent / "version_1").is_dir()


@pytest.mark.parametrize("strategy", ["dp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_where_the_time_of_a_step_goes(strategy: str, tmp_path: Path) -> None:
    """The phases make up the whole, and what ranks or replicas exchange is seen."""
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "2"]
    flags = [
        "--trainer.max_steps",
        "60",
        "--trainer.log_every_n_steps",
        "5",
        "--run.test",
        "false",
        "--run.root",
        tmp_path,
        "--run.name",
        "x",
    ]
    code, out = start_app("fit", *SMALL, *way, *flags)
    assert code == 0, out
    found = record(tmp_path / "x" / "version_0")
    times = found["time_per_step"]
    assert times["n"] == 20
    phases = ("data", "forward_backward", "communication", "optimizer", "rest")
    assert min(times[phase] for phase in phases) > 0
    assert 0 < times["launch"] <= times["forward_backward"] * 1.01
    speed = found["throughput"]
    whole = 1000 * found["global_batch_size"] / speed["median"]
    assert 0.2 < sum(times[phase] for phase in phases) / whole < 5, "the parts make up a step, within a noisy machine's"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", ["auto", "dp", "ddp"])
def test_where_the_time_of_a_step_goes_on_cuda(strategy: str, tmp_path: Path) -> None:
    flags = ["--trainer.accelerator", "cuda", "--trainer.strategy", strategy, "--trainer.max_steps", "90"]
    flags += ["--trainer.log_every_n_steps", "5", "--run.test", "false", "--run.root", tmp_path, "--run.name", "x"]
    code, out = start_app("fit", *SMALL, *flags)
    assert code == 0, out
    found = record(tmp_path / "x" / "version_0")
    times = found["time_per_step"]
    assert 0 < times["launch"] <= times["forward_backward"] * 1.01
    assert found["throughput"]["n"] < 17, "the windows that were timed do not count"
    assert (times["communication"] > 0) == (torch.cuda.device_count() > 1 and strategy != "auto")


def test_a_profiler_of_the_users_own_is_left_alone(app: App, tmp_path: Path) -> None:
    code, out = app("fit", *SMALL, "--trainer.max_steps", "9", "--trainer.profiler", "simple", "--run.name", "x")
    assert code == 0, out
    assert record(tmp_path / "runs" / "x" / "version_0")["time_per_step"] is None


def test_outside_of_the_command_line(app: App, tmp_path: Path) -> None:
    """As in a notebook: a checkpoint loads without a trainer, and drawing leaves the notebook's pyplot alone."""
    import matplotlib

    from app.modules import CIFARCNN

    matplotlib.use("pdf")
    before = dict(matplotlib.rcParams)
    code, out = app("fit", *SMALL, "--trainer.max_epochs", "1")
    assert code == 0, out
    assert dict(matplotlib.rcParams) == before
    assert not matplotlib.pyplot.get_fignums()
    model = CIFARCNN.load_from_checkpoint(tmp_path / "runs" / "cifar_cnn" / "version_0" / "checkpoints" / "best.ckpt")
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


NETWORKS = {
    "LeNet": (LeNet, (3, 32, 32), "features.0 Conv2d 6 × 28 × 28 456"),
    "MLP": (lambda: MLP(2, [16] * 5, 10), (1, 28, 28), "layers.0 Linear 16 25,104"),
    "ResNet-18": (lambda: resnet18(10), (3, 224, 224), "layer4.1 BasicBlock 512 × 7 × 7 4,720,640"),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("width", [80, 110])
def test_the_layers_of_a_network(name: str, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    make, shape, row = NETWORKS[name]
    network = make()
    state, random = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    Console(width=width).print(layers(network, shape))
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert row in lines
    total = sum(parameter.numel() for parameter in network.parameters())
    assert lines[-2].endswith(f" {total:,}")
    assert len(lines) <= 24, "it fits on a screen"
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    assert all(module.training for module in network.modules())


def test_the_summary_shows_the_layers(app: App) -> None:
    flags = ["fit", *SMALL[:-2], "--run.test", "false", "--trainer.max_steps", "1"]
    assert "network" not in app(*flags, "--trainer.enable_model_summary", "false")[1]
    code, out = app(*flags)
    assert code == 0, out
    assert "network    LeNet, 62,006 parameters, 3 × 32 × 32 → 10 classes\n" in out
    assert "optimizer  SGD, lr 0.001, momentum 0.9\n" in out
    assert "features.0" not in out
    code, out = app(*flags, "--verbose")
    assert code == 0, out
    assert "features.0" in out
    assert "val_metrics" not in out
    assert "val_metrics" in app(*flags, "--trainer.callbacks", "ModelSummary")[1]
    code, out = app(*flags, "--model", "user_code.ReadsPixels")
    assert code == 0, out
    assert "val_metrics" in out, "what cannot run without numbers is left to Lightning"


@pytest.mark.parametrize("count", [1, 2, 60])
def test_a_confusion_matrix_of_any_number_of_classes(count: int, tmp_path: Path) -> None:
    draw_confusion_matrix(torch.eye(count, dtype=torch.int64), [f"class {i}" for i in range(count)], tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] == picture.size[1] >= 600


def test_a_single_class(app: App, image_root: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        for other in ("dog", "eel"):
            shutil.rmtree(image_root / split / other)
    data = ["--data", "ImageFolder", "--data.root", image_root, "--data.size", "32", "--data.batch_size", "4"]
    code, out = app("fit", *data, "--trainer.max_epochs", "1", "--run.name", "x", *QUIET)
    assert code == 0, out
    written = (tmp_path / "runs" / "x" / "version_0" / "confusion_matrix.csv").read_text()
    assert written.splitlines() == ["label \\ predicted,cat", "cat,4"]


@pytest.mark.slow
def test_every_rank_and_every_replica_has_its_memory(app: App, tmp_path: Path) -> None:
    for strategy, rows in (("dp", [0, 0, 0]), ("ddp_fork", [0, 1, 2])):
        flags = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "3"]
        run_app = app if strategy == "dp" else start_app
        code, out = run_app(
            *("fit", *SMALL, *flags, "--data.batch_size", "18", "--trainer.max_epochs", "1"),
            *("--run.root", tmp_path, "--run.name", strategy),
        )
        assert code == 0, out
        found = record(tmp_path / strategy / "version_0")
        assert [row["rank"] for row in found["peak_memory"]] == rows
        assert (found["strategy"], found["devices"], found["replicas"]) == (strategy, 3, 3)
        assert found["world_size"] == len(set(rows))
        assert found["test"] is not None


@pytest.mark.parametrize("strategy", ["auto", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_a_failed_run_says_why(strategy: str, tmp_path: Path) -> None:
    flags = ["--model", "user_code.Fails", "--data", "user_code.TheirData", "--run.root", tmp_path, *QUIET]
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "1"]
    code, out = start_app("fit", *flags, *way)
    assert code == 1, out
    assert "the third step is broken" in out
    found = record(tmp_path / "cifar_cnn" / "version_0")
    assert found["status"] == "failed"
    assert "the third step is broken" in found["error"]


@pytest.mark.slow
def test_the_rank_that_failed_is_named(tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    flags = ["--model", "user_code.FailsOnRank1", "--data", "user_code.TheirData", "--run.root", tmp_path, *QUIET]
    code, out = start_app("fit", *flags, *way)
    assert code != 0, out
    found = record(tmp_path / "cifar_cnn" / "version_0")
    assert found["status"] == "failed"
    assert re.fullmatch(r"rank 1 \(process \d+\) failed with exit code 1: RuntimeError: only here", found["error"])


def test_a_line_for_each_epoch(app: App) -> None:
    """Also in a pipe, where the progress bar shows at its end."""
    code, out = app("fit", *SMALL[:4], "--trainer.max_epochs", "2", "--run.test", "false")
    assert code == 0, out
    said = [line for line in out.splitlines() if line.startswith("epoch ")]
    assert [line.split("  ")[0] for line in said] == ["epoch 1/2", "epoch 2/2"]
    for line in said:
        assert re.search(r"train \d\.\d{3}  val \d\.\d{3}  acc +\d+\.\d % [* ]  lr 0\.001  [\d,]+/s  \d\.\d GiB", line)
        assert len(line) < 100
    assert re.search(r"\d s left$", said[0])
    assert "left" not in said[1]


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
    run = tmp_path / "cifar_cnn" / "version_0"
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
    assert not (tmp_path / "cifar_cnn" / "version_1" / "wandb").exists()
    assert (tmp_path / "cifar_cnn" / "version_1" / "metrics.csv").exists()


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
    run = tmp_path / "cifar_cnn" / "version_0"
    file, summary = inspect(run)
    assert f"wandb sync {file.parent}\n" in out
    assert record(run)["tracker"] in file.name
    assert summary
    assert KEY not in out
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 10
    assert not [path for path in kept if KEY.encode() in path.read_bytes()], "no file holds the key"


def test_twenty_runs_of_one_name_at_once(tmp_path: Path) -> None:
    """Each has a folder of its own."""
    together = threading.Barrier(20)

    def claim(_: int) -> str:
        together.wait(30)
        return claim_version(tmp_path / "x").name

    with ThreadPoolExecutor(20) as pool:
        claimed = list(pool.map(claim, range(20)))
    assert sorted(claimed) == sorted(f"version_{number}" for number in range(20))


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
    run = tmp_path / "runs" / "cifar_cnn" / "version_0"
    assert record(run)["status"] == "completed"
    assert (run / "metrics.csv").exists()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb.Run, "log", broken)
    with pytest.warns(UserWarning, match="goes on without it"):
        code, out = app("fit", *SMALL, "--trainer.max_epochs", "1", "--run.root", tmp_path / "again")
    assert code == 0, out


def test_the_bar_is_drawn_a_few_times_a_second(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps there are; its last state is the last step, and a bar of one's own is left alone."""
    from lightning.pytorch.callbacks import RichProgressBar

    ours, theirs = [], []
    monkeypatch.setattr(ProgressBar, "_show", lambda self, *args: ours.append(args))
    monkeypatch.setattr(RichProgressBar, "on_train_batch_end", lambda self, *args: theirs.append(args[-1]))
    monkeypatch.setattr("app.monitor.progress_bar.time", SimpleNamespace(perf_counter=lambda: 1.0))
    monkeypatch.setattr(
        "app.monitor.progress_bar.get_console", lambda: Console(file=io.StringIO(), force_terminal=True)
    )
    flags = ["fit", *SMALL[:-4], "--trainer.max_epochs", "2", "--run.test", "false"]
    code, out = app(*flags)
    assert code == 0, out
    assert [shown[0] for shown in ours] == [1, 9, 9], "one of the sanity check, and the last step of each epoch"
    assert re.fullmatch(r"([\d,]+/s  )?[\d.]+ s left", ours[1][2])
    ours.clear()
    code, out = app(*flags, "--trainer.callbacks", "RichProgressBar")
    assert code == 0, out
    assert theirs == [*range(9), *range(9)]
    assert not ours


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_the_bar_is_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=columns)
    monkeypatch.setattr("app.monitor.progress_bar.get_console", lambda: console)
    bar = ProgressBar()
    bar._begin("epoch 1/2", 100)
    bar._show(50, 100, "  ".join(["train_loss 0.123"] * 20))
    progress = bar._progress
    assert progress is not None
    (line,) = console.render_lines(progress.get_renderable())
    assert sum(segment.cell_length for segment in line) <= columns
    bar._end()


def test_what_else_to_try_is_what_compare_has_found(tmp_path: Path) -> None:
    """On this machine, of a way that was compared, and where the runs of the two do not overlap."""
    hardware = {"cpu": "x", "cores": 2, "gpus": []}
    run = {"run_dir": str(tmp_path / "x" / "version_0"), "hardware": hardware, "command": "python -m app fit"}
    assert faster(run) is None

    def found(low: float, **other: Any) -> str | None:
        rows = [
            {"command": "OMP_NUM_THREADS=1 python -m app fit", "samples_per_s": 100, "samples_per_s_max": 110},
            {"command": "python -m app fit --trainer.strategy=ddp --trainer.devices=2", "samples_per_s": 180},
        ]
        variants = [{"samples_per_s_min": low, **row} for row in rows]
        file = tmp_path / "compare" / "mine" / "version_3" / "results.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"hardware": hardware, "variants": variants, **other}))
        return faster(run)

    said = "--trainer.devices 2 --trainer.strategy ddp: 1.8 × as fast in "
    assert found(170) == said + str(tmp_path / "compare" / "mine" / "version_3")
    assert found(105) is None
    assert found(170, hardware={**hardware, "cores": 4}) is None
    assert found(170, variants=[{}]) is None


def test_threads(tmp_path: Path) -> None:
    flags = [*SMALL, "--trainer.max_steps", "1", "--run.test", "false", "--run.root", tmp_path]
    code, out = fork_app("fit", *flags, "--run.threads", "2", env={"OMP_NUM_THREADS": "1"})
    assert code == 0, out
    assert record(tmp_path / "cifar_cnn" / "version_0")["threads"] == 2
    assert "--run.threads 0: give 1 or more" in error_of(*fork_app("fit", *flags, "--run.threads", "0"))


def test_a_busy_machine_is_said(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (1e4, 0.0, 0.0))
    code, out = app("fit", *SMALL, "--trainer.max_steps", "1", "--run.test", "false")
    assert code == 0, out
    assert "warning: other processes keep this machine busy: a load of 10000.0 on " in out
