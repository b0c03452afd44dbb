"""Runner of an experiment: runs the variants in turn, and continues an interrupted experiment."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from app.lab.compare.experiment import Experiment
from app.lab.runs import last_lines, run_fit
from app.lab.variant import Variant
from app.record import Record


@dataclass
class Outcome:
    """Outcome of a variant.

    Attributes:
        variant: The variant.
        records: Records of its runs.
        status: `waiting`, `measured`, `skipped`, `failed`, or `slow` if a run reached the time
            limit and stopped cleanly (its steps so far count).
        reason: Reason of a skip, failure or stop, in one line.
        tail: Last output lines of a run that failed.
    """

    variant: Variant
    records: list[Record] = field(default_factory=list)
    status: str = "waiting"
    reason: str | None = None
    tail: list[str] = field(default_factory=list)

    @property
    def note(self) -> str:
        """Status and reason; empty without a reason."""
        if self.reason is None:
            return ""
        return f"{self.status}: {self.reason}"

    @property
    def rate(self) -> str:
        """Samples/s: the runs' median ± the largest deviation from it; `—` without a figure."""
        rates = []
        for record in self.records:
            if record.throughput.median is not None:
                rates.append(record.throughput.median)
        if not rates:
            return "—"
        text = f"{median(rates):,.0f}"
        if len(rates) > 1:
            spread = max(abs(rate - median(rates)) for rate in rates)
            text += f" ± {spread:,.0f}"
        return text


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
        # the baseline first, because the others have its batch
        self._in_turn = sorted(
            self.outcomes, key=lambda outcome: outcome.variant.name != experiment.baseline
        )
        for outcome in self.outcomes:
            if outcome.variant.lacking:
                outcome.status = "skipped"
                outcome.reason = outcome.variant.lacking
        for repeat, outcome in self.todo():
            path = self.folder(repeat, outcome) / "version_0" / "run.json"
            if path.exists():
                record = Record.load(path)
                limit = record.time_limit or 0.0
                is_slow = record.status == "interrupted" and limit >= experiment.time_limit
                if is_slow or (record.status == "completed" and record.wall_s is not None):
                    self._keep(outcome, record)

    def folder(self, repeat: int, outcome: Outcome) -> Path:
        """Return the folder of one run."""
        return self.directory / "runs" / f"repeat_{repeat}" / outcome.variant.slug

    def todo(self) -> Iterator[tuple[int, Outcome]]:
        """Yield the missing runs in turn: A B C, A B C. A failed variant is not retried."""
        for repeat in range(1, self.experiment.repeats + 1):
            for outcome in self._in_turn:
                if len(outcome.records) < repeat and outcome.status == "waiting":
                    yield repeat, outcome

    def run(self, repeat: int, outcome: Outcome) -> None:
        """Run a variant once.

        Raises:
            KeyboardInterrupt: On Ctrl-C, after stopping the run.
            SystemExit: On SIGTERM, after stopping the run.
        """
        variant = outcome.variant
        folder = self.folder(repeat, outcome)
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
        flags = [*variant.arguments[1:], *self._batch(variant), *self.more]
        if self.experiment.by == "accuracy":
            seed = variant.settings.seed_everything
            flags.append(f"--seed_everything={int(seed) + repeat - 1}")
        record = run_fit(flags, self.experiment.time_limit, folder, variant.nodes())
        if record.status != "failed":
            self._keep(outcome, record)
            return
        outcome.status = "failed"
        outcome.reason = str(record.error)
        outcome.tail = last_lines(folder)
        if record.time_limit is not None:
            outcome.reason += ": see --time_limit"

    def _batch(self, variant: Variant) -> list[str]:
        """Return the flag that gives a user's loader the global batch of the first variant."""
        first = self._in_turn[0]
        if not first.records or first.records[0].data is not None:
            return []
        size = first.records[0].global_batch_size
        settings = variant.settings
        has_its_own = (
            settings.run.global_batch is not None
            or settings.run.loader == "lightning"
            or settings.data != first.variant.settings.data
        )
        if size is None or has_its_own:
            return []
        return ["--run.global_batch", str(size)]

    def _keep(self, outcome: Outcome, record: Record) -> None:
        """Keep the record of a run that completed, or that stopped at the time limit.

        If a run was stopped during the warm-up, compute its throughput from all of the warm-up's
        windows but the first.
        """
        outcome.records.append(record)
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
        outcome.reason = f"step {record.steps:,} after {record.time_limit:g} s"
        rates = [rate for _, rate in record.course.samples_per_s][1:]
        if rates and record.throughput.median is None:
            record.throughput.median = median(rates)
            outcome.reason += ", warm-up included"
