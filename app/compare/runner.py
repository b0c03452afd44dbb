"""Runs every variant in processes of its own, repeats in turn, and records the outcome of each."""

import datetime
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from app.compare.experiment import Experiment, Process, Variant
from app.launch.process import environment_of_a_run
from app.monitor.record_file import load_record
from app.system.files import write_json
from app.system.machine import busy_seconds, own_seconds

GRACE = 15.0  # seconds in which a run that was told to stop may end in order
TAIL = 12  # lines of a failed run's output that the report shows


@dataclass
class Outcome:
    """The outcome of a variant.

    Attributes:
        variant: The variant.
        records: The run records of its completed runs, by repeat.
        status: `waiting`, `running`, `measured`, `slow`, `skipped`, `failed`, `starting` or `hanging`. A slow one has a
            record of its steps until the time limit; a starting one has not taken a step by then.
        reason: Why it was skipped, failed or ended, in one line.
        tail: The last lines of output of a run that failed or hung.
    """

    variant: Variant
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    status: str = "waiting"
    reason: str | None = None
    tail: list[str] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """Samples/s of each run that has had a window to measure it."""
        found = ((record["throughput"] or {}).get("median") for record in self.records.values())
        return [median for median in found if median is not None]


class Runner:
    """Runs an experiment in a directory, and continues one that was broken off.

    Args:
        experiment: What to run.
        variants: Its variants.
        directory: Where runs and their output are kept.
        more: Arguments for every run that do not change its training, such as those of the tracker.
        show: Called whenever there is something new to see.
    """

    def __init__(
        self,
        experiment: Experiment,
        variants: list[Variant],
        directory: Path,
        more: list[str],
        show: Callable[["Runner"], None] = lambda runner: None,
    ) -> None:
        self.experiment, self.directory, self.more, self.show = experiment, directory, more, show
        self.outcomes = [Outcome(variant) for variant in variants]
        self.running: tuple[Outcome, int, float] | None = None
        for outcome in self.outcomes:
            if outcome.variant.lacking:
                outcome.status, outcome.reason = "skipped", outcome.variant.lacking
            for repeat in range(1, experiment.repeats + 1):
                record = self._read(outcome.variant, repeat)
                # the first is added when it has ended well; a slow one is run anew where it has more time
                if "wall_s" in record and record.get("time_limit", math.inf) >= experiment.time_limit:
                    outcome.records[repeat] = record
                    if "time_limit" in record:
                        outcome.status, outcome.reason = "slow", _progress(record)
            if len(outcome.records) == experiment.repeats:
                outcome.status = "measured"

    # -- where things are -----------------------------------------------------------------------------------

    def run_dir(self, variant: Variant, repeat: int) -> Path:
        """Name the directory of one run."""
        return self.directory / "runs" / f"repeat_{repeat}" / variant.slug / "version_0"

    def _read(self, variant: Variant, repeat: int) -> dict[str, Any]:
        path = self.run_dir(variant, repeat) / "run.json"
        if not path.exists():
            return {}
        try:
            return load_record(path)
        except ValueError as error:
            print(f"{error}: it counts as not run", file=sys.stderr)
            return {}

    def measured_at(self) -> str | None:
        """Say when the last of the runs was done."""
        files = [
            self.run_dir(outcome.variant, repeat) / "run.json"
            for outcome in self.outcomes
            for repeat in outcome.records
        ]
        if not files:
            return None
        last = datetime.datetime.fromtimestamp(max(file.stat().st_mtime for file in files)).astimezone()
        return last.isoformat(timespec="seconds")

    def progress(self) -> dict[str, Any]:
        """Read the record of the current run, as far as it is written."""
        return self._read(self.running[0].variant, self.running[1]) if self.running else {}

    def processes(self, variant: Variant, repeat: int) -> list[Process]:
        """List the processes of one run. What they are told beyond the variant does not change its training."""
        flags = {
            "run.root": str(self.directory / "runs" / f"repeat_{repeat}"),
            "run.name": variant.slug,
            "run.warmup_epochs": str(self.experiment.warmup_epochs),
            "run.on_nonfinite": "warn",  # it is measured all the same, and the report says so
            "run.test": "false",
            "trainer.enable_progress_bar": "false",
            "trainer.enable_model_summary": "false",
        }
        more = [part for key, value in flags.items() for part in (f"--{key}", value)]
        file = self.run_dir(variant, repeat).with_name("rendezvous").resolve()
        return variant.processes([*more, *self.more], f"file://{file}")

    # -- running --------------------------------------------------------------------------------------------

    def todo(self) -> Iterator[tuple[int, Outcome]]:
        """List the runs that are left, in turn: A B C, A B C. A variant that has failed is not tried again."""
        for repeat in range(1, self.experiment.repeats + 1):
            for outcome in self.outcomes:
                if repeat not in outcome.records and outcome.status in ("waiting", "running"):
                    yield repeat, outcome

    def remaining_s(self) -> float | None:
        """Estimate the seconds of the runs left from those that are done; None before there is one."""
        took = {id(o): [r["wall_s"] for r in o.records.values() if "wall_s" in r] for o in self.outcomes}
        known = [seconds for of_variant in took.values() for seconds in of_variant]
        if not known:
            return None
        mean = sum(known) / len(known)
        each = (took[id(outcome)] or [mean] for _, outcome in self.todo())
        left = sum(sum(seconds) / len(seconds) for seconds in each)
        return max(left - (time.monotonic() - self.running[2] if self.running else 0.0), 0.0)

    def run(self) -> None:
        """Run what is left.

        Raises:
            KeyboardInterrupt: On Ctrl-C, after the current run has been ended.
            SystemExit: On SIGTERM, likewise.
        """
        for repeat, outcome in self.todo():
            outcome.status = "running"
            self.running = outcome, repeat, time.monotonic()
            try:
                self._run_one(outcome, repeat)
            finally:
                self.running = None
                if outcome.status == "running":
                    outcome.status = "measured" if len(outcome.records) == self.experiment.repeats else "waiting"
                self.show(self)

    def _run_one(self, outcome: Outcome, repeat: int) -> None:
        variant, began = outcome.variant, time.monotonic()
        folder = self.run_dir(variant, repeat).parent
        shutil.rmtree(folder, ignore_errors=True)  # what a broken-off run has left
        folder.mkdir(parents=True)
        deadline = began + self.experiment.time_limit
        busy = busy_seconds() - own_seconds()
        output = folder / "output.txt"
        with ExitStack() as stack:
            processes: list[subprocess.Popen[bytes]] = []
            stack.callback(_end, processes)
            for node, process in enumerate(self.processes(variant, repeat)):
                file = stack.enter_context((output if node == 0 else folder / f"output_node{node}.txt").open("w"))
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "app", *process.arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=environment_of_a_run() | process.environment,
                        start_new_session=True,  # Ctrl-C comes to this process, which tells the run
                    )
                )
            ended: dict[int, int] = {}  # node and exit code of those that ended by themselves
            late = False
            while len(ended) < len(processes) and not late:
                ended |= {node: code for node, p in enumerate(processes) if (code := p.poll()) is not None}
                late = time.monotonic() > deadline
                if any(ended.values()):  # the other nodes wait for one that is gone
                    break
                self.show(self)
                with suppress(subprocess.TimeoutExpired):
                    next(p for p in processes if p.returncode is None or p is processes[-1]).wait(0.5)
        record, failing = self._read(variant, repeat), any(ended.values())
        begun = record.get("setup_s") is not None
        # it made progress, and stopped in order when it was told to
        if late and not failing and begun and record.get("status") == "interrupted":
            outcome.status, record["time_limit"] = "slow", self.experiment.time_limit
            outcome.reason = _progress(record)
        if not failing and (record.get("status") == "completed" or outcome.status == "slow"):
            record["wall_s"] = round(time.monotonic() - began, 3)
            record["others_cores"] = round(max((busy_seconds() - own_seconds() - busy) / record["wall_s"], 0.0), 2)
            write_json(self.run_dir(variant, repeat) / "run.json", record)
            outcome.records[repeat] = record
            if outcome.status != "slow" and record["throughput"]["median"] is None:
                outcome.reason = (
                    f"{record['steps']} steps end before a window of --trainer.log_every_n_steps after the warm-up of "
                    f"{self.experiment.warmup_epochs} epoch(s): no throughput"
                )
            return
        # one that was killed or broke comes before one that only says that another has stopped
        failed = min(ended, key=lambda node: (ended[node] == 0, ended[node] == 2, node), default=0)
        output = folder / f"output_node{failed}.txt" if failed else output
        lines = [_plain(line) for line in output.read_text(errors="replace").splitlines() if line.strip()]
        outcome.tail = [line[:300] for line in lines[-TAIL:]]
        if late and not failing:
            outcome.status, state = ("hanging", "no progress") if begun else ("starting", "still setting up")
            outcome.reason = f"{state} after {self.experiment.time_limit:g} s: see --time_limit"
            return
        said = [line.partition("error: ")[2] for line in lines if "error: " in line]
        outcome.status = "failed"
        outcome.reason = said[-1] if said else record.get("error") or (lines[-1] if lines else "it said nothing")
        if ended.get(failed) != 2:  # which stands for a mistake that is explained in one line
            outcome.reason = f"exit code {ended.get(failed)}: {outcome.reason}"


def _progress(record: dict[str, Any]) -> str:
    """How far a run has come until the time limit; where that is within its warm-up, it is measured all the same."""
    after = f"after {record['time_limit']:g} s"
    if not record["steps"]:
        return f"not one step {after}"
    rates = [rate for _, rate in (record.get("course") or {}).get("samples_per_s", [])][1:]
    if rates and record["throughput"]["median"] is None:
        figures = {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "n": len(rates)}
        record["throughput"] |= figures
        after += ", warm-up included"
    of = record["max_epochs"]
    if of is None or of < 0:
        return f"step {record['steps']:,} {after}"
    return f"epoch {sum(bool(row['whole']) for row in record['epochs']) + 1} of {of} {after}"


def _plain(line: str) -> str:
    """Remove colours and tabs from a line of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).expandtabs().rstrip()


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End a run and everything that it has started: in order if it can, else by force."""
    mine = [process for process in processes if process.poll() is None]
    others = [child for process in mine for child in psutil.Process(process.pid).children(recursive=True)]
    for process in mine:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in mine:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in psutil.wait_procs(others, timeout=max(deadline - time.monotonic(), 0.1))[1]:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    for process in processes:  # what was started since, and is in the group of the run
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
