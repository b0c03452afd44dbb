"""Comparison of two recordings of a training: finds where samples, losses and weights differ."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from app.errors import UserError
from app.lab.verify.recording import FOLDER
from app.system.torch_files import load

# tolerance for float32: relative for losses, gradients and values above 1, else absolute
TOLERANCE = 1e-5
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
        losses: Loss of each step.
        evaluated: Number of times that each sample was evaluated in the last validation, over all
            ranks.
        trained: Samples of all steps.
        shares: Samples that each rank trained on in the first epoch.
        unequal: Names of weights and buffers that differ between ranks after training.

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
        together = zip(*_values(self.ranks, "steps"), strict=False)
        self.steps: list[Step] = list(map(Step, itertools.count(), together))
        self.losses = np.array([step.loss for step in self.steps])
        self.evaluated = Counter(_joined(self.ranks, "evaluation"))
        self.trained = set(itertools.chain.from_iterable(step.samples for step in self.steps))
        self.shares: list[list[Any]] = []
        for rank in self.ranks:
            first = [step for step in rank["steps"] if step["epoch"] == 0]
            self.shares.append(list(itertools.chain(*_joined(first, "samples"))))
        digests = _values(self.ranks, "digests")
        self.unequal: list[str] = []
        for name in self.weights:
            if len({state[name] for state in digests}) > 1:
                self.unequal.append(name)

    def epoch(self, number: int) -> list["Step"]:
        """Return the steps of an epoch."""
        return [step for step in self.steps if step.epoch == number]

    def has(self, column: str) -> bool:
        """Return whether the run recorded a column: samples have tensors, steps a loss."""
        if column == "loss":
            return not np.isnan(self.losses).all()
        return bool(self.steps and (self.trained or column != "samples"))

    @property
    def repeats(self) -> tuple[int, int]:
        """Number of samples in the first epoch, and how many of them repeat an earlier one."""
        samples = list(itertools.chain(*self.shares))
        return len(samples), len(samples) - len(set(samples))


class Step:
    """Optimizer step.

    Args:
        number: Number of the step, from 0.
        ranks: Each rank's recording of the step.

    Attributes:
        batches: Ids of the samples of each batch, over all ranks and micro-batches.
        samples: Ids of all samples.
        labels: Digests of the samples' integer tensors, such as labels.
        micro_batches: Number of accumulated batches per rank.
        loss: Loss that the optimizer minimises: the mean of the ranks' losses.
        rates: Learning rate of each parameter group.
        gradients: Norm of each parameter's gradient.
    """

    def __init__(self, number: int, ranks: Sequence[dict[str, Any]]) -> None:
        self.number = number
        self.ranks = ranks
        self.epoch = ranks[0]["epoch"]
        self.batches = _joined(ranks, "samples")
        self.samples = list(itertools.chain(*self.batches))
        self.labels = _joined(ranks, "labels")
        self.micro_batches = len(ranks[0]["samples"])
        self.loss = fmean(_values(ranks, "loss"))
        self.rates = ranks[0].get("rates", [])
        self.gradients = ranks[0]["gradients"]

    @property
    def counts(self) -> list[int]:
        """Number of samples of each batch."""
        return list(map(len, self.batches))

    @property
    def weighted_loss(self) -> float:
        """Mean of the ranks' and micro-batches' losses, weighted by their samples."""
        return fmean(_joined(self.ranks, "losses"), self.counts)

    @property
    def outputs(self) -> dict[str, list[str]]:
        """Digests of each module's outputs, over all ranks."""
        outputs: dict[str, list[str]] = {}
        for rank in self.ranks:
            for name, digests in rank["outputs"].items():
                outputs.setdefault(name, []).extend(digests)
        return outputs


def _values(ranks: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [rank[name] for rank in ranks]


def _joined(ranks: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return list(itertools.chain(*_values(ranks, name)))


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
    """Return the difference relative to the larger of `scale` and |there|; 0 if both are NaN."""
    if here == there or (math.isnan(here) and math.isnan(there)):
        return 0.0
    difference = abs(here - there) / max(scale, abs(there))
    return difference if math.isfinite(difference) else math.inf


def sizes_apart(
    here: Mapping[str, float], there: Mapping[str, float], scale: float = 1.0
) -> dict[str, float]:
    """Return the difference of each named value; it is infinite if one side lacks the value."""
    sizes = {}
    for name in {**here, **there}:
        sizes[name] = apart(here.get(name, math.nan), there.get(name, math.nan), scale)
    return sizes


def differences(
    reference: Recorded, variant: Recorded, tolerance: float = TOLERANCE
) -> dict[str, Difference]:
    """Return a variant's difference from the reference by column; equal columns are absent.

    For samples, learning rate, loss and gradients, it is the difference at the first step that
    differs. For weights, evaluation and optimizer, it is the largest difference after training.
    """
    columns: dict[str, Difference] = {}
    for name, compare in BY_STEP.items():
        for here, there in zip(variant.steps, reference.steps, strict=False):
            difference = compare(here, there, tolerance)
            if difference is not None:
                columns[name] = difference
                break
    if "samples" not in columns and len(variant.steps) != len(reference.steps):
        columns["samples"] = Difference(
            "end", f"{len(variant.steps)} steps, {len(reference.steps)} in the reference"
        )
    for name, compare_all in AFTER_TRAINING.items():
        places = compare_all(reference, variant, tolerance)
        worst = max(places, key=lambda place: place.size, default=None)
        if worst is not None:
            columns[name] = worst
    return columns


def largest(reference: Recorded, variant: Recorded) -> float:
    """Return the largest difference of losses, gradients, and weights after training."""
    places = list[Difference | None](weights_apart(reference, variant, 0.0))
    for here, there in zip(variant.steps, reference.steps, strict=False):
        places += [_losses(here, there, 0.0), _gradients(here, there, 0.0)]
    return max((place.size for place in places if place is not None), default=0.0)


def effect(one: Recorded, other: Recorded) -> float:
    """Return the largest difference of two runs' losses; infinite if a loss is not finite."""
    count = min(len(one.losses), len(other.losses))
    sizes = np.abs(one.losses[:count] - other.losses[:count])
    return float(np.nan_to_num(sizes, nan=math.inf).max(initial=0.0))


def first_bits(reference: Recorded, variant: Recorded) -> str | None:
    """Describe the first output of a module, or else gradient, whose bits differ."""
    for here, there in zip(variant.steps, reference.steps, strict=False):
        step = f"step {there.number + 1}"
        outputs = here.outputs
        for name, expected in there.outputs.items():
            digests = outputs.get(name, [])
            # ranks and replicas have other orders of samples
            if len(digests) == len(expected) and sorted(digests) != sorted(expected):
                return f"{step}: the output of {name}"
        bits = here.ranks[0]["bits"]
        expected_bits = there.ranks[0]["bits"]
        # the last gradient is the first that backward computes
        for name in reversed(expected_bits):
            if bits.get(name) != expected_bits[name]:
                return f"{step}: the gradient of {name}"
    return None


def _samples(here: Step, there: Step, tolerance: float) -> Difference | None:
    seen = Counter(here.samples)
    expected = Counter(there.samples)
    if seen == expected:
        return None
    shared = (seen & expected).total()
    return _at(
        there,
        f"{len(here.samples)} samples, {shared} of them among the {len(there.samples)} of the "
        "reference",
    )


def _rates(here: Step, there: Step, tolerance: float) -> Difference | None:
    for group, (rate, expected) in enumerate(zip(here.rates, there.rates, strict=False)):
        if not math.isclose(rate, expected, rel_tol=1e-9):
            return _at(
                there, f"learning rate of group {group} {rate:.6g}, {expected:.6g} in the reference"
            )
    return None


def _losses(here: Step, there: Step, tolerance: float) -> Difference | None:
    size = apart(here.loss, there.loss, TINY)
    if size <= tolerance:
        return None
    return _at(there, f"{here.loss:.9g}, {there.loss:.9g} in the reference", size)


def _gradients(here: Step, there: Step, tolerance: float) -> Difference | None:
    norms = filter(math.isfinite, there.gradients.values())
    scale = max(norms, default=0.0) or 1.0
    sizes = sizes_apart(here.gradients, there.gradients, TINY * scale)
    name = max(sizes, key=sizes.__getitem__, default="")
    if not name or sizes[name] <= tolerance:
        return None
    norm = here.gradients.get(name, math.nan)
    expected = there.gradients.get(name, math.nan)
    return _at(there, f"norm of {name} {norm:.9g}, {expected:.9g} in the reference", sizes[name])


def _at(step: Step, figures: str, size: float = math.inf) -> Difference:
    return Difference(f"step {step.number + 1}", figures, size, step.number)


def weights_apart(reference: Recorded, variant: Recorded, tolerance: float) -> Iterator[Difference]:
    """Yield differences after training.

    Compare weights and buffers with the reference's. Compare parameters of all ranks with rank
    zero's.
    """
    for name in {**reference.weights, **variant.weights}:
        here = variant.weights.get(name, torch.empty(0)).double()
        there = reference.weights.get(name, torch.empty(0)).double()
        if here.shape != there.shape:
            figures = f"shape {tuple(here.shape)}, {tuple(there.shape)} in the reference"
            yield Difference(name, figures)
        elif here.numel():
            size = float(((here - there).abs() / there.abs().clamp(min=1)).max())
            if math.isnan(size):
                size = math.inf
            if size > tolerance:
                yield Difference(name, f"differs by up to {size:.2g}", size)
    for name in variant.unequal:
        if name in variant.ranks[0]["parameters"]:
            yield Difference(name, "differs between ranks")


def _evaluation(reference: Recorded, variant: Recorded, tolerance: float) -> Iterator[Difference]:
    more = (variant.evaluated - reference.evaluated).total()
    fewer = (reference.evaluated - variant.evaluated).total()
    if more or fewer:
        yield Difference(
            "samples", f"{more} samples too many, {fewer} too few, of {reference.evaluated.total()}"
        )
    expected = reference.ranks[0]["metrics"]
    for rank, metrics in enumerate(_values(variant.ranks, "metrics")):
        for name, size in sorted(sizes_apart(metrics, expected).items()):
            if rank and name not in metrics:  # some metrics are logged only on rank zero
                continue
            if size > tolerance:
                yield _number(f"{name} on rank {rank}", name, metrics, expected, size)


def _optimizer(reference: Recorded, variant: Recorded, tolerance: float) -> Iterator[Difference]:
    """Yield differences of the optimizers' and schedulers' states on rank zero."""
    states = variant.ranks[0]["optimizers"]
    expected = reference.ranks[0]["optimizers"]
    for name, size in sizes_apart(states, expected).items():
        if size > tolerance:
            yield _number(name, name, states, expected, size)


def _number(
    place: str, name: str, here: Mapping[str, float], there: Mapping[str, float], size: float
) -> Difference:
    figures = f"{here.get(name, math.nan):.6g}, {there.get(name, math.nan):.6g} in the reference"
    return Difference(place, figures, size)


BY_STEP = {"samples": _samples, "learning rate": _rates, "loss": _losses, "gradients": _gradients}
AFTER_TRAINING = {"weights": weights_apart, "evaluation": _evaluation, "optimizer": _optimizer}
COLUMNS = (*BY_STEP, *AFTER_TRAINING)
