"""Verdict of a verification: each variant's differences from one device, as table and text."""

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.lab.verify.causes import Cause
from app.lab.verify.differences import COLUMNS, Difference, Recorded

LEGEND = "✓ the same · ≈ rounding · ✗ different, from this step on · — unknown"


@dataclass
class Result:
    """Result of a variant.

    Attributes:
        name: Name of the variant.
        command: Arguments of `python -m app`, from `fit` on.
        recorded: Recording of the run; None for a failed or skipped run.
        reference: Recording that the run is compared with.
        differences: Difference from one device, by column; see
            `app.lab.verify.differences.differences`.
        effect: Largest difference of a step's loss from the reference.
        causes: Known causes of the differences, the largest effect on the loss first. Those of one
            run are in the order of training; further ones were found by repeating the variant with
            flags that remove known causes.
        first_bits: First output or gradient whose bits differ; only with `--bits true`.
        rounding: Differences that are only rounding, by column.
        in_float64: Largest difference in float64, if the variant was repeated in float64.
        failed: Reason of a failure, or None.
        skipped: Reason of a skip, or None.
        remedied: Outcome of the last repetition with flags that remove causes, or None.
    """

    name: str
    command: list[str]
    recorded: Recorded | None = None
    reference: Recorded | None = None
    differences: dict[str, Difference] = field(default_factory=dict)
    effect: float = 0.0
    causes: list[Cause] = field(default_factory=list)
    first_bits: str | None = None
    rounding: dict[str, Difference] = field(default_factory=dict)
    in_float64: float | None = None
    failed: str | None = None
    skipped: str | None = None
    remedied: str | None = None

    @property
    def same(self) -> bool:
        """Whether the variant trains as the reference does. True for a skipped variant."""
        return self.failed is None and not self.differences

    @cached_property
    def fault(self) -> str:
        """Key that is equal for variants with the same failure or causes of their first run."""
        if self.same:
            return self.name
        kinds = [cause.kind for cause in self.causes]
        return "; ".join([self.failed or "", *(kinds or self.differences)])

    @property
    def per_rank(self) -> int | None:
        """Samples of a step without `--run.global_batch`; None if unknown."""
        if self.recorded is None or not self.recorded.facts["global_batch"]:
            return None
        return len(self.recorded.ranks) * self.recorded.facts["loader_batch"]

    def cell(self, column: str) -> str:
        """Return the variant's table cell for a column."""
        if self.recorded is None or not self.recorded.has(column):
            return "—"
        difference = self.differences.get(column)
        if difference is not None and difference.step is not None:
            return f"✗ {difference.step + 1}"
        if difference is not None:
            return "✗"
        return "≈" if column in self.rounding else "✓"

    def explained(self) -> Iterator[str]:
        """Yield lines that explain the variant's row: differences, then causes."""
        yield self.name
        if self.skipped:
            yield f"  skipped: {self.skipped}"
        if self.failed:
            yield f"  does not run: {self.failed}"
        if self.rounding:
            sizes = ", ".join(
                f"{name} by {place.size:.1g}" for name, place in self.rounding.items()
            )
            yield f"  rounding ({sizes}): in float64 they agree to {self.in_float64:.1g}"
        for column, difference in self.differences.items():
            yield f"  {column}, {difference}"
        if self.in_float64 is not None and not self.rounding:
            yield f"  in float64 they differ by {self.in_float64:.1g}; rounding would nearly vanish"
        if self.first_bits:
            yield f"  first different bits: {self.first_bits}"
        for cause in self.causes:
            change = ""
            if cause.effect:
                change = f" (changes the loss by up to {cause.effect:.1g})"
            yield f"  because {cause.text}{change}"
            yield f"  do      {cause.remedy}"
        explains_loss = any(cause.changes_loss for cause in self.causes)
        if not self.first_bits and "loss" in self.differences and not explains_loss:
            yield "  the cause of the loss is not known"
        elif not self.first_bits and self.differences and not self.causes:
            yield "  the cause is not known"
        if self.remedied:
            yield f"  with    {self.remedied}"

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object, without the recording."""
        row = asdict(replace(self, recorded=None, reference=None))
        del row["recorded"], row["reference"]
        return {**row, "same": self.same}


@dataclass(repr=False)
class Verdict:
    """Verdict of a verification; true if every variant is the same training.

    Attributes:
        reference: Recording of the run on one device.
        results: Results of the other variants.
        bits: Whether equal bits were required.
    """

    reference: Recorded
    results: list[Result]
    bits: bool = False

    def __bool__(self) -> bool:
        return all(result.same for result in self.results)

    def __repr__(self) -> str:
        """Return the table and the causes, because pytest prints the repr."""
        console = Console(width=110, file=io.StringIO(), record=True)
        self.show(console)
        return f"\n{console.export_text()}"

    def table(self) -> list[list[str]]:
        """Return the rows of the table, the header first."""
        header = [""]
        for column in COLUMNS:
            header.append(column.removeprefix("learning "))
        rows = [header]
        for result in self.results:
            rows.append([result.name, *map(result.cell, COLUMNS)])
        return rows

    def explained(self) -> Iterator[str]:
        """Yield lines that explain the table.

        Variants with the same fault share a block of lines. Each variant that is skipped, or
        differs only by rounding, has its own block.
        """
        faults: dict[str, list[Result]] = {}
        for result in self.results:
            if not result.same or result.rounding or result.skipped:
                faults.setdefault(result.fault, []).append(result)
        for first, *others in faults.values():
            yield from first.explained()
            if others:
                yield f"  also    {'; '.join(result.name for result in others)}"

    @property
    def conclusion(self) -> str:
        """Result in one sentence."""
        tried = [result for result in self.results if result.skipped is None]
        different = [result.name for result in tried if not result.same]
        trained = sum(step.micro_batches for step in self.reference.epoch(0))
        batches = self.reference.facts["batches"]
        kind = "bits" if self.bits else "training"
        text = f"The same {kind} in all {len(tried) + 1} variants"
        if different:
            text = f"Not the same {kind} as on one device: {', '.join(different)}"
        size = self.reference.facts["global_batch"]
        if any(result.per_rank not in (None, size) for result in tried):
            text += (
                f", with --run.global_batch {size}: without it, the DataLoader's batch is that of "
                "each rank"
            )
        if trained < batches:
            text += f", in the first {trained} of {batches} batches of an epoch"
        return f"{text}."

    def show(self, console: Console) -> None:
        """Print the table and the causes."""
        header, *rows = self.table()
        table = Table(*header, box=None, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print(LEGEND, style="dim", highlight=False)
        for line in self.explained():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(self.conclusion, highlight=False)

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {
            "same": bool(self),
            "said": self.conclusion,
            "steps": len(self.reference.steps),
            "variants": [result.as_json() for result in self.results],
        }
