"""Comparison of two recordings of a training: finds where samples, losses and weights differ."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch

from app.errors import UserError
from app.lab.verify.recording import FOLDER
from app.system.torch_files import load

COLUMNS = ("samples", "learning rate", "loss", "gradients", "weights", "evaluation", "optimizer")
# tolerance for float32: relative for losses, gradients and values above 1, else absolute
TOLERANCE = 1e-5
RATE_TOLERANCE = 1e-9
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
        facts: Recording of rank zero.
        resumed_at: Number of steps that the earlier run took; None without an earlier run.
        steps: Steps of the run, each with all ranks' recordings.
        losses: Loss of each step.
        evaluated: Number of times that each sample was evaluated in the last validation, over all
            ranks.
        metrics: Metrics of the last validation, a row for each rank.
        rates: Learning rates, a row for each step, a column for each parameter group.
        gradients: Norms of the parameters' gradients, a row for each step.
        attributes: Numeric attributes of the modules and callbacks after training.
        optimizers: Numbers in the optimizers' and schedulers' states, in one row.
        trained: Number of times that each sample was trained on, over all ranks.
        first_epoch: The same in the first epoch.
        unequal: Names of weights and buffers that differ between ranks after training.

    Raises:
        UserError: When the run recorded nothing.
    """

    def __init__(self, run_dir: Path, earlier: "Recorded | None" = None) -> None:
        files = sorted((run_dir / FOLDER).glob("rank_*.pt"))
        if not files:
            raise UserError(f"{run_dir}: no steps were recorded")
        self.run_dir = run_dir
        self.ranks: list[dict[str, Any]] = list(map(load, files))
        self.facts = self.ranks[0]
        self.resumed_at: int | None = None
        if earlier is not None:
            self.resumed_at = len(earlier.steps)
            for here, before in zip(self.ranks, earlier.ranks, strict=True):
                here["steps"] = before["steps"] + here["steps"]
        ranks: Any = pd.DataFrame(self.ranks)
        self.steps: list[Step] = list(map(Step, zip(*ranks["steps"], strict=False)))
        if self.facts["weighs"]:
            for step in self.steps:
                step.loss = fmean(step.losses, step.counts)
        rows: Any = pd.DataFrame(map(vars, self.steps), columns=["loss", "rates", "gradients"])
        self.losses = rows["loss"]
        self.rates = pd.DataFrame(list(rows["rates"])).add_prefix("learning rate of group ")
        self.gradients = pd.DataFrame(list(rows["gradients"])).add_prefix("norm of ")
        self.evaluated = Counter(ranks["evaluation"].sum())  # a sum of lists
        # some metrics are logged only on rank zero
        metrics = [self.facts["metrics"] | values for values in ranks["metrics"]]
        self.metrics = pd.DataFrame(metrics)
        self.attributes = pd.Series(self.facts["attributes"], dtype=float)
        self.optimizers = pd.DataFrame([self.facts["optimizers"]])
        self.trained = Counter(_chained(self.steps))
        self.first_epoch = Counter(_chained(self.epoch(0)))
        digests = pd.DataFrame(list(ranks["digests"]))
        self.unequal = list(digests.columns[digests.nunique() > 1])

    def epoch(self, number: int) -> list["Step"]:
        """Return the steps of an epoch."""
        return [step for step in self.steps if step.epoch == number]

    def has(self, column: str) -> bool:
        """Return whether the run recorded a column: samples have tensors, steps a loss."""
        if column == "loss":
            return not self.losses.isna().all()
        return bool(self.steps and (self.trained or column != "samples"))


class Step:
    """Optimizer step.

    Args:
        ranks: Each rank's recording of the step.

    Attributes:
        samples: Ids of all samples, over all ranks and micro-batches.
        labels: Digests of the samples' integer tensors, such as labels.
        micro_batches: Number of accumulated batches per rank.
        loss: Loss that the optimizer minimises: the mean of the ranks' losses, which an exact
            loader's step weighs by their samples.
        losses: Loss of each batch, over all ranks and micro-batches.
        counts: Number of samples of each batch, over all ranks and micro-batches.
        rates: Learning rate of each parameter group, on rank zero.
        gradients: Norm of each parameter's gradient, on rank zero.
    """

    def __init__(self, ranks: Sequence[dict[str, Any]]) -> None:
        rows: Any = pd.DataFrame(ranks)
        batches = rows["samples"].sum()  # a sum of lists
        self.ranks = ranks
        self.epoch = ranks[0]["epoch"]
        self.counts = rows["counts"].sum()
        self.samples = list(itertools.chain(*batches))
        self.labels = rows["labels"].sum()
        self.micro_batches = len(ranks[0]["samples"])
        self.loss = rows["loss"].mean(skipna=False)
        self.losses = rows["losses"].sum()
        self.rates = ranks[0].get("rates", [])
        self.gradients = ranks[0]["gradients"]


def _chained(steps: Sequence[Step]) -> list[Any]:
    return list(itertools.chain(*(step.samples for step in steps)))


@dataclass(frozen=True)
class Difference:
    """Difference of a run from the reference.

    For values of each step, it is the difference at the first step that differs. For values after
    training, it is the largest difference.

    Attributes:
        where: Step, rank or parameter.
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


def apart(here: Any, there: Any, scale: Any = 1.0) -> Any:
    """Return the differences of two Series or DataFrames of numbers.

    Differences are relative to the larger of `scale` and |there|. They are 0 if both numbers are
    NaN, and infinite if one number is NaN or missing.

    Args:
        here: The numbers.
        there: The reference's numbers.
        scale: A number, or one for each row.
    """
    here, there = here.astype(float).align(there.astype(float))
    sizes = (here - there).abs() / there.abs().clip(lower=scale, axis=0)
    same = (here == there) | (here.isna() & there.isna())
    return sizes.mask(same, 0.0).fillna(math.inf)


def differences(
    reference: Recorded, variant: Recorded, tolerance: float = TOLERANCE
) -> dict[str, Difference]:
    """Return a variant's difference from the reference by column; equal columns are absent."""
    # the largest finite norm of each step
    norms = reference.gradients[reference.gradients < math.inf].max(axis="columns")
    scale = TINY * norms.replace(0, 1).fillna(1)
    columns = {
        "samples": _samples(reference, variant),
        "learning rate": _first(reference.rates, variant.rates, RATE_TOLERANCE, 0),
        "loss": _first(reference.losses.to_frame(""), variant.losses.to_frame(""), tolerance, TINY),
        "gradients": _first(reference.gradients, variant.gradients, tolerance, scale),
        "weights": _weights(reference, variant, tolerance),
        "evaluation": _evaluation(reference, variant, tolerance),
        "optimizer": _on_ranks(reference.optimizers, variant.optimizers, tolerance),
    }
    return {name: place for name, place in columns.items() if place is not None}


def effect(one: Recorded, other: Recorded) -> float:
    """Return the largest difference of two runs' losses; infinite if a loss is not finite."""
    here, there = one.losses.align(other.losses, join="inner")
    return float((here - there).abs().fillna(math.inf).max())


def first_bits(reference: Recorded, variant: Recorded) -> str | None:
    """Describe the first output of a module, or else gradient, whose bits differ."""
    pairs = zip(variant.steps, reference.steps, strict=False)
    for number, (here, there) in enumerate(pairs, 1):
        for place, expected in there.ranks[0]["bits"].items():
            digests = itertools.chain(*(rank["bits"].get(place, []) for rank in here.ranks))
            # ranks and replicas have other orders of samples
            seen = sorted(digests)
            if len(seen) == len(expected) and seen != sorted(expected):
                return f"step {number}: the {place}"
    return None


def _samples(reference: Recorded, variant: Recorded) -> Difference | None:
    steps = zip(variant.steps, reference.steps, strict=False)
    for number, (here, there) in enumerate(steps):
        seen = Counter(here.samples)
        expected = Counter(there.samples)
        if seen != expected:
            shared = (seen & expected).total()
            figures = (
                f"{len(here.samples)} samples, {shared} of them among the {len(there.samples)} of "
                "the reference"
            )
            return Difference(f"step {number + 1}", figures, step=number)
    if len(variant.steps) != len(reference.steps):
        figures = f"{len(variant.steps)} steps, {len(reference.steps)} in the reference"
        return Difference("end", figures)
    return None


def _first(
    there: pd.DataFrame, here: pd.DataFrame, tolerance: float, scale: Any = 1.0
) -> Difference | None:
    """Return the largest difference in the first row that differs, or None."""
    here, there = here.align(there, join="inner", axis="index")
    sizes = apart(here, there, scale)
    differs = sizes.max(axis="columns") > tolerance
    if not differs.any():
        return None
    number = int(differs.idxmax())
    name = sizes.loc[number].idxmax()
    figures = f"{name} {here[name][number]:.9g}, {there[name][number]:.9g} in the reference"
    return Difference(f"step {number + 1}", figures.lstrip(), sizes[name][number], number)


def _on_ranks(there: pd.DataFrame, here: pd.DataFrame, tolerance: float) -> Difference | None:
    """Return the largest difference on the first rank that differs from the reference, or None."""
    place = _first(there.reindex(here.index, method="ffill"), here, tolerance)
    if place is None:
        return None
    return replace(place, where=f"rank {place.step}", step=None)


def weights_apart(reference: Recorded, variant: Recorded) -> pd.Series:
    """Return the largest difference of each weight and buffer after training, by name."""
    sizes = pd.Series(dtype=float)
    for name, expected in reference.facts["weights"].items():
        weight = variant.facts["weights"].get(name, torch.empty(0))
        here = pd.Series(weight.double().flatten().numpy())
        there = pd.Series(expected.double().flatten().numpy())
        sizes[name] = apart(here, there).max()
    return sizes


def _weights(reference: Recorded, variant: Recorded, tolerance: float) -> Difference | None:
    for name in variant.unequal:
        if name in variant.facts["parameters"]:
            return Difference(name, "differs between ranks")
    sizes = weights_apart(reference, variant)
    size = sizes.max()
    if size > tolerance:
        return Difference(str(sizes.idxmax()), f"differs by up to {size:.2g}", size)
    return None


def _evaluation(reference: Recorded, variant: Recorded, tolerance: float) -> Difference | None:
    more = (variant.evaluated - reference.evaluated).total()
    fewer = (reference.evaluated - variant.evaluated).total()
    if more or fewer:
        return Difference(
            "samples", f"{more} samples too many, {fewer} too few, of {reference.evaluated.total()}"
        )
    return _on_ranks(reference.metrics, variant.metrics, tolerance)
