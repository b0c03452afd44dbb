"""A run's directory and record, also if the run fails or is interrupted."""

import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from forked import fork_app
from harness import (
    ON_GPU,
    QUIET,
    ROOT,
    SLOW,
    on_cpu,
    options,
    record,
    record_of,
    slow,
    start_app,
    tiny,
)
from stuck_code import never_ends

from app.monitor.loggers import claim_version
from app.record import PHASES

SMALL = tiny(200, 20)


@pytest.mark.usefixtures("drawn")
def test_a_run_writes_its_files_and_record(app, tmp_path):
    """Drawing does not change pyplot's state, which notebooks share."""
    import matplotlib.pyplot

    matplotlib.use("pdf")
    before = dict(matplotlib.rcParams)
    out = app("fit", *SMALL, *options(max_epochs=3, log_every_n_steps=2, name="x"))
    run = tmp_path / "runs/x/version_0"
    assert dict(matplotlib.rcParams) == before
    assert not matplotlib.pyplot.get_fignums()
    files = {path.name for path in run.iterdir()}
    assert "wandb" not in files
    assert files >= {"config.yaml", "metrics.csv", "run.json", "checkpoints"}
    assert files >= {"confusion_matrix.png", "most_wrong.png", "train_batch.png"}
    assert str(run) in out
    assert f"--ckpt_path {run}/checkpoints/last.ckpt --trainer.max_epochs 6" in out
    assert "slow" not in out

    written = record_of(run)
    assert written["command"].startswith("python -m app fit --run.root")
    assert Path(written["checkpoint"]["best"]).exists()
    assert Path(written["checkpoint"]["last"]).exists()
    assert yaml.safe_load(Path(written["config"]).read_text())["run"]["name"] == "x"
    resolved = {
        "status": "completed",
        "error": None,
        "strategy": "single_device",
        "devices": 1,
        "num_nodes": 1,
        "world_size": 1,
        "replicas": 1,
        "precision": "32-true",
        "global_batch_size": 20,
        "placement": "memory",
        "seed": 42,
        "threads": 1,
        "tested": written["checkpoint"]["best"],
    }
    assert resolved.items() <= written.items()
    assert [row["epoch"] for row in written["epochs"]] == [0, 1, 2]
    for row in written["epochs"]:
        assert min(row["train_loss"], row["val_loss"], row["seconds"]) > 0
    assert written["train_loss"] == {"last": written["epochs"][-1]["train_loss"]}
    assert 0 <= written["test"]["acc"] <= 1
    assert min(written["setup_s"], written["train_s"]) > 0
    # 9 steps per epoch make 4 windows of 2; the first of 12 windows is excluded
    speed = written["throughput"]
    assert (speed["n"], speed["unit"]) == (11, "samples/s")
    assert speed["min"] <= speed["median"] <= speed["max"]
    times = written["time_per_step"]
    assert (times["n"], times["unit"]) == (20, "ms")
    assert [phase for phase in PHASES if not times[phase] > 0] == ["communication"]
    (memory,) = written["peak_memory"]
    assert memory["rank"] == 0
    assert memory["total_gib"] > memory["host_rss_gib"] > 0.1
    (row,) = written["ranks"]
    assert row["compute"] > row["data"] > row["wait"] == 0
    assert {"python", "torch", "lightning", "app", "commit"} <= written["versions"].keys()
    assert set(written["hardware"]) == {"cpu", "cores", "gpus"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("batches", ["NamedData", "HiddenData"])
def test_throughput_of_batches_that_begin_with_names(batches, fit):
    data = ["--model=user_code.TheirModel", f"--data=user_code.{batches}", *QUIET]
    flags = options(loader="lightning", max_epochs=2, log_every_n_steps=1)
    for epoch in record_of(fit(*data, *flags))["epochs"]:
        assert (epoch["samples_per_s"] is None) == (batches == "HiddenData")


@SLOW
def test_threads_where_cores_are_busy(tmp_path):
    """The number of threads follows the cores or `--run.threads`; the end reports the load."""
    context = multiprocessing.get_context("fork")
    busy = [context.Process(target=never_ends, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in busy:
        process.start()
    try:
        flags = [*SMALL, *options(max_epochs=2, log_every_n_steps=2, test=False)]
        for requested, threads in (("auto", os.cpu_count()), ("1", 1)):
            root = tmp_path / requested
            flags += options(threads=requested, root=root)
            out = start_app("fit", *flags, env={"OMP_NUM_THREADS": None})
            assert record(root)["threads"] == threads
            pattern = rf"^time .*; other programs took [\d.]+ of {os.cpu_count()} cores$"
            assert re.search(pattern, out, re.MULTILINE), out
    finally:
        for process in busy:
            process.kill()


@SLOW
def test_set_up_time_begins_with_the_command(tmp_path):
    """Set-up time counts from the start of the command, not of its process.

    The process may be older: in `bash -c "sleep 30 && python -m app fit"`, the shell's process
    becomes Python's.
    """
    flags = [*SMALL, *options(max_steps=2, test=False, root=tmp_path)]
    waits = (
        "import os, sys, time; time.sleep(5); "
        "os.execv(sys.executable, [sys.executable, '-m', 'app', *sys.argv[1:]])"
    )
    began = time.time()
    subprocess.run([sys.executable, "-c", waits, "fit", *flags], cwd=ROOT, timeout=200, check=True)
    assert record(tmp_path)["setup_s"] < time.time() - began - 5


def test_set_up_time_when_the_date_jumps(fit, monkeypatch):
    """The run also keeps a user's profiler, and then measures no phases."""
    year = 365 * 86400
    dates = itertools.cycle([time.time(), time.time() - year, time.time() + year])
    monkeypatch.setattr("time.time", lambda: next(dates))
    written = record_of(fit(*SMALL, *options(max_steps=9, test=False, profiler="simple")))
    assert 0 < written["setup_s"] < 60
    assert written["time_per_step"] is None


CUDA = options(accelerator="cuda", max_steps=90)
PHASED = [
    on_cpu("dp", max_steps=60, threads=2),
    slow(on_cpu("ddp", max_steps=60, threads=2)),
    *(
        pytest.param([*CUDA, *options(strategy=name)], marks=ON_GPU)
        for name in ("auto", "dp", "ddp")
    ),
]


@SLOW
@pytest.mark.parametrize("flags", PHASED)
def test_phases_add_up_to_a_step(flags, tmp_path):
    """The phases add up to the step's duration. Under dp, communication is not timed apart."""
    more = options(log_every_n_steps=5, test=False, root=tmp_path)
    start_app("fit", *SMALL, *flags, *more)
    written = record(tmp_path)
    times = written["time_per_step"]
    assert times["n"] == 20
    is_ddp = written["strategy"] == "ddp" and written["replicas"] > 1
    assert [phase for phase in PHASES if not times[phase] > 0] == ["communication"] * (not is_ddp)
    assert 0 < times["launch"] <= times["forward_backward"] * 1.01
    whole = 1000 * written["global_batch_size"] / written["throughput"]["median"]
    assert sum(times[phase] for phase in PHASES) == pytest.approx(whole, rel=1e-3), (
        "one clock, and the same windows"
    )


THEIRS = ["--model=user_code.Fails", "--data=user_code.TheirData", *QUIET]
RANK_1 = r"rank 1 \(process \d+\) failed with exit code 1: RuntimeError: only here"
FAILING = [
    ("auto", 1, ".*only here.*"),
    slow("ddp_spawn", 1, ".*only here.*"),
    slow("ddp", 2, RANK_1),
]


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(("strategy", "devices", "reason"), FAILING)
def test_a_failed_run_says_why(strategy, devices, reason, tmp_path):
    """Output, record and report give the reason, also if only the last rank fails."""
    flags = [*THEIRS, *on_cpu(strategy, devices, root=tmp_path)]
    assert re.search(reason, fork_app("fit", *flags, code=1))
    written = record(tmp_path)
    assert written["status"] == "failed"
    assert re.fullmatch(reason, written["error"])
    page = Path(written["run_dir"], "report.html").read_text()
    assert re.search(f"<title>Failed .*{reason}", page)


def test_concurrent_runs_get_separate_folders(tmp_path):
    """Each of 20 simultaneous runs gets a separate folder, from `version_0` to `version_19`."""
    together = threading.Barrier(20)

    def claim(_):
        together.wait(30)
        return claim_version(tmp_path / "x").name

    with ThreadPoolExecutor(20) as pool:
        claimed = list(pool.map(claim, range(20)))
    assert sorted(claimed) == sorted(f"version_{number}" for number in range(20))


def test_folder_of_a_run_beside_one_that_is_refused(monkeypatch, tmp_path):
    """A run creates its folder even if a rejected run has just removed the parent folder."""
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=[FileNotFoundError, None]))
    assert claim_version(tmp_path / "x") == tmp_path / "x/version_0"
