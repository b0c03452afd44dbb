"""`plan`: formulas against hand calculations, the command, and predictions against measurements."""

import json
import math
import re
import shutil
import sys
import warnings
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from cluster.hosts import Network
from forked import fork_fit
from harness import QUIET, App, error_of, options, output_of, record_of, tiny
from jsonargparse import Namespace

from app.command.configuration import resolve
from app.command.resolved import Resolved
from app.errors import UserError
from app.lab.plan.command import _machines
from app.lab.plan.cost_model import (
    AGREEMENT,
    Bucket,
    Line,
    Machines,
    Step,
    fit_step,
    make_buckets,
    predict,
    spread_of,
)
from app.lab.plan.measure import measure_step
from app.lab.plan.report import advice, recommendation
from app.record import Phases, Record, Throughput
from app.system.interconnect import Link, fit_line, fit_link, measure_all_reduce
from app.system.machine import usable_cores

AT_H1 = {"MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
SLOW = Link(bandwidth=100.0, latency=0.5)  # bytes per second, seconds
FREE = Link(math.inf, 0.0)


def step(**phases: Any) -> Step:
    """Return a step of zero seconds, except for the given phases."""
    nothing: dict[str, Any] = dict.fromkeys(("data", "forward", "backward"), Line(0.0, 0.0))
    return Step(**{**nothing, "update": 0.0, "rest": 0.0, "buckets": (), **phases})


def timed(batch: int, *windows: Any, **phases: Any) -> Record:
    """Return the record of a run: rates of its windows, and the milliseconds of its phases."""
    rates = Throughput(*windows)
    return Record(global_batch_size=batch, time_per_step=Phases(**phases), throughput=rates)


# -- the mathematics, worked by hand


def test_ring_all_reduce() -> None:
    """On n ranks, an all-reduce takes 2·(n-1)/n·size/bandwidth + 2·(n-1)·latency."""
    assert SLOW.all_reduce(400, 1) == 0
    assert SLOW.all_reduce(400, 2) == 4 + 2 * 0.5  # 2·1/2·400/100 + 2·1·0.5
    assert SLOW.all_reduce(400, 4) == 6 + 6 * 0.5  # 2·3/4·400/100 + 2·3·0.5


def test_communication_overlaps_with_the_backward_pass() -> None:
    """Buckets are reduced one after another, while the backward pass of 10 s goes on.

    In the first case, buckets of 200 bytes are full after 2 s and 10 s. On two ranks, the
    all-reduce of a bucket takes 3 s: 2 s for the bytes, and 1 s of latency.
    """
    agreed = SLOW.all_reduce(AGREEMENT, 2)
    for buckets, seconds in (
        # the first bucket is reduced from 2 s to 5 s, the second from 10 s to 13 s
        ((Bucket(200, 0.2), Bucket(200, 1.0)), 13),
        # a first bucket of 1000 bytes is reduced from 2 s to 13 s, the second from 13 s to 16 s
        ((Bucket(1000, 0.2), Bucket(200, 1.0)), 16),
        # both are reduced during the backward pass, from 2 s to 5 s and from 5 s to 8 s
        ((Bucket(200, 0.2), Bucket(200, 0.3)), 10),
    ):
        one = step(backward=Line(10.0, 0.0), buckets=buckets)
        assert one.ddp(64, 1, SLOW) == 10
        assert one.ddp(64, 2, SLOW) == pytest.approx(seconds + agreed)


def test_devices_share_data_and_passes_but_not_update_and_rest() -> None:
    lines = {"data": Line(1, 0.1), "forward": Line(2, 0.2), "backward": Line(3, 0.3)}
    one = step(**lines, update=4.0, rest=5.0, buckets=(Bucket(100, 1),))
    assert one.ddp(10, 1, FREE) == pytest.approx(1 + 1 + 2 + 2 + 3 + 3 + 4 + 5)
    # the largest part has 3 of 10 images
    assert one.ddp(10, 4, FREE) == pytest.approx(1 + 0.3 + 2 + 0.6 + 3 + 0.9 + 4 + 5)


def test_fitted_line_has_no_negative_offset_or_slope() -> None:
    assert fit_line([1, 2, 10], [5.0, 7.0, 23.0]) == pytest.approx((3, 2))
    assert fit_line([1, 2, 3], [1.0, 2.0, 3.0]) == pytest.approx((0, 1))
    offset, slope = fit_line([1, 2, 3], [3.0, 2.0, 1.0])
    assert slope == 0
    assert 1 < offset < 3


def test_link_is_fitted_to_its_all_reduces() -> None:
    link = Link(2e9, 30e-6)
    measured = [(size, link.all_reduce(size, 4)) for size in (1024, 65536, 2**24)]
    assert astuple(fit_link(measured, 4)) == pytest.approx(astuple(link))


def test_step_is_fitted_to_records() -> None:
    full = timed(100, data=1.0, forward_backward=30.0, optimizer=2.0, rest=4.0)
    half = timed(50, data=1.0, forward_backward=20.0, optimizer=4.0, rest=4.0)
    fitted = fit_step([full, half], backward=0.6, buckets=[Bucket(8, 1.0)])
    assert fitted.launch_known
    assert fitted.forward(100) + fitted.backward(100) == pytest.approx(0.030)
    assert fitted.backward(50) == pytest.approx(0.6 * 0.020)
    assert fitted.backward.launch == pytest.approx(0.006)
    assert fitted.update == pytest.approx(0.003)
    assert fitted.rest == pytest.approx(0.004)
    alone = fit_step([full], 0.6, [])
    assert not alone.launch_known
    assert alone.forward(10) + alone.backward(10) == pytest.approx(0.003)


def test_buckets_are_those_of_ddp() -> None:
    mib = 2**20
    gradients = [(mib // 2, 0.1), (mib // 2, 0.2), (20 * mib, 0.5), (6 * mib, 0.8), (mib, 1.0)]
    assert make_buckets(gradients) == [Bucket(mib, 0.2), Bucket(26 * mib, 0.8), Bucket(mib, 1.0)]


def test_predictions_on_several_nodes() -> None:
    one = step(forward=Line(0.0, 0.01), backward=Line(0.0, 0.02), buckets=(Bucket(100, 1.0),))
    machines = Machines(per_node=2, link=FREE, node_link=SLOW)
    table = predict(one, 100, [1, 2, 4], machines)
    assert list(table["nodes"]) == [1, 1, 2]
    alone, node, nodes = table.to_dict("records")
    assert alone["samples_per_s"] == pytest.approx(100 / 3)
    assert node["speed_up"] == pytest.approx(2)
    assert node["efficiency"] == pytest.approx(1)
    assert node["waiting_ms"] == pytest.approx(0)
    waiting = 1.5 + 6 * 0.5 + SLOW.all_reduce(AGREEMENT, 4)  # by SLOW, the slowest link of the ring
    assert nodes["step_ms"] == pytest.approx(1000 * (0.75 + waiting))
    assert nodes["waiting_ms"] == pytest.approx(1000 * waiting)
    scaled = predict(one, 100, [4], machines, scale_batch=True).iloc[0]
    assert scaled["global_batch"] == 400
    assert scaled["step_ms"] == pytest.approx(1000 * (3 + waiting))


def test_range_combines_deviations_of_steps_windows_and_all_reduces() -> None:
    runs = []
    for batch in (10, 20):  # an exact line
        runs.append(timed(batch, 12.0, 10.0, 15.0, forward_backward=100.0 * batch))
    one = fit_step(runs, 0.5, [Bucket(100, 1.0)])
    assert one.spread == pytest.approx((0.8, 1.2))
    measured = [(100, 0.5 * SLOW.all_reduce(100, 2)), (400, 2 * SLOW.all_reduce(400, 2))]
    spread = spread_of(seconds / SLOW.all_reduce(size, 2) for size, seconds in measured)
    assert spread == (0.5, 2.0)
    row = predict(one, 100, [2], Machines(2, SLOW, SLOW, link_spread=spread)).iloc[0]
    # two devices with 50 images each take 5 s; the bucket takes 2 s, the agreement 1.08 s
    assert row["samples_per_s"] == pytest.approx(100 / (5 + 2 + 1.08))
    assert row["samples_per_s_low"] == pytest.approx(100 / (1.2 * 5 + 2 * (2 + 1.08)))
    assert row["samples_per_s_high"] == pytest.approx(100 / (0.8 * 5 + 0.5 * (2 + 1.08)))
    assert row["speed_up_low"] == pytest.approx(row["samples_per_s_low"] / 10)


# -- the command


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a short run, on which a plan can be based."""
    root = tmp_path_factory.mktemp("run")
    return fork_fit(root, *tiny(640, 64, test=False, max_steps=12)).rename(root / "moved")


NETWORK = ["--bandwidth=25GB/s", "--latency=20us"]
CPU = ["--trainer.accelerator=cpu"]
TINY_DATA = ["--data=Synthetic", *options(images=240, batch_size=24)]


@pytest.mark.usefixtures("drawn")
def test_plan_from_a_run_doubts_the_speed_up(app: App, run_dir: Path, tmp_path: Path) -> None:
    """The machine was busy, and the run has only one batch size."""
    busy = shutil.copytree(run_dir, tmp_path / "busy")
    record = record_of(busy) | {"others_cores": 1.8}
    record["hardware"]["cores"] = 2
    (busy / "run.json").write_text(json.dumps(record))
    words = ["--run", busy, *NETWORK, "--node_bandwidth=100Mbit/s", "--per_node=8"]
    words += ["--max_devices=16384", "--scale_batch=true"]
    out = " ".join(output_of(*app("plan", "--root", tmp_path, *words)).split())
    assert "Other programs took 1.8 of 2 cores while the steps were measured" in out
    assert "predicted on a busy machine without the cost of launching a step" in out
    folder = tmp_path / "plan/version_0"
    html = (folder / "report.html").read_text()
    assert html.count("<svg") == 1
    assert re.findall(r"<h1>LeNet-Synthetic, batch 64: take .*</h1>", html)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', html), "it needs no other file"
    table = pd.read_csv(folder / "plan.csv")
    assert list(table["devices"]) == [2**exponent for exponent in range(15)]
    assert list(table["nodes"]) == [1, 1, 1, *(2**exponent for exponent in range(12))]
    assert "the cost of launching a step is unknown" in out
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["machines"]["node_link"] == pytest.approx({"bandwidth": 12.5e6, "latency": 20e-6})
    assert sum(bucket["size"] for bucket in plan["step"]["buckets"]) == 62006 * 4
    assert list(table["global_batch"])[-1] == 64 * 16384
    measured = record["time_per_step"]
    step_ms = sum(measured[phase] for phase in ("data", "forward_backward", "optimizer", "rest"))
    assert table["step_ms"].iloc[0] == pytest.approx(step_ms, rel=0.01)


def test_fixed_batch_limits_the_devices(app: App, run_dir: Path, tmp_path: Path) -> None:
    words = ["plan", "--root", tmp_path, "--run", run_dir, *NETWORK]
    out = output_of(*app(*words, "--max_devices=64", "--per_node=6"))
    table = pd.read_csv(tmp_path / "plan/version_0/plan.csv")
    assert list(table["devices"]) == [1, 2, 4, 6, 12, 24, 48]
    assert list(table["shared_equally"]) == [True, True, True, False, False, False, False]
    assert "hypothetical" in out
    out = output_of(*app(*words, "--data.batch_size=8"))
    assert "A batch of 8 has no images for more than 8 devices" in " ".join(out.split())


WRONG = [
    (["--bandwidth=25GB"], "--bandwidth 25GB: give bytes or bits per second, such as 25GB/s"),
    (["--latency=20"], "--latency 20: give a time, such as 20us"),
    (["--per_node=600", *CPU, *TINY_DATA], "--per_node 600: this machine has cores for"),
    (
        [*CPU, *TINY_DATA, "--run.threads=600"],
        "cores for 1 process(es) of this training; see --run.threads",
    ),
    (
        ["--per_node=1", "--node_bandwidth=1GB/s", *CPU, *TINY_DATA],
        "give --per_node, --bandwidth and --lat",
    ),
    (["--run=x", "--model.network=lenet"], "--model.network lenet: --run already defines"),
    (["--run=nowhere", *NETWORK], "--run nowhere: nowhere/run.json cannot be read"),
    (["--bandwith=1GB/s"], "--bandwith: there is no such flag: did you mean --bandwidth?"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_impossible_plan_is_rejected(app: App, words: list[str], message: str) -> None:
    assert message in error_of(*app("plan", *words))


def test_one_gpu_does_not_measure_the_network_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not measure CPU processes instead."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = ("bandwidth", "latency", "node_bandwidth", "node_latency", "per_node")
    with pytest.raises(
        UserError, match=r"this machine has 1 GPU\(s\): give --per_node, --bandwidth and --latency"
    ):
        _machines(Namespace(**dict.fromkeys(names)), devices=8, cuda=True, say=print)


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="two processes need two cores")
def test_plan_from_steps_measured_here(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "app.lab.plan.command.measure_all_reduce", lambda: [(1024, 1e-4), (2**20, 2e-3)]
    )
    words = [*CPU, *TINY_DATA, "--per_node=2", "--model.warmup=1ep"]
    words += ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"]
    out = output_of(*app("plan", *words))
    assert "More than 2 devices are not predicted" in out
    table = pd.read_csv(tmp_path / "runs/plan/version_0/plan.csv")
    assert list(table["devices"]) == [1, 2]


def planned(spread: tuple[float, float] = (1.0, 1.0)) -> tuple[str, str]:
    """Return title and advice for a training that scales perfectly to four devices."""
    passes = {"forward": Line(0.0, 0.01), "backward": Line(0.0, 0.01)}
    one = step(**passes, images=(64, 16), spread=spread)
    table = predict(one, 64, [1, 2, 4], Machines(2, FREE, FREE))
    return recommendation(table, one), advice(table, scaled=False)


def test_one_recommendation_by_the_low_end_of_the_prediction() -> None:
    """The efficiency must exceed one half even at the low end of the range."""
    title, _ = planned()
    best = "take ddp on 4 devices of 2 nodes: 4.00 × one device"
    assert title == f"{best} (4.00–4.00), predicted"
    assert planned((0.5, 1.6))[0] == f"{best} (2.50–8.00), predicted"
    title, why = planned((0.5, 2.1))
    assert title == "take one device"
    assert why.startswith(
        "No other variant certainly reaches half of the ideal. Try a larger `--data.batch_size`, or"
    )


MLP = ["--model=FashionMLP", "--model.repeats=4", "--model.hidden=[64]", "--data=Synthetic"]
MLP += options(accelerator="cpu", like="FashionMNIST", images=4000, batch_size=128)


@pytest.mark.cluster
def test_step_on_two_hosts_takes_about_as_long_as_predicted(hosts: Network, tmp_path: Path) -> None:
    """The link is so slow that it takes nearly all the time; a warning shows the difference."""
    fit = ["fit", *MLP]
    both = [hosts.hosts["h1"], hosts.hosts["h2"]]
    step, _ = measure_step(fit, [], Resolved(resolve(fit)), print)
    shape = "tc qdisc replace dev eth0 root tbf rate 10mbit burst 64kb latency 500ms"
    for host in both:
        host.run(*shape.split())
    fitted = fit_link(measure_all_reduce(), 2)
    link = Link(min(fitted.bandwidth, 1e7 / 8), fitted.latency)
    flags = options(strategy="ddp", num_nodes=2, devices=1, max_epochs=-1, max_steps=16)
    flags += options(root=tmp_path, name="x", test=False, limit_val_batches=0)
    flags += options(enable_checkpointing=False, log_every_n_steps=1)
    command = [sys.executable, "-m", "app", *fit, *QUIET, *flags]
    processes = []
    for node, host in enumerate(both):
        processes.append(host.start(*command, env={**AT_H1, "NODE_RANK": str(node)}))
    out = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], out
    record = record_of(tmp_path / "x/version_0")
    predicted = step.ddp(128, 2, link)
    measured = 128 / record["throughput"]["median"]
    text = f"{1000 * predicted:.2f} ms predicted, {1000 * measured:.2f} ms measured a step"
    warnings.warn(f"2 hosts at 10 Mbit/s: {text}", stacklevel=1)
    assert 0.5 < predicted / measured < 2, "a slow link takes the time"
