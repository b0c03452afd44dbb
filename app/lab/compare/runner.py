"""Runner of an experiment: runs the variants in turn, and continues an interrupted experiment."""

import datetime
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from app.lab.compare.experiment import Experiment
from app.lab.runs import last_lines, run_fit
from app.lab.variant import Variant
from app.record import Record, Throughput


@dataclass
class Outcome:
    """Outcome of a variant.

    Attributes:
        variant: The variant.
        records: Record of each run, by the number of the repeat.
        status: `waiting`, `measured`, `skipped` or `failed`. After a run that reached the time
            limit: `slow` if it stopped cleanly (its steps so far count), `hanging` if it was
            killed, `starting` if it had not reached its first step.
        reason: Reason of a skip, failure or stop, in one line.
        tail: Last output lines of a run that failed or hung.
    """

    variant: Variant
    records: dict[int, Record] = field(default_factory=dict)
    status: str = "waiting"
    reason: str | None = None
    tail: list[str] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """Median samples/s of each run; runs without a logging window are omitted."""
        medians = (record.throughput.median for record in self.records.values())
        return [median for median in medians if median is not None]


class Runner:
    """Runner of an experiment in a directory; continues an interrupted experiment.

    Args:
        experiment: The experiment.
        variants: Its variants.
        directory: Directory of the runs.
        more: Further arguments of every run, which do not affect training, such as the tracker's.
    """

    def __init__(
        self, experiment: Experiment, variants: list[Variant], directory: Path, more: list[str]
    ) -> None:
        self.experiment = experiment
        self.directory = directory
        # after a NaN loss, a run continues, and the report names the variant
        warmup = str(experiment.warmup_epochs)
        self.more = [*more, "--run.warmup_epochs", warmup, "--run.on_nonfinite", "warn"]
        self.outcomes = [Outcome(variant) for variant in variants]
        for outcome in self.outcomes:
            if outcome.variant.lacking:
                outcome.status = "skipped"
                outcome.reason = outcome.variant.lacking
            for repeat in range(1, experiment.repeats + 1):
                path = self.folder(outcome.variant, repeat) / "version_0" / "run.json"
                record = Record()
                if path.exists():
                    record = Record.load(path)
                limit = record.time_limit or 0.0
                slow = record.status == "interrupted" and limit >= experiment.time_limit
                if slow or (record.status == "completed" and record.wall_s is not None):
                    self._keep(outcome, repeat, record)

    def folder(self, variant: Variant, repeat: int) -> Path:
        """Return the folder of one run."""
        return self.directory / "runs" / f"repeat_{repeat}" / variant.slug

    def measured_at(self) -> str | None:
        """Return the time at which the last run ended, or None without a run."""
        ends = [path.stat().st_mtime for path in self.directory.glob("runs/*/*/version_0/run.json")]
        if not ends:
            return None
        return datetime.datetime.fromtimestamp(max(ends)).astimezone().isoformat(timespec="seconds")

    def todo(self) -> Iterator[tuple[int, Outcome]]:
        """Yield the missing runs in turn: A B C, A B C. A failed variant is not retried."""
        for repeat in range(1, self.experiment.repeats + 1):
            for outcome in self.outcomes:
                if repeat not in outcome.records and outcome.status == "waiting":
                    yield repeat, outcome

    def remaining_s(self) -> float | None:
        """Estimate the seconds of all missing runs; None if no run has finished."""
        walls = []
        for outcome in self.outcomes:
            for record in outcome.records.values():
                walls.append(record.wall_s or 0.0)
        if not walls:
            return None
        return statistics.mean(walls) * len(list(self.todo()))

    def run(self, repeat: int, outcome: Outcome) -> None:
        """Run a variant once.

        Raises:
            KeyboardInterrupt: On Ctrl-C, after stopping the run.
            SystemExit: On SIGTERM, after stopping the run.
        """
        variant = outcome.variant
        folder = self.folder(outcome.variant, repeat)
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
        flags = [*variant.arguments[1:], *self.more]
        record = run_fit(flags, self.experiment.time_limit, folder, variant.nodes())
        if record.status in ("completed", "interrupted"):
            self._keep(outcome, repeat, record)
        else:
            outcome.tail = last_lines(folder)
            outcome.reason = str(record.error)
            outcome.status = "failed"
            if record.time_limit is not None:
                outcome.status = "starting"
                if record.setup_s is not None:
                    outcome.status = "hanging"
                outcome.reason += ": see --time_limit"

    def _keep(self, outcome: Outcome, repeat: int, record: Record) -> None:
        """Keep the record of a run that completed, or that stopped at the time limit.

        If a run was stopped during the warm-up, compute its throughput from all of the warm-up's
        windows but the first.
        """
        outcome.records[repeat] = record
        if record.status == "completed":
            if len(outcome.records) == self.experiment.repeats:
                outcome.status = "measured"
            if record.throughput.median is None:
                outcome.reason = (
                    f"no throughput: its {record.steps} steps end before the first logging window "
                    "(see --trainer.log_every_n_steps) after a warm-up of "
                    f"{self.experiment.warmup_epochs} epoch(s)"
                )
            return
        outcome.status = "slow"
        place = "not one step"
        if record.steps:
            place = f"step {record.steps:,}"
        after = f"after {record.time_limit:g} s"
        rates = [rate for _, rate in record.course.samples_per_s][1:]
        if rates and record.throughput.median is None:
            record.throughput = Throughput(
                statistics.median(rates), min(rates), max(rates), len(rates)
            )
            after += ", warm-up included"
        outcome.reason = f"{place} {after}"
