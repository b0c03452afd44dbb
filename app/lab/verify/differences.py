"""Comparison of two recordings of a training: finds where samples, losses, weights and so on differ first."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.errors import UserError
from app.lab.verify.recording import FOLDER
from app.system.torch_files import load

COLUMNS = ("samples", "learning rate", "loss", "gradients", "weights", "evaluation", "optimizer")
TOLERANCE = (
    1e-5  # tolerance for float32: relative for losses, gradients and values above 1, else absolute
)
# losses below TINY, and gradient norms below TINY × the largest norm, are compared absolutely,
# because such a small number may be the difference of larger numbers, and then carries their
# rounding error
TINY = 1e-3
EXACT = 1e-10  # tolerance for float64; smaller differences are rounding


class Recorded:
    """Recording of a run by all its ranks.

    Args:
        run_dir: Directory of the run.
        earlier: Recording of the run that this run resumes; its steps are prepended to this run's.

    Attributes:
        ranks: Recording of each rank.
        weights: Weights and buffers after training.
        facts: Facts about the training on rank zero.
        resumed_at: Number of steps that the earlier run took; None without an earlier run.
        steps: Steps of the run, each with all ranks' recordings.
        evaluated: Number of times that each sample was evaluated in the last validation, over all
            ranks.

    Raises:
        UserError: When the run recorded nothing.
    """

    def __init__(self, run_dir: Path, earlier: "Recorded | None" = None) -> None:
        files = sorted((run_dir / FOLDER).glob("rank_*.json"))
        if not files:
            raise UserError(f"{run_dir}: no steps were recorded")
        self.run_dir = run_dir
        self.ranks: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
        self.weights: dict[str, torch.Tensor] = load(run_dir / FOLDER / "weights.pt")
        self.facts: dict[str, Any] = self.ranks[0]["facts"]
        self.resumed_at: int | None = None
        if earlier is not None:
            self.resumed_at = len(earlier.steps)
            for here, before in zip(self.ranks, earlier.ranks, strict=True):
                here["steps"] = before["steps"] + here["steps"]
        together = zip(*(rank["steps"] for rank in self.ranks), strict=False)
        self.steps: list[Step] = [
            Step(number, list(ranks)) for number, ranks in enumerate(together)
        ]
        batches = (
            batch
            for rank in self.ranks
            for loader in rank["evaluation"].values()
            for batch in loader
        )
        self.evaluated = Counter(sample for batch in batches for sample in batch)

    def epoch(self, number: int) -> list["Step"]:
        """Return the steps of an epoch."""
        return [step for step in self.steps if step.epoch == number]


class Step:
    """Optimizer step.

    Args:
        number: Number of the step, from 0.
        ranks: Each rank's recording of the step.

    Attributes:
        samples: Ids of the samples of all ranks and micro-batches.
        labels: Digests of the samples' integer tensors, such as labels.
        counts: Number of samples of each batch, over all ranks and micro-batches.
        micro_batches: Number of accumulated batches per rank.
        loss: Loss that the optimizer minimises: the mean of the ranks' losses.
        rates: Learning rate of each parameter group.
        gradients: Norm of each parameter's gradient.
    """

    def __init__(self, number: int, ranks: list[dict[str, Any]]) -> None:
        self.number = number
        self.ranks = ranks
        self.epoch = ranks[0]["epoch"]
        self.samples = [sample for rank in ranks for batch in rank["samples"] for sample in batch]
        self.labels = [label for rank in ranks for batch in rank["labels"] for label in batch]
        self.counts = [len(batch) for rank in ranks for batch in rank["samples"]]
        self.micro_batches = len(ranks[0]["samples"])
        self.loss: float = sum(rank["loss"] for rank in ranks) / len(ranks)
        self.rates = ranks[0].get("rates", [])
        self.gradients = ranks[0].get("gradients", {})

    @property
    def weighted_loss(self) -> float:
        """Mean of the ranks' and micro-batches' losses, weighted by their samples."""
        losses = [loss for rank in self.ranks for loss in rank["losses"]]
        total = sum(loss * count for loss, count in zip(losses, self.counts, strict=True))
        return total / sum(self.counts) if any(self.counts) else math.nan

    @property
    def operations(self) -> list[list[tuple[str, str, list[str]]]]:
        """Operations of each `training_step` call on all ranks, as tuples: module, name, digests of the outputs."""
        return [rows for rank in self.ranks for rows in rank.get("operations", [])]


@dataclass(frozen=True)
class Difference:
    """Difference of a run from the reference.

    For values of each step, it is the difference at the first step that differs. For values after
    training, it is the largest difference.

    Attributes:
        where: Step, parameter or metric.
        figures: Values of run and reference, as text.
        size: Size of the difference: relative, but absolute if the values are small. It is infinite
            if the values have no finite difference, such as samples or NaN.
        step: Number of the step, or None.
    """

    where: str
    figures: str
    size: float = math.inf
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.figures}"


def apart(here: float, there: float, scale: float = 1.0) -> float:
    """Return the difference of two values, relative to the larger of `scale` and |there|; 0 if both are NaN."""
    if here == there or (math.isnan(here) and math.isnan(there)):
        return 0.0
    difference = abs(here - there) / max(scale, abs(there))
    return difference if math.isfinite(difference) else math.inf


def differences(
    reference: Recorded, way: Recorded, tolerance: float = TOLERANCE
) -> dict[str, Difference]:
    """Return a variant's difference from the reference by column; equal columns are absent.

    For samples, learning rate, loss and gradients, it is the difference at the first step that
    differs. For weights, evaluation and optimizer, it is the largest difference after training.
    """
    columns: dict[str, Difference] = {}
    for name, look in (
        ("samples", _samples),
        ("learning rate", _rates),
        ("loss", _losses),
        ("gradients", _gradients),
    ):
        pairs = zip(way.steps, reference.steps, strict=False)
        first = next((place for pair in pairs for place in look(*pair, tolerance)), None)
        if first:
            columns[name] = first
    if "samples" not in columns and len(way.steps) != len(reference.steps):
        columns["samples"] = Difference(
            "end", f"{len(way.steps)} steps, {len(reference.steps)} in the reference"
        )
    for name, places in (
        ("weights", weights_apart(reference, way, tolerance)),
        ("evaluation", _evaluation(reference, way, tolerance)),
        ("optimizer", _optimizer(reference, way, tolerance)),
    ):
        worst = max(places, key=lambda place: place.size, default=None)
        if worst is not None:
            columns[name] = worst
    return columns


def largest(reference: Recorded, way: Recorded) -> float:
    """Return the largest difference: of losses and gradients over all steps, and of weights after training."""
    pairs = list(zip(way.steps, reference.steps, strict=False))
    places = [
        place
        for here, there in pairs
        for look in (_losses, _gradients)
        for place in look(here, there, 0.0)
    ]
    return max(
        (place.size for place in [*places, *weights_apart(reference, way, 0.0)]), default=0.0
    )


def effect(way: Recorded, other: Recorded) -> float:
    """Return the largest difference, over all steps, of two runs' losses; infinite if a loss is not finite."""
    sizes = [
        abs(here.loss - there.loss) for here, there in zip(way.steps, other.steps, strict=False)
    ]
    return max((size if math.isfinite(size) else math.inf for size in sizes), default=0.0)


def first_operation(reference: Recorded, way: Recorded) -> str | None:
    """Describe the first operation or gradient whose bits differ, or return None.

    Within a step, compare operations before gradients.
    """
    for here, there in zip(way.steps, reference.steps, strict=False):
        shards = list(zip(here.operations, there.operations, strict=False))
        if len(here.operations) != len(
            there.operations
        ):  # the runs split a batch differently: compare whole batches
            shards = [(_joined(here.operations), _joined(there.operations))]
        for number, pair in enumerate(shards):
            for (_, _, digests), (module, name, expected) in zip(*pair, strict=False):
                # skip in-place operations outside all modules, because they update metrics
                counts = module == "Global" and name.endswith("_")
                if digests != expected and len(digests) == len(expected) and not counts:
                    place = f", shard {number + 1}" if len(shards) > 1 else ""
                    return f"step {there.number + 1}{place}: {name} in {module}"
        mine, wanted = (step.ranks[0].get("bits", {}) for step in (here, there))
        changed = [name for name in wanted if mine.get(name) != wanted[name]]
        if changed:
            return f"step {there.number + 1}: the gradient of {changed[-1]}"
    return None


def _joined(operations: list[list[tuple[str, str, list[str]]]]) -> list[tuple[str, str, list[str]]]:
    """Concatenate each operation's output digests over all shards or ranks of a batch."""
    return [
        (*rows[0][:2], [digest for row in rows for digest in row[2]])
        for rows in zip(*operations, strict=False)
    ]


def _samples(here: Step, there: Step, tolerance: float) -> Iterator[Difference]:
    seen = Counter(here.samples)
    wanted = Counter(there.samples)
    if seen != wanted:
        shared = (seen & wanted).total()
        yield Difference(
            f"step {there.number + 1}",
            f"{len(here.samples)} samples, {shared} of them among the {len(there.samples)} of the reference",
            step=there.number,
        )


def _rates(here: Step, there: Step, tolerance: float) -> Iterator[Difference]:
    for group, (rate, expected) in enumerate(zip(here.rates, there.rates, strict=False)):
        if not math.isclose(rate, expected, rel_tol=1e-9):
            yield Difference(
                f"step {there.number + 1}",
                f"learning rate of group {group} {rate:.6g}, {expected:.6g} in the reference",
                step=there.number,
            )


def _losses(here: Step, there: Step, tolerance: float) -> Iterator[Difference]:
    size = apart(here.loss, there.loss, TINY)
    if size > tolerance:
        yield Difference(
            f"step {there.number + 1}",
            f"{here.loss:.9g}, {there.loss:.9g} in the reference",
            size,
            there.number,
        )


def _gradients(here: Step, there: Step, tolerance: float) -> Iterator[Difference]:
    scale = (
        max((norm for norm in there.gradients.values() if math.isfinite(norm)), default=1.0) or 1.0
    )
    names = {*here.gradients, *there.gradients}
    norms, expected = (
        {name: step.gradients.get(name, math.nan) for name in names} for step in (here, there)
    )
    sizes = {name: apart(norms[name], expected[name], TINY * scale) for name in names}
    name = max(sizes, key=lambda key: sizes[key], default="")
    if name and sizes[name] > tolerance:
        yield Difference(
            f"step {there.number + 1}",
            f"norm of {name} {norms[name]:.9g}, {expected[name]:.9g} in the reference",
            sizes[name],
            there.number,
        )


def weights_apart(reference: Recorded, way: Recorded, tolerance: float) -> Iterator[Difference]:
    """Yield differences after training.

    Compare weights and buffers with the reference's. Compare parameters of all ranks with rank
    zero's.
    """
    for name in {*reference.weights, *way.weights}:
        here, there = (run.weights.get(name, torch.empty(0)).double() for run in (way, reference))
        if here.shape != there.shape:
            yield Difference(
                name, f"shape {tuple(here.shape)}, {tuple(there.shape)} in the reference"
            )
        elif here.numel():
            size = float(((here - there).abs() / there.abs().clamp(min=1)).max())
            if not size <= tolerance:  # true for NaN, too
                yield Difference(
                    name, f"differs by up to {size:.2g}", math.inf if math.isnan(size) else size
                )
    for rank, recorded in enumerate(way.ranks):
        for name in way.ranks[0]["parameters"]:
            if recorded["digests"].get(name) != way.ranks[0]["digests"].get(name):
                yield Difference(name, f"differs between rank 0 and rank {rank}")


def _evaluation(reference: Recorded, way: Recorded, tolerance: float) -> Iterator[Difference]:
    seen = way.evaluated
    wanted = reference.evaluated
    if seen != wanted:
        twice = (seen - wanted).total()
        missing = (wanted - seen).total()
        counts = [f"{twice} samples too many"] * bool(twice) + [f"{missing} too few"] * bool(
            missing
        )
        yield Difference("samples", f"{' and '.join(counts)}, of {wanted.total()}")
    for rank in range(len(way.ranks)):
        metrics = way.ranks[rank]["metrics"]
        expected = reference.ranks[0]["metrics"]
        names = (
            metrics if rank else {*metrics, *expected}
        )  # some metrics are logged only on rank zero
        for name in sorted(names):
            here = metrics.get(name, math.nan)
            there = expected.get(name, math.nan)
            size = apart(here, there)
            if size > tolerance:
                place = f"{name} on rank {rank}" if rank else name
                yield Difference(place, f"{here:.6g}, {there:.6g} in the reference", size)


def _optimizer(reference: Recorded, way: Recorded, tolerance: float) -> Iterator[Difference]:
    """Yield differences of the optimizers' and schedulers' states on rank zero. Tensors are compared by their norms."""
    states, expected = (
        {name: run.ranks[0][name] for name in ("optimizers", "schedulers")}
        for run in (way, reference)
    )
    for path, here, there in _leaves(states, expected, ""):
        size = (
            apart(here, there)
            if isinstance(here, float | int) and isinstance(there, float | int)
            else math.inf
        )
        if here != there and size > tolerance:
            yield Difference(path, f"{here}, {there} in the reference", size)


def _leaves(here: Any, there: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(here, dict) and isinstance(there, dict):
        for key in {*here, *there}:
            yield from _leaves(here.get(key), there.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for index, pair in enumerate(zip(here, there, strict=True)):
            yield from _leaves(*pair, f"{path}.{index}".lstrip("."))
    else:
        yield path, here, there
