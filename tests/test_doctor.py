"""`doctor`: the checks of this machine."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from harness import App, output_of, running

import app.lab.doctor
from app.lab.doctor import environment, examine
from app.lab.runs import run_fit
from app.record import Record
from app.system import machine
from app.system.machine import busy, usable_cores

LEFT = [
    ({}, "green", "none"),
    ({"RANK": "3", "MASTER_ADDR": "node7"}, "red", "RANK=3 left over"),
    ({"LOCAL_RANK": "0"}, "red", "LOCAL_RANK=0 left over"),
    (
        {"MASTER_ADDR": "node7", "MASTER_PORT": "1"},
        "yellow",
        "MASTER_ADDR=node7, MASTER_PORT=1 set",
    ),
    (
        {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"},
        "green",
        "torchrun",
    ),
    ({"TORCHELASTIC_RUN_ID": "x"}, "red", "TORCHELASTIC_RUN_ID=x left over"),
    ({"SLURM_JOB_ID": "12"}, "green", "SLURM job 12"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "yellow", "MPI"),
    ({"PMI_SIZE": "1"}, "green", "none"),
]


@pytest.mark.parametrize(("variables", "level", "message"), LEFT)
def test_what_launchers_leave(variables: dict[str, str], level: str, message: str) -> None:
    check = environment(variables)
    assert check.level == level
    assert message in check.found
    assert ("unset" in check.remedy) == ("node7" in variables.values() or level == "red")


def test_what_it_finds() -> None:
    checks = {check.name: check for check in itertools.islice(examine(), 8)}
    assert {"load", "versions", "accelerators", "processor", "disk", "tracker"} <= checks.keys()
    assert re.fullmatch(
        r"Python 3\S+, torch \S+, .*, wandb \S+; .*(glibc|N/A).*", checks["versions"].found
    )
    assert "WANDB_MODE" in checks["tracker"].found


@pytest.mark.slow
def test_the_whole_of_it_with_misleading_variables() -> None:
    left: dict[str, str | None] = {
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.255.255.1",
        "MASTER_PORT": "9",
    }
    with running("doctor", "--json", env=left) as run:
        out = run.on_loopback()
    assert run.process.returncode == 1
    report = json.loads(out)
    assert report["level"] == "red"
    by_name = {check["name"]: check for check in report["checks"]}
    assert [name for name, check in by_name.items() if check["level"] == "red"] == ["launcher"]
    assert "unset LOCAL_RANK MASTER_ADDR MASTER_PORT" in by_name["launcher"]["remedy"]
    tested = {name for name in by_name if name.endswith(("x1", "x2"))}
    assert {name.split()[0] for name in tested} >= {"dp", "ddp", "ddp_spawn"}


# -- busy and slow machines
# ---------------------------------------------------------------------------------

QUIET, BUSY = 0.1, 1e4
Records = dict[str, Record]  # run records by strategy


@pytest.mark.parametrize(
    ("load", "usable", "total", "is_busy"),
    [
        (1.9, 2, 2, False),
        (2.1, 2, 2, True),
        (40.0, 2, 64, False),
        (63.0, 2, 64, True),
        (1.5, 1, 2, True),
    ],
)
def test_busy(
    load: float, usable: int, total: int, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is busy if its load exceeds the number of usable cores, and the number of unusable cores, too."""
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("app.system.machine.usable_cores", lambda: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: total)
    message = busy()
    assert (message is not None) == is_busy
    assert message is None or f"a load of {load:.1f} on {usable} cores; " in message
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert (message is None) == (busy() is None)
    assert message is None or "OMP_NUM_THREADS=1" in str(busy())


def test_control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The smallest quota among a control group and its parents counts."""
    control_groups = machine._control_groups
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)))
    assert control_groups() == []
    assert usable_cores() == 64
    inner = tmp_path / "job"
    for folder, cpu in ((tmp_path, "400000 100000"), (inner, "max 100000")):
        folder.mkdir(exist_ok=True)
        (folder / "cpu.max").write_text(cpu + "\n")
    monkeypatch.setattr(machine, "_control_groups", lambda: [inner, tmp_path])
    assert usable_cores() == 4


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Records:
    """Replace the self-test's runs: the returned dictionary, which a test fills, holds their records by strategy.

    If a strategy has no record there, `auto` really runs. Any other strategy counts as completed,
    and gets a copy of `auto`'s folder.
    """
    outcomes: Records = {}

    def run(flags: list[str], limit: float, folder: Path) -> Record:
        if folder.name == "auto" and "auto" not in outcomes:
            return run_fit(flags, 120, folder)
        if folder.name not in outcomes:
            shutil.copytree(folder.with_name("auto"), folder)
        return outcomes.get(folder.name, Record(status="completed"))

    monkeypatch.setattr(app.lab.doctor, "run_fit", run)
    return outcomes


LATE = Record(status="failed", time_limit=300.0)


OUTCOMES = [
    ({"ddp": LATE}, QUIET, {"ddp x2": "red"}),
    ({"ddp": LATE}, BUSY, {"ddp x2": "yellow"}),
    ({"dp": Record(status="failed", error="no")}, QUIET, {"dp x2": "red"}),
    ({"auto": LATE}, QUIET, {"one step": "red"}),
]


@pytest.mark.parametrize(("outcomes", "load", "levels"), OUTCOMES)
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="which strategies are tested depends on the GPUs"
)
def test_what_is_slow_is_not_broken(
    outcomes: Records,
    load: float,
    levels: dict[str, str],
    quick: Records,
    app: App,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick.update(outcomes)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    code, out = app("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    tested = {
        name: check["level"]
        for name, check in checks.items()
        if name == "one step" or name.endswith(" x2")
    }
    assert {name: level for name, level in tested.items() if level != "green"} == levels
    assert len(tested) == (1 if "auto" in outcomes else 5)
    assert code == int("red" in levels.values())
    assert checks["load"]["level"] == ("yellow" if load == BUSY else "green")


@pytest.mark.usefixtures("quick")
def test_what_people_see(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "getloadavg", lambda: (BUSY, 0.0, 0.0))
    monkeypatch.setenv("RANK", "3")
    lines = output_of(*app("doctor"), 1).splitlines()
    assert re.match(r"yellow +load +.* load of 10000\.0 on \d+ cores", lines[0])
    assert re.match(r" +→ ", lines[1]), "what to do stands below"
    assert re.match(r"1 of \d+ do not work, after \d+ s", lines[-1])
