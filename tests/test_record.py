"""The run's directory and its record, also of runs that fail or are interrupted."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import QUIET, ROOT, App, error_of, fork_app, output_of, start_app
from PIL import Image
from stuck_code import never_ends

from app.monitor.loggers import claim_version
from app.monitor.report import draw_confusion_matrix

SLOW = pytest.mark.slow
SMALL = ["--data", "Synthetic", "--data.size", "200", "--data.batch_size", "20", *QUIET]


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def test_a_run_directory(app: App, tmp_path: Path) -> None:
    flags = ["--trainer.max_epochs", "3", "--trainer.log_every_n_steps", "2", "--run.name", "x"]
    out = output_of(*app("fit", *SMALL, *flags))
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


@pytest.mark.slow
def test_fewer_threads_where_cores_are_busy(tmp_path: Path) -> None:
    """The record has the number of threads, the last lines report the load, and `--run.threads` is kept."""
    context = multiprocessing.get_context("fork")
    busy = [context.Process(target=never_ends, daemon=True) for _ in range(os.cpu_count() or 1)]
    for each in busy:
        each.start()
    try:
        flags = [*SMALL, "--trainer.max_epochs", "2", "--trainer.log_every_n_steps", "2", "--run.test", "false"]
        for name, more, threads in (("auto", [], 1), ("two", ["--run.threads", "2"], 2)):
            where = ["--run.root", tmp_path, "--run.name", name]
            out = output_of(*start_app("fit", *flags, *more, *where, env={"OMP_NUM_THREADS": None}))
            assert record(tmp_path / name / "version_0")["threads"] == threads
            assert re.search(rf"^time .*; other programs took [\d.]+ of {os.cpu_count()} cores$", out, re.MULTILINE), (
                out
            )
    finally:
        for each in busy:
            each.kill()


def test_set_up_begins_with_the_command(tmp_path: Path) -> None:
    """The process may be an older shell: `bash -c "sleep 30 && python -m app fit"` replaces itself."""
    flags = [*SMALL, "--trainer.max_steps", "2", "--run.test", "false", "--run.root", tmp_path, "--run.name", "x"]
    waits = (
        "import os, sys, time; time.sleep(5); os.execv(sys.executable, [sys.executable, '-m', 'app', *sys.argv[1:]])"
    )
    began = time.time()
    subprocess.run([sys.executable, "-c", waits, "fit", *map(str, flags)], cwd=ROOT, timeout=200, check=True)
    assert record(tmp_path / "x" / "version_0")["setup_s"] < time.time() - began - 5


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
    output_of(*start_app("fit", *SMALL, *way, *flags))
    found = record(tmp_path / "x" / "version_0")
    times = found["time_per_step"]
    assert times["n"] == 20
    phases = ("data", "forward_backward", "communication", "optimizer", "rest")
    assert min(times[phase] for phase in phases) > 0
    assert 0 < times["launch"] <= times["forward_backward"] * 1.01
    speed = found["throughput"]
    whole = 1000 * found["global_batch_size"] / speed["median"]
    assert sum(times[phase] for phase in phases) == pytest.approx(whole, rel=1e-3), "one clock, and the same windows"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", ["auto", "dp", "ddp"])
def test_where_the_time_of_a_step_goes_on_cuda(strategy: str, tmp_path: Path) -> None:
    flags = ["--trainer.accelerator", "cuda", "--trainer.strategy", strategy, "--trainer.max_steps", "90"]
    flags += ["--trainer.log_every_n_steps", "5", "--run.test", "false", "--run.root", tmp_path, "--run.name", "x"]
    output_of(*start_app("fit", *SMALL, *flags))
    found = record(tmp_path / "x" / "version_0")
    times = found["time_per_step"]
    assert 0 < times["launch"] <= times["forward_backward"] * 1.01
    assert found["throughput"]["n"] < 17, "the windows that were timed do not count"
    assert (times["communication"] > 0) == (torch.cuda.device_count() > 1 and strategy != "auto")


def test_a_profiler_of_the_users_own_is_left_alone(app: App, tmp_path: Path) -> None:
    output_of(*app("fit", *SMALL, "--trainer.max_steps", "9", "--trainer.profiler", "simple", "--run.name", "x"))
    assert record(tmp_path / "runs" / "x" / "version_0")["time_per_step"] is None


def test_outside_of_the_command_line(app: App, tmp_path: Path) -> None:
    """As in a notebook: a checkpoint loads without a trainer, and drawing leaves the notebook's pyplot alone."""
    import matplotlib

    from app.modules import CIFARCNN

    matplotlib.use("pdf")
    before = dict(matplotlib.rcParams)
    output_of(*app("fit", *SMALL, "--trainer.max_epochs", "1"))
    assert dict(matplotlib.rcParams) == before
    assert not matplotlib.pyplot.get_fignums()
    model = CIFARCNN.load_from_checkpoint(
        tmp_path / "runs" / "LeNet-Synthetic" / "version_0" / "checkpoints" / "best.ckpt"
    )
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


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
    output_of(*app("fit", *data, "--trainer.max_epochs", "1", "--run.name", "x", *QUIET))
    written = (tmp_path / "runs" / "x" / "version_0" / "confusion_matrix.csv").read_text()
    assert written.splitlines() == ["label \\ predicted,cat", "cat,4"]


@pytest.mark.slow
def test_every_rank_and_every_replica_has_its_memory(app: App, tmp_path: Path) -> None:
    for strategy, rows in (("dp", [0, 0, 0]), ("ddp_fork", [0, 1, 2])):
        flags = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "3"]
        run_app = app if strategy == "dp" else start_app
        output_of(
            *run_app(
                *("fit", *SMALL, *flags, "--data.batch_size", "18", "--trainer.max_epochs", "1"),
                *("--run.root", tmp_path, "--run.name", strategy),
            )
        )
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
    found = record(tmp_path / "Fails-TheirData" / "version_0")
    assert found["status"] == "failed"
    assert "the third step is broken" in found["error"]


@pytest.mark.slow
def test_the_rank_that_failed_is_named(tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    flags = ["--model", "user_code.FailsOnRank1", "--data", "user_code.TheirData", "--run.root", tmp_path, *QUIET]
    code, out = start_app("fit", *flags, *way)
    assert code != 0, out
    found = record(tmp_path / "FailsOnRank1-TheirData" / "version_0")
    assert found["status"] == "failed"
    assert re.fullmatch(r"rank 1 \(process \d+\) failed with exit code 1: RuntimeError: only here", found["error"])


def test_twenty_runs_of_one_name_at_once(tmp_path: Path) -> None:
    """Each has a folder of its own."""
    together = threading.Barrier(20)

    def claim(_: int) -> str:
        together.wait(30)
        return claim_version(tmp_path / "x").name

    with ThreadPoolExecutor(20) as pool:
        claimed = list(pool.map(claim, range(20)))
    assert sorted(claimed) == sorted(f"version_{number}" for number in range(20))


def test_a_run_beside_one_that_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which removes the folder of its name before this one has made its own there."""
    made, make = [], os.mkdir

    def beside(path: Path, *mode: int) -> None:
        made.append(Path(path).name)
        if made.count("version_0") == 2:
            (tmp_path / "x").rmdir()
        make(path, *mode)

    monkeypatch.setattr(os, "mkdir", beside)
    assert claim_version(tmp_path / "x") == tmp_path / "x" / "version_0"
    assert made.count("x") == 2, "it was removed"


def test_threads(tmp_path: Path) -> None:
    flags = [*SMALL, "--trainer.max_steps", "1", "--run.test", "false", "--run.root", tmp_path]
    output_of(*fork_app("fit", *flags, "--run.threads", "2", env={"OMP_NUM_THREADS": "1"}))
    assert record(tmp_path / "LeNet-Synthetic" / "version_0")["threads"] == 2
    assert "--run.threads 0: give more than 0" in error_of(*fork_app("fit", *flags, "--run.threads", "0"))
