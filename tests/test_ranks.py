"""Slow and hung ranks: their detection, and the lines about them."""

import inspect
import itertools
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import stuck_code
import torch
from forked import fork_app, fork_fit
from harness import QUIET, SLOW, options, record, slow

from app.launch.watchdog import where
from app.monitor import rank_times
from app.monitor.rank_times import RankTimes, slower
from app.monitor.windows import Windows

DATA = [*options(images=600, batch_size=20, test=False, name="x"), *QUIET]
CPU = options(accelerator="cpu", log_every_n_steps=4)
DDP = options(strategy="ddp_fork", devices=2)


# -- slow ranks
# ------------------------------------------------------------------------------------------


ROWS = [
    ([(1, 9, 0)], []),
    ([(1, 9, 2), (1, 9.9, 1)], []),
    ([(1, 9, 2), (1, 10.2, 1)], ["rank 1 (node 1): 12 % slower than the median, in compute"]),
    (
        [(1, 9, 5), (1, 9, 5), (5, 9, 0), (1, 9, 5)],
        ["rank 2 (node 1): 40 % slower than the median, in data"],
    ),
    ([(1, 9, 0), (2, 10, 0)], ["rank 1 (node 1): 20 % slower than the median, in data"]),
    ([(1, 9, 0), (1, 3, 6)], ["rank 0 (node 0): 150 % slower than the median, in compute"]),
]


@pytest.mark.parametrize(("rows", "said"), ROWS)
def test_slower(rows, said):
    assert list(slower(rows, [0, 1, 1, 1]).values()) == said


def test_figures_of_ranks():
    """Times are medians of windows; other programs take what rank zero's node has not used."""
    times = RankTimes(1.0)
    times.places = [(0, (0, 1)), (0, (0, 1)), (1, (0, 1))]
    for data in (0.1, 0.4, 0.3):
        row = [data, 0.2, 0.0, 1.5]
        times.hear(10.0, [[*row, 30, 8, 0], [*row, 30, 7, 0], [*row, 99, 50, 0]])
    assert times.others_cores == (30 - 8 - 7) / 10
    assert times.memory.points == [[10.0, 1.5, 1.5, 1.5]] * 3
    assert [(row.rank, row.node, row.data) for row in times.ranks] == [
        (0, 0, 300),
        (1, 0, 300),
        (2, 1, 300),
    ]
    assert not any(row.slow for row in times.ranks)
    times.hear(10.0, [[*row, 9, 8, 0], [*row, 9, 7, 0], [*row, 9, 50, 0]])
    assert times.others_cores == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_times_of_a_step(world_size, monkeypatch):
    """Data: until the computation; wait: for the others' gradients; compute: the rest.

    In 10 s, all programs took 5 s on the cores, of which the rank took 2.
    """
    for name, values in (("busy", [70.0, 75.0]), ("own", [1.0, 3.0])):
        monkeypatch.setattr(f"app.monitor.rank_times.{name}_seconds", Mock(side_effect=values))
    monkeypatch.setattr("time.perf_counter", Mock(side_effect=[3.0, 13.0]))
    trainer = SimpleNamespace(
        world_size=world_size,
        node_rank=0,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    times = RankTimes(1.0)
    times.begin(trainer)
    times.places = times.places * world_size
    monkeypatch.setattr("torch.distributed.all_gather", Mock())
    times.share(trainer, [(0.5, 1, 3, 3.25, 4)] * 2)
    assert torch.distributed.all_gather.called == (world_size == 2)
    row = times.ranks[0]
    assert (row.data, row.compute, row.wait) == (500, 2750, 250)
    assert 0.01 < times.memory.points[0][1] < 100, "GiB"
    assert times.others_cores == {1: 0.3, 2: 0.1}[world_size]
    rank_times.busy_seconds.assert_called_with(tuple(sorted(os.sched_getaffinity(0))))


@pytest.mark.parametrize(("compute", "windows"), [(1.09, 0), (1.11, 17)])
def test_windows_until_a_rank_is_slow(compute, windows, monkeypatch):
    """A rank is slow if it was slower in n windows of n > 4 √n, so in 17."""
    said = Mock()
    monkeypatch.setattr(rank_times, "rank_zero_info", said)
    times = RankTimes(1.0)
    times.places = PLACES["pinned"]
    named = 0
    for window in range(1, 40):
        times.hear(1.0, [[0, 1.12345678e-3, *[0] * 5], [0, 1.12345678e-3 * compute, *[0] * 5]])
        if said.called and not named:
            named = window
    assert named == windows
    assert times.ranks[0].compute == 1.1235


def test_ranks_are_connected_once(monkeypatch):
    monkeypatch.setattr(rank_times, "host_group", Mock())
    times = RankTimes(1.0)
    for world_size in (1, 2, 2):
        times.connect(Mock(world_size=world_size))
        assert rank_times.host_group.call_count == min(world_size - 1, 1)


PLACES = {
    "shared": [(0, (0, 1)), (0, (0, 1))],
    "pinned": [(0, (0,)), (0, (1,))],
    "nodes": [(0, (0,)), (1, (0,))],
}


CHANCES = [
    ("shared", 0.3, 0.0, 0.0, 0),
    ("shared", 0.05, 0.2, 0.0, 50),
    (
        "shared",
        0.05,
        0.0,
        0.5,
        0,
    ),  # never slow, because chance decides which rank waits for a shared core
    ("shared", 0.05, 0.5, 0.5, 50),
    ("pinned", 0.05, 0.0, 0.5, 50),
    ("nodes", 0.05, 0.0, 0.5, 50),
]


@pytest.mark.parametrize(("places", "noise", "longer", "delay", "expected"), CHANCES)
def test_chance_names_no_slow_rank(places, noise, longer, delay, expected, monkeypatch):
    """Rank 1 counts as slow in the expected number of 50 simulated runs, and rank 0 in none.

    In each of a run's 100 windows, rank 1 computes for `longer` seconds more, and waits `delay`
    seconds for a core.
    """
    monkeypatch.setattr(rank_times, "rank_zero_info", Mock())
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(50):
        times = RankTimes(1.0)
        times.places = PLACES[places]
        for window in range(1, 101):
            first, second = np.exp(noise * rng.standard_normal(2)).tolist()
            rows = [
                [0.0, first, 0.0, 1.0, 0.0, 0.0, 0.0],
                [0.0, second + longer + delay, 0.0, 1.0, 0.0, 0.0, delay],
            ]
            times.hear(float(window), rows)
        slow = [row.rank for row in times.ranks if row.slow]
        assert 0 not in slow
        count += slow == [1]
    assert count == expected
    assert rank_times.rank_zero_info.call_count == expected, "a slow rank is named once"


@SLOW
@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("devices", [2, slow(4)])
def test_rank_with_slow_data_is_named(devices, tmp_path):
    """The run reports the last rank as slow, during training and at the end."""
    flags = [*DATA, *CPU, *DDP, *options(devices=devices, max_epochs=3, root=tmp_path)]
    out = fork_app("fit", "--data=stuck_code.SleepsInData", *flags)
    last = devices - 1
    line = rf"rank {last} \(node \d\): \d+ % slower than the median, in data"
    assert len(re.findall(line, out)) >= 2, out
    assert "slow            rank" in out
    written = record(tmp_path)
    assert {len(point) for point in written["course"]["memory_gib"]} == {1 + devices}
    page = (tmp_path / "x/version_0/report.html").read_text()
    assert f"(ddp_fork, {devices} × CPU)</title>" in page
    assert f"20 = {devices} × {20 // devices}" in page
    assert "A step on each rank: wait is for the others" in page
    *others, slow = written["ranks"]
    assert [row["rank"] for row in others] == list(range(last))
    assert slow["data"] > 20
    for row in others:
        assert slow["data"] + slow["compute"] > 1.1 * (row["data"] + row["compute"])
        assert slow["wait"] < row["wait"], "the others wait for it"


def test_windows_by_hand(monkeypatch):
    """Two epochs of two windows, and half a window; the first epoch's rates are not kept."""
    now = itertools.count(8)  # each look at the clock takes a second
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")), log_every_n_steps=2,
        accumulate_grad_batches=1, num_training_batches=5,
        global_step=6, current_epoch=0, estimated_stepping_batches=26,
    )  # fmt: skip
    windows = Windows(1)
    assert windows.end_epoch(trainer) == 1, "resumed after an epoch's last step"
    windows.begin_training(trainer)  # 10
    assert windows.time_left(trainer) is None
    for epoch in (0, 1):
        trainer.current_epoch = epoch
        if epoch:
            windows.begin_epoch(trainer)  # 18
        for samples in (4 + epoch, 4, 4, 2, 1):  # two looks in the second and fourth step
            windows.add_step(trainer, samples)
            trainer.global_step += 1
        assert windows.epoch_rates == [(8 + epoch) / 3, 6 / 3]
        assert windows.end_epoch(trainer) == 8  # 18, then 27
    assert windows.rates == [3, 2]
    assert windows.samples_per_step == [4.5, 3]
    assert windows.course.points == [[3, 2.6667], [6, 2], [12, 3], [15, 2]]
    assert windows.last_step - windows.first_step == 17
    assert windows.time_left(trainer) == 10 * (28 - 10) / 10
    trainer.global_step = 7
    assert windows.time_left(trainer) == 19 * (29 - 10)
    trainer.global_step = 26
    assert windows.time_left(trainer) is None


# -- stuck ranks
# ------------------------------------------------------------------------------------------


def line_of(cls, text):
    lines, first = inspect.getsourcelines(cls)
    return first + next(index for index, line in enumerate(lines) if text in line)


def line(cls, text, hook):
    """Return a pattern of a line of code that contains a text, or of the next one."""
    at = line_of(cls, text)
    return f"stuck_code.py:({at}|{at + 1}) {hook}"


DATASET = ["--data=Synthetic"]
WORKER = ["--data.num_workers=1", "--data.augment=stuck_code.LoopsInAWorker"]
HANGS = [
    (
        ["--model=stuck_code.ReducesAlone", *DATASET],
        rf"rank 1 is in step 13, {line(stuck_code.ReducesAlone, 'all_reduce', 'training_step')}",
    ),
    slow(
        ["--data=stuck_code.LoopsInData", "--trainer.strategy=ddp"],
        "rank 1 is in step 13, "
        + line(stuck_code.LoopsInData, "while True", "on_after_batch_transfer"),
    ),
    slow(
        ["--model=stuck_code.LeavesTheEpochEarly", *DATASET],
        r"it hangs, or the link to it is cut; rank 1 is at step 13, \w+.py:\d+ on_advance_end",
    ),
    # the worker's code is named, because the rank only waits for the worker
    slow([*DATASET, *WORKER], r"rank 1 is in step \d+, stuck_code.py:\d+ forward"),
    slow(
        ["--data=stuck_code.LoopsInSetup"],
        f"rank 1 is in {line(stuck_code.LoopsInSetup, 'while', 'setup')}",
    ),
]


@SLOW
@pytest.mark.parametrize(("flags", "place"), HANGS)
def test_hung_rank_is_named(flags, place, tmp_path):
    """If a rank hangs, the run ends after the timeout, and names the rank and its line.

    The stacks of both ranks are written to files.
    """
    flags = [*DATA, *CPU, *DDP, *flags, "--trainer.max_epochs=2", "--cluster.timeout=8"]
    out = fork_app("fit", *flags, "--run.root", tmp_path, timeout=90, code=1)
    message = "no answer from another rank within --cluster.timeout: "
    message += rf"{place}; waiting: rank 0 \(stacks: (.*)\)"
    (error,) = re.findall(f"^error: ({message})$", out, re.MULTILINE)
    assert "Traceback" not in out
    assert record(tmp_path)["error"] == error[0]
    folder = Path(error[-1])
    assert sorted(file.name for file in folder.iterdir()) == ["rank_0.txt", "rank_1.txt"]
    assert "most recent call first" in (folder / "rank_1.txt").read_text()


@SLOW
def test_slow_rank_leaves_no_stacks(tmp_path):
    """A run with a slow rank completes, and leaves no stacks."""
    flags = [*DATA, *CPU, *DDP, "--trainer.max_epochs=3", "--cluster.timeout=4"]
    run = fork_fit(tmp_path, "--data=stuck_code.SleepsInData", *flags)
    assert not list(run.glob("stacks/*"))


WAITS = """step {step}, in {phase}

process 7
Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 3 in wait

Current thread 0x2 (most recent call first):
{frames}  File "/x/site-packages/lightning/pytorch/loops/fit_loop.py", line 9 in run
  File "/home/me/main.py", line 1 in <module>
"""
OF_A_WORKER = """
process 8
Current thread 0x3 (most recent call first):
  File "/home/me/my_data.py", line 88 in __getitem__
  File "/x/site-packages/torch/utils/data/_utils/fetch.py", line 5 in fetch
"""
TORCH = '  File "/x/site-packages/torch/autograd/graph.py", line 5 in run\n'


def test_stacks_name_hung_ranks(tmp_path):
    """`where` names hung ranks and the ranks that wait for them.

    It ignores a file that is not a rank's stacks.
    """
    assert where(tmp_path) is None
    waits = WAITS.format(step=1204, phase="its gradients", frames=TORCH)
    data = WAITS.format(step=1204, phase="its data", frames=TORCH)
    for rank, text in enumerate([waits, data + OF_A_WORKER, waits]):
        (tmp_path / f"rank_{rank}.txt").write_text(text)
    hangs = "rank 1 is in step 1,204, my_data.py:88 __getitem__"
    assert where(tmp_path) == f"{hangs}; waiting: rank 0, 2"
    (tmp_path / "rank_3.txt").write_text("step 1204, in its step\n\nprocess 9\n")
    both = f"{hangs}; rank 3 is in step 1,204, no stack; waiting: rank 0, 2"
    assert where(tmp_path) == both
    for rank in (1, 3):
        (tmp_path / f"rank_{rank}.txt").unlink()
    assert where(tmp_path) == "waiting: rank 0, 2"
    (tmp_path / "rank_0.txt").write_text("of another program")
    assert where(tmp_path) == "waiting: rank 2"
