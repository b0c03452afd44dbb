"""Known causes of a variant's differences from the reference, and their remedies."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from app.lab.verify.differences import TOLERANCE, Difference, Recorded, apart, weights_apart
from app.record.words import listed

LOADER = "run.loader"
SHARDS = "run.virtual_devices"
# flags of `fit` that remove many causes
REMEDIES = {LOADER: "exact", SHARDS: "4"}
# attributes of schedulers that hold the length of training
LENGTHS = ("total_steps", "total_iters", "T_max", "estimated_stepping_batches")
OURS = "--run.loader exact, with torch's own samplers: ranks share one permutation"
BITS = "--run.virtual_devices 4 (not for dp)"


@dataclass
class Cause:
    """Cause of a difference.

    Attributes:
        text: Description of the cause, with figures.
        remedy: Change of flags or code that removes the cause.
        changes_loss: Whether the cause changes the training loss; false if only buffers or the
            evaluation change.
        effect: Decrease of the largest difference of a step's loss when the cause is removed; None
            if unknown.
    """

    text: str
    remedy: str
    changes_loss: bool = True
    effect: float | None = None

    @property
    def kind(self) -> str:
        """Text without digits, which is equal for the same cause in different runs."""
        return re.sub(r"\d", "", self.text)


class Case(NamedTuple):
    """Variant that differs from the reference.

    Attributes:
        reference: Recording of the reference.
        variant: Recording of the variant.
        differences: Difference by column of the table, such as `loss`; see
            `app.lab.verify.differences.differences`.
        replicas: Number of devices that share a batch.
    """

    reference: Recorded
    variant: Recorded
    differences: dict[str, Difference]
    replicas: int

    @property
    def accumulates(self) -> bool:
        """Whether the variant accumulates more batches than the reference."""
        return self.variant.facts["accumulate"] > self.reference.facts["accumulate"]

    @property
    def splits(self) -> bool:
        """Whether the network sees smaller batches than in the reference."""
        return self.replicas > 1 or self.accumulates

    @property
    def drifted(self) -> list[str]:
        """Names of the variant's parameters that differ between its ranks after training."""
        trained = self.variant.facts["parameters"]
        return [name for name in self.variant.unequal if name in trained]

    def first_step(self, column: str) -> int | None:
        """Return the first step that differs in a column; None if the column has no such step."""
        return getattr(self.differences.get(column), "step", None)

    def differs(self, *columns: str) -> bool:
        """Return whether the variant differs in one of the columns."""
        return not self.differences.keys().isdisjoint(columns)


def causes(case: Case) -> list[Cause]:
    """Return the causes of the differences in the order of training: samples first."""
    if not case.differences:
        return []
    at_most_one = [_split(case), _samples(case), _rates(case)]
    return [
        *filter(None, at_most_one),
        *_over_a_batch(case),
        *_gradients(case),
        *_state(case),
        *_evaluation(case),
    ]


def _samples(case: Case) -> Cause | None:
    """Return why a step's samples differ from the reference's, or None."""
    variant = case.variant
    reference = case.reference
    number = case.first_step("samples")
    if number is None:
        return None
    world = len(variant.ranks)
    here = variant.steps[number].samples
    there = reference.steps[number].samples
    is_per_rank = world > 1 and len(here) == world * len(there)
    if _split(case) and not is_per_rank:  # `_split` already explains the different samples
        return None
    if _other_pixels(case):
        return Cause(
            "the same samples with other pixels: augmentation uses the global random state, which "
            "differs from the reference's",
            "--run.loader exact if the data set augments, --run.virtual_devices 4 if the module "
            "augments; or seed a generator by seed, epoch and sample",
        )
    if variant.resumed_at is not None:
        return Cause(
            f"the order of samples is lost on resume, from step {number + 1} on",
            "use a seeded loader with a state_dict, such as torchdata's StatefulDataLoader; or "
            f"{OURS}",
        )
    seen = variant.first_epoch
    count = seen.total()
    if seen and world > 1 and not any(times % world for times in seen.values()):
        return Cause(
            f"every rank sees all samples: the same {count // world} in the first epoch on each of "
            f"{world} ranks",
            "leave --trainer.use_distributed_sampler on, or have an iterable data set give each "
            "rank its share",
        )
    sizes = (
        f"{len(here)} samples a step, {len(there)} in the reference (an epoch has "
        f"{variant.facts['batches']} batches, {reference.facts['batches']} in the reference)"
    )
    if is_per_rank:
        return Cause(
            f"the batch size is that of each rank: {sizes}",
            f"--run.global_batch {len(there)}, or divide the batch size by the number of ranks "
            f"(here {len(there) // world})",
        )
    counts = {len(step.samples) for step in variant.epoch(0)}
    if len(reference.steps[0].samples) not in counts:
        return Cause(
            f"another batch size: {sizes}",
            "give the DataLoader a batch_size: Lightning may rebuild a batch sampler with another "
            "size",
        )
    twice = count - len(seen)
    # equal samples in the data set itself
    equal = reference.first_epoch.total() - len(reference.first_epoch)
    if twice >= world > 1 and twice > 2 * equal:
        return Cause(
            f"ranks draw their shares from different permutations: {twice} of {count} samples "
            "of the first epoch were seen twice",
            "seed the sampler alike on all ranks",
        )
    if _same_order(variant) and not _same_order(reference):
        return Cause(
            "every epoch has the same order: the sampler's set_epoch is never called",
            "give the loader itself to Lightning, which calls it, or call it in "
            "on_train_epoch_start",
        )
    return Cause(
        f"samples come in another order, here by {variant.facts['sampler']}, there by "
        f"{reference.facts['sampler']}: the same training only on average",
        f"draw one permutation from the seed, and divide it among the ranks: {OURS}",
    )


def _other_pixels(case: Case) -> bool:
    """Return whether only the pixels of the samples differ, as with unseeded augmentation.

    In this case, every step has the reference's labels. A sample's id is a digest of its pixels. So
    the new ids in the first step that differs occur nowhere in the reference.
    """
    number = case.first_step("samples")
    if number is None:
        return False
    for here, there in zip(case.variant.steps, case.reference.steps, strict=False):
        if not here.labels or Counter(here.labels) != Counter(there.labels):
            return False
    new = {*case.variant.steps[number].samples} - {*case.reference.steps[number].samples}
    return bool(new) and new.isdisjoint(case.reference.trained)


def _split(case: Case) -> Cause | None:
    """Return a cause if one run validates on samples that the other trains on, else None."""
    more = case.variant.evaluated - case.reference.evaluated
    fewer = case.reference.evaluated - case.variant.evaluated
    leaks = case.reference.trained.keys() & more or case.variant.trained.keys() & fewer
    if not (more and fewer and leaks):
        return None
    count = case.reference.evaluated.total()
    return Cause(
        f"each process draws its own split: {min(more.total(), count)} of {count} validation "
        "samples differ",
        "seed random_split's generator: generator=torch.Generator().manual_seed(0)",
    )


def _same_order(recorded: Recorded) -> bool:
    """Return whether the second epoch, complete or not, repeats the first epoch's order."""
    pairs = list(zip(recorded.epoch(0), recorded.epoch(1), strict=False))
    return bool(pairs) and all(first.samples == second.samples for first, second in pairs)


def _rates(case: Case) -> Cause | None:
    """Return why the learning rates differ from the reference's, or None."""
    variant = case.variant
    reference = case.reference
    number = case.first_step("learning rate")
    if number is None:
        return None
    if case.accumulates:
        return Cause(
            "the learning rate advances with each of the batches that a step accumulates",
            "advance it once per optimizer step, as Lightning does with interval: step",
        )
    here: Any = variant.rates.loc[number]
    there: Any = reference.rates.loc[number]
    ratios = (here / there)[there != 0].round(6).unique()
    # a warm-up starts at 0
    is_first = not reference.rates[:number].any(axis=None)
    if is_first and len(ratios) == 1:
        return Cause(
            f"the learning rate is {ratios[0]:g} times the reference's from the first step on, on "
            f"{len(variant.ranks)} ranks: it is scaled by their number, or by another setting",
            "keep it if the global batch is the same; scale it only with the global batch",
        )
    if variant.resumed_at is not None and number >= variant.resumed_at:
        return Cause(
            f"the schedule is lost on resume: {case.differences['learning rate']}",
            "return the scheduler from configure_optimizers, so that Lightning saves it; or save "
            "its state",
        )
    for scheduler, expected in zip(
        variant.facts["schedulers"], reference.facts["schedulers"], strict=False
    ):
        name = scheduler["class"]
        steps = len(variant.epoch(0))
        steps_there = len(reference.epoch(0))
        if scheduler["interval"] == "epoch" and steps != steps_there:
            return Cause(
                f"{name} advances with each epoch, which has {steps} steps, {steps_there} in the "
                "reference",
                "advance it with each step, or keep the global batch",
            )
        for total in LENGTHS:
            here = scheduler["lengths"].get(total, 0)
            there = expected["lengths"].get(total, 0)
            if here != there:
                return Cause(
                    f"{name} is counted in this process's steps: its {total} is {here:g}, "
                    f"{there:g} in the reference",
                    "keep the global batch, or compute its length from it and the size of the data "
                    "set",
                )
    return None


def _over_a_batch(case: Case) -> Iterator[Cause]:
    """Yield causes of split batches and resumes: BatchNorm's statistics and random numbers."""
    facts = case.variant.facts
    is_same_order = not case.differs("samples") or _other_pixels(case)
    if not is_same_order or not case.differs("loss", "gradients", "weights"):
        return
    if facts["batchnorm"] and case.splits:
        yield Cause(
            "BatchNorm normalises each replica's part of a batch by itself: "
            f"{listed(facts['batchnorm'])}",
            f"{BITS}; or GroupNorm",
        )
    if not case.splits and case.variant.resumed_at is None:
        return
    source = ""
    if facts["dropout"]:
        source = f"dropout ({listed(facts['dropout'])})"
    elif any("draws" in rank for rank in case.variant.ranks):
        source = "random numbers in the step"
    if source:
        yield Cause(
            f"{source} drawn from torch's global random state, which differs in each process, in a "
            "batch that is split, and after a resume",
            f"{BITS}; without it, the trainings agree only on average",
        )


def _gradients(case: Case) -> Iterator[Cause]:
    """Yield causes of different losses or gradients, such as unequal shares, or a summed loss."""
    variant = case.variant
    differences = case.differences
    place = differences.get("gradients") or differences.get("loss")
    if case.differs("samples") or place is None or place.step is None:
        return
    here = variant.steps[place.step]
    world = len(variant.ranks)
    accumulated = variant.facts["accumulate"]
    hooked = variant.facts["hooked"]
    if hooked and world > 1:
        yield Cause(
            "hooks of parameters change each rank's gradients before they are averaged: "
            f"{listed(hooked)}",
            "clip or change them in on_before_optimizer_step, or by --trainer.gradient_clip_val: "
            "after the reduction",
        )
    if case.accumulates and here.micro_batches < accumulated:
        yield Cause(
            f"the last window of an epoch accumulates {here.micro_batches} of {accumulated} "
            "batches, divided as if it were whole",
            "weight each loss by its samples in the window, as the models of this application do; "
            f"or {OURS}",
        )
        return
    if not case.differs("loss"):
        return
    loss = variant.losses[place.step]
    expected = case.reference.losses[place.step]
    counts = here.counts
    weighted = loss
    if len(set(counts)) > 1:
        weighted = fmean(here.losses, counts)
    if weighted != loss and math.isclose(weighted, expected, rel_tol=1e-5, abs_tol=1e-5):
        yield Cause(
            f"a mean of means, of unequal shares ({', '.join(map(str, counts))} samples), at "
            f"{place.where}",
            "sum each share's loss, and multiply it by the number of shares / samples of the step; "
            f"or drop the last batch; or {OURS}",
        )
    elif world > 1 and math.isclose(loss * world, expected, rel_tol=1e-4, abs_tol=1e-4):
        yield Cause(
            f"the loss is a sum over a rank's samples: {loss:.6g}, {expected:.6g} in the reference",
            "return the mean over samples: ddp averages the ranks' gradients",
        )
    elif case.drifted or case.differs("learning rate") or any(_over_a_batch(case)):
        return  # these make the weights, and so the loss, differ
    elif world > 1 and differences["loss"].step == place.step:
        yield Cause(
            "the loss of a batch is not the mean over its samples: it weights or compares samples, "
            "or reads the rank",
            "divide a weighted sum by the ranks' mean weight; gather samples that are compared",
        )


def _state(case: Case) -> Iterator[Cause]:
    """Yield causes in the model's state: ranks that differ, and attributes that are lost."""
    variant = case.variant
    reference = case.reference
    trained = variant.facts["parameters"]
    if case.drifted:
        yield Cause(
            f"parameters differ between ranks at the end: {listed(case.drifted)} were changed "
            "outside of the optimizer",
            "change them on all ranks alike, or broadcast them",
        )
    names = list(variant.unequal)
    if not case.differs("samples"):
        sizes = weights_apart(reference, variant)
        names += list(sizes.index[sizes > TOLERANCE])
    statistics = tuple(f"{layer}." for layer in variant.facts["batchnorm"])
    buffers = []
    for name in dict.fromkeys(names):
        if name not in trained and not name.startswith(statistics):
            buffers.append(name)
    if buffers and len(variant.ranks) > 1 and not case.differs("loss", "gradients"):
        yield Cause(
            f"buffers are computed from each rank's own share: {listed(buffers)}",
            "reduce their inputs over all ranks",
            changes_loss=False,
        )
    expected = reference.attributes
    sizes = apart(variant.attributes, expected)[expected.index]
    lost = list(sizes.index[sizes > TOLERANCE])
    has_effect = case.differs("loss", "gradients", "weights", "evaluation")
    if not lost or not has_effect or case.differs("samples"):
        return
    if variant.resumed_at is not None:
        yield Cause(
            f"state that is in no checkpoint: {listed(lost)}",
            "save it in on_save_checkpoint or in a callback's state_dict, or keep it in a buffer",
        )
    elif case.replicas > len(variant.ranks):  # dp
        yield Cause(
            f"attributes that forward sets are lost with dp's replicas: {listed(lost)}",
            "return them from forward, and set them in training_step; or use ddp",
        )


def _evaluation(case: Case) -> Iterator[Cause]:
    """Yield causes that change only the evaluation."""
    if not case.differs("evaluation"):
        return
    variant = case.variant
    more = (variant.evaluated - case.reference.evaluated).total()
    fewer = (case.reference.evaluated - variant.evaluated).total()
    count = case.reference.evaluated.total()
    world = len(variant.ranks)
    if more and not fewer:
        yield Cause(
            f"{more} of {count} samples are evaluated twice: the shares are padded to equal size, "
            "or every rank evaluates all samples",
            f"drop the repeated samples (torch's DistributedSampler repeats); or {OURS}",
            changes_loss=False,
        )
    if fewer and not more:
        yield Cause(
            f"{fewer} of {count} samples are not evaluated: drop_last, or a sampler that truncates "
            "shares",
            f"evaluate the last, smaller batch, too; or {OURS}",
            changes_loss=False,
        )
    if world == 1:
        return
    metrics = variant.metrics
    unequal = sorted(metrics.columns[metrics.nunique(dropna=False) > 1])
    if unequal:
        yield Cause(
            f"each rank has its own {listed(unequal)}: logged without sync_dist",
            "self.log(…, sync_dist=True), or a metric of torchmetrics, which adds up over ranks",
            changes_loss=False,
        )
    elif not more and not fewer and not case.differs("loss", "gradients", "weights"):
        yield Cause(
            "a mean of the ranks' values, not the value over all samples: "
            f"{case.differences['evaluation']}",
            "log a metric of torchmetrics instead of a value with sync_dist=True; draw no random "
            "numbers",
            changes_loss=False,
        )
