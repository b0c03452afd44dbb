"""`doctor`: the checks of this machine."""

import os
import re

import psutil
import pytest
import torch
from harness import SLOW, running

import app.lab.doctor
from app.record import Record, TrainLoss
from app.system import machine
from app.system.machine import busy, usable_cores


def levels_of(out):
    """Return the level of each check in the report, by its name."""
    lines = re.findall(r"^(green|yellow|red) +(\w+(?: x\d)?) ", out, re.MULTILINE)
    return {name: level for level, name in lines}


@SLOW
def test_self_test_ignores_misleading_variables():
    left = {"LOCAL_RANK": "1", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "9"}
    with running("doctor", env=left) as run:
        out = run.on_loopback()
    assert run.process.returncode == 0
    levels = levels_of(out)
    assert levels.keys() >= {"accelerators", "processor", "room"}
    assert levels.keys() >= {"auto x1", "dp x2", "ddp x2", "ddp_spawn x2"}
    assert re.search(r"versions +python 3\S+, torch \S+, .*glibc", out)
    assert "red" not in levels.values()


# -- busy and slow machines

QUIET = 0.1
BUSY = 1e4


def set_load(monkeypatch, load):
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))


LOADS = [(1.9, 2, 2, False), (2.1, 2, 2, True), (40.0, 2, 64, False), (63.0, 2, 64, True)]


@pytest.mark.parametrize(("load", "usable", "total", "is_busy"), LOADS)
def test_busy(load, usable, total, is_busy, monkeypatch):
    """A machine is busy if its load exceeds the usable cores, and the unusable cores, too."""
    set_load(monkeypatch, load)
    monkeypatch.setattr("app.system.machine.usable_cores", lambda: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: total)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    message = busy()
    assert (message is not None) == is_busy
    if message is not None:
        assert f"a load of {load:.1f} on {usable} cores; " in message
        assert "OMP_NUM_THREADS=1" in message


def test_smallest_quota_of_the_control_groups_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path / "job")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores() == 64
    (tmp_path / "job").mkdir()
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "job/cpu.max").write_text("max 100000\n")
    assert usable_cores() == 4


@pytest.fixture
def quick(monkeypatch):
    """Replace the self-test's runs by these records by strategy; by default, by that of `auto`."""
    outcomes = {"auto": completed(2.0)}

    def run(flags, limit):
        strategy = flags[-2].removeprefix("--trainer.strategy=")
        return outcomes.get(strategy, outcomes["auto"])

    monkeypatch.setattr(app.lab.doctor, "run_fit", run)
    return outcomes


def completed(loss):
    return Record(status="completed", train_loss=TrainLoss(loss))


LATE = Record(status="failed", time_limit=300.0)
OUTCOMES = [
    ({"ddp": LATE}, QUIET, {"ddp x2": "red"}),
    ({"ddp": LATE}, BUSY, {"ddp x2": "yellow"}),
    ({"dp": Record(status="failed", error="no")}, QUIET, {"dp x2": "red"}),
    ({"dp": completed(2.1)}, QUIET, {"dp x2": "red"}),
    ({"auto": LATE}, QUIET, {"auto x1": "red"}),
]


@pytest.mark.parametrize(("outcomes", "load", "levels"), OUTCOMES)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tested strategies depend on the GPUs")
def test_timeout_is_red_only_on_a_quiet_machine(outcomes, load, levels, quick, app, monkeypatch):
    quick.update(outcomes)
    set_load(monkeypatch, load)
    code, out = app.run("doctor")
    checks = levels_of(out)
    tested = {name: level for name, level in checks.items() if name.endswith((" x1", " x2"))}
    assert {name: level for name, level in tested.items() if level != "green"} == levels
    assert len(tested) == (1 if "auto" in outcomes else 5)
    assert code == int("red" in levels.values())
    assert checks["processor"] == ("yellow" if load == BUSY else "green")


def test_report_on_a_terminal(quick, app, monkeypatch):
    set_load(monkeypatch, BUSY)
    lines = app("doctor").splitlines()
    assert re.match(r"yellow +processor +.* a load of 10000\.0 on \d+ of \d+ cores", lines[0])
    assert re.match(r" +→ ", lines[1]), "the remedy stands below"
    assert re.match(r"it works; look at the \d in yellow, after \d+ s", lines[-1])
