"""Known causes of a variant's differences from the reference, and their remedies."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from app.lab.verify.differences import TOLERANCE, Difference, Recorded, apart, weights_apart
from app.record.words import listed


@dataclass(frozen=True)
class Cause:
    """Cause of a difference.

    Attributes:
        text: Description of the cause, with figures.
        remedy: Change of flags or code that removes the cause.
        changes_loss: Whether the cause changes the training loss; false if only buffers or the
            evaluation change.
        effect: Largest change of a step's loss when the cause is removed; None if unknown.
    """

    text: str
    remedy: str
    changes_loss: bool = True
    effect: float | None = None


class Case(NamedTuple):
    """Variant that differs from the reference.

    Attributes:
        reference: Recording of the reference.
        way: Recording of the variant.
        differences: Difference by column of the table, such as `loss`; see
            `app.lab.verify.differences.differences`.
        replicas: Number of devices that share a batch.
    """

    reference: Recorded
    way: Recorded
    differences: dict[str, Difference]
    replicas: int

    @property
    def splits(self) -> bool:
        """Whether the network sees smaller batches than in the reference."""
        return (
            self.replicas > 1 or self.way.facts["accumulate"] > self.reference.facts["accumulate"]
        )


ORDER, SHARDS = (
    ("run.global_order", "true"),
    ("run.virtual_devices", "4"),
)  # flags of `fit` that remove many causes
OURS = "--run.global_order true: ranks share one permutation and every batch of it"
BITS = "--run.virtual_devices 4 (not for dp)"
# cause of different bits if `causes` finds no other cause
ROUNDING = Cause(
    "each rank sums over its own samples, and another order of summation rounds differently", BITS
)


def causes(case: Case) -> list[Cause]:
    """Return the causes of the differences, in the order of training: samples, rates, gradients, state, evaluation."""
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
    way = case.way
    reference = case.reference
    place = case.differences.get("samples")
    if place is None:
        return None
    world = len(way.ranks)
    batches = [way.facts["batches"], reference.facts["batches"]]
    lengths = f"an epoch has {batches[0]} batches, {batches[1]} in the reference"
    lengths = "the data set has no length" if float("inf") in batches else lengths
    if place.step is None:
        return Cause(
            f"training ends at another step: {lengths}", f"keep the global batch; or {OURS}"
        )
    here = way.steps[place.step]
    there = reference.steps[place.step]
    is_per_rank = world > 1 and len(here.samples) == world * len(there.samples)
    if _split(case) and not is_per_rank:  # `_split` already explains the different samples
        return None
    if _other_pixels(case):
        return Cause(
            "the same samples with other pixels: augmentation uses the global random state, which differs "
            "from the reference's",
            "--run.global_order true if the data set augments, --run.virtual_devices 4 if the module augments; or seed "
            "a generator by seed, epoch and sample",
        )
    if way.resumed_at is not None:
        return _lost_order(case, place.step)
    shares = [
        [s for step in way.epoch(0) for b in step.ranks[r]["samples"] for s in b]
        for r in range(world)
    ]
    if world > 1 and shares[0] and all(Counter(share) == Counter(shares[0]) for share in shares):
        return Cause(
            f"every rank sees all samples: the same {len(shares[0])} in the first epoch on each of {world} ranks",
            "leave --trainer.use_distributed_sampler on, or have an iterable data set give each rank its share",
        )
    if is_per_rank:
        return Cause(
            f"the batch size is that of each rank: {len(here.samples)} samples a step, {len(there.samples)} in the "
            f"reference ({lengths})",
            f"divide the batch size by the number of ranks (here {len(there.samples) // world}), or {OURS}",
        )
    whole = [sample for step in reference.epoch(0) for sample in step.samples]
    equal, twice = (
        len(samples) - len({*samples})
        for samples in (whole, [s for share in shares for s in share])
    )
    if len(reference.steps[0].samples) not in {len(step.samples) for step in way.epoch(0)}:
        return Cause(
            f"a step has {len(here.samples)} samples, {len(there.samples)} in the reference ({lengths})",
            "give the DataLoader a batch_size: Lightning may rebuild a batch sampler with another size",
        )
    if twice >= world > 1 and twice > 2 * equal:  # tolerate equal samples in the data set itself
        return Cause(
            f"ranks draw their shares from different permutations: {twice} of {sum(map(len, shares))} samples of the "
            "first epoch were seen twice",
            "seed the sampler alike on all ranks",
        )
    if _same_order(way) and not _same_order(reference):
        return Cause(
            "every epoch has the same order: the sampler's set_epoch is never called",
            "give the loader itself to Lightning, which calls it, or call it in on_train_epoch_start",
        )
    sampler = way.facts["sampler"]
    expected = reference.facts["sampler"]
    by = f": here by {sampler}, there by {expected}" if sampler != expected else ""
    return Cause(
        f"samples come in another order{by}: the same training only on average",
        f"draw one permutation from the seed, and divide it among the ranks: {OURS}",
    )


def _other_pixels(case: Case) -> bool:
    """Return whether only the pixels of the samples differ, as with unseeded augmentation.

    In this case, every step has the reference's labels. A sample's id is a digest of its pixels. So
    the new ids in the first step that differs occur nowhere in the reference.
    """
    place = case.differences.get("samples")
    if place is None or place.step is None:
        return False
    both = list(zip(case.way.steps, case.reference.steps, strict=False))
    here, there = both[place.step]
    seen = {sample for step in case.reference.steps for sample in step.samples}
    new = {*here.samples} - {*there.samples}
    return (
        bool(here.labels and new)
        and not new & seen
        and all(Counter(a.labels) == Counter(b.labels) for a, b in both)
    )


def _split(case: Case) -> Cause | None:
    """Return a cause if one run validates on samples that the other run trains on, else None."""
    runs = case.way, case.reference
    evaluated, expected = (run.evaluated for run in runs)
    here, there = ({sample for step in run.steps for sample in step.samples} for run in runs)
    more = evaluated - expected
    fewer = expected - evaluated
    if not (more and fewer and ({*more} & there or {*fewer} & here)):
        return None
    owner = "process" if len(case.way.ranks) > 1 else "run"
    others = min(more.total(), expected.total())
    return Cause(
        f"each {owner} draws its own split: {others} of {expected.total()} validation samples differ",
        "seed random_split's generator: generator=torch.Generator().manual_seed(0)",
    )


def _same_order(recorded: Recorded) -> bool:
    """Return whether the second epoch, complete or not, repeats the first epoch's order."""
    first, second = ([step.samples for step in recorded.epoch(number)] for number in (0, 1))
    count = min(len(first), len(second))
    return count > 0 and first[:count] == second[:count]


def _lost_order(case: Case, number: int) -> Cause:
    """Return the cause for a resumed run that lost the order of samples; `number` is its first wrong step, from 0."""
    samples = Counter(case.way.steps[number].samples)
    match = next(
        (step.number for step in case.reference.steps if Counter(step.samples) == samples), None
    )
    change = "draws new samples"
    if match is not None:
        change = f"{'repeats' if match < number else 'skips to'} those of step {match + 1}"
    return Cause(
        f"the order of samples is lost on resume: step {number + 1} {change}",
        f"use a seeded loader with a state_dict, such as torchdata's StatefulDataLoader; or {OURS}",
    )


def _rates(case: Case) -> Cause | None:
    """Return why the learning rates differ from the reference's, or None."""
    way = case.way
    reference = case.reference
    place = case.differences.get("learning rate")
    if place is None:
        return None
    if way.facts["accumulate"] > reference.facts["accumulate"]:
        return Cause(
            f"the learning rate advances with each of the {way.facts['accumulate']} batches that a step accumulates",
            "advance it once per optimizer step, as Lightning does with interval: step",
        )
    number = place.step or 0
    pairs = zip(way.steps[number].rates, reference.steps[number].rates, strict=False)
    ratios = {round(here / there, 6) for here, there in pairs if there}
    # first step with a nonzero rate, because a warm-up starts at 0
    first = next((step.number for step in reference.steps if any(step.rates)), 0)
    if place.step == first and len(ratios) == 1 and (ratio := ratios.pop()) != 1:
        by = "the number of ranks" if ratio == len(way.ranks) else "a setting that differs"
        return Cause(
            f"the learning rate is {ratio:g} times the reference's from the first step on: it is scaled by {by}",
            "keep it if the global batch is the same; scale it only with the global batch",
        )
    if way.resumed_at is not None and place.step is not None and place.step >= way.resumed_at:
        return Cause(
            f"the schedule is lost on resume: {place}",
            "return the scheduler from configure_optimizers, so that Lightning saves it; or save its state",
        )
    for scheduler, expected in zip(
        way.facts["schedulers"], reference.facts["schedulers"], strict=False
    ):
        name = scheduler["class"]
        interval = scheduler["interval"]
        lengths, wanted = ([len(run.epoch(epoch)) for epoch in (0, 1)] for run in (way, reference))
        if interval == "epoch" and lengths != wanted:
            return Cause(
                f"{name} advances with each epoch, which has {lengths[0]} steps, {wanted[0]} in the reference",
                "advance it with each step, or keep the global batch",
            )
        total = next((key for key in expected["state"] if "total" in key or "T_max" in key), "")
        here, there = (state["state"].get(total, 0) for state in (scheduler, expected))
        if here == there and interval == "step":
            total = "estimated_stepping_batches"
            here = way.facts["estimated_steps"]
            there = reference.facts["estimated_steps"]
        if here != there:
            return Cause(
                f"{name} is counted in this process's steps: its {total} is {here:g}, {there:g} in the reference",
                "keep the global batch, or compute its length from it and the size of the data set",
            )
    return None


def _over_a_batch(case: Case) -> Iterator[Cause]:
    """Yield causes that arise when a batch is split or a run is resumed: BatchNorm's statistics and random numbers."""
    facts = case.way.facts
    resumed = case.way.resumed_at is not None
    is_same_order = "samples" not in case.differences or _other_pixels(case)
    if not is_same_order or not ({"loss", "gradients", "weights"} & case.differences.keys()):
        return
    if facts["batchnorm"] and case.splits:
        yield Cause(
            f"BatchNorm normalises each replica's part of a batch by itself: {listed(facts['batchnorm'])}",
            f"{BITS}; or GroupNorm",
        )
    draws = bool(facts["dropout"]) or any(rank.get("draws") for rank in case.way.ranks)
    if draws and (case.splits or resumed):
        source = (
            f"dropout ({listed(facts['dropout'])})"
            if facts["dropout"]
            else "random numbers in the step"
        )
        state = "which is drawn in another order when a batch is split"
        if resumed:
            state = "whose state is lost on resume"
        elif len(case.way.ranks) > 1:
            state = "which differs in each process"
        yield Cause(
            f"{source} drawn from torch's global random state, {state}",
            f"{BITS}; without it, the trainings agree only on average",
        )


def _gradients(case: Case) -> Iterator[Cause]:
    """Yield causes of different losses or gradients, such as parameter hooks, unequal shares, or a summed loss."""
    way = case.way
    reference = case.reference
    differences = case.differences
    place = differences.get("gradients") or differences.get("loss")
    if "samples" in differences or place is None or place.step is None:
        return
    here = way.steps[place.step]
    there = reference.steps[place.step]
    world = len(way.ranks)
    accumulated = way.facts["accumulate"]
    if way.facts["hooked"] and world > 1:
        yield Cause(
            f"hooks of parameters change each rank's gradients before they are averaged: {listed(way.facts['hooked'])}",
            "clip or change them in on_before_optimizer_step, or by --trainer.gradient_clip_val: after the reduction",
        )
    if here.micro_batches < accumulated != reference.facts["accumulate"]:
        yield Cause(
            f"the last window of an epoch accumulates {here.micro_batches} of {accumulated} batches, divided as if it "
            "were whole",
            f"weight each loss by its samples in the window, as the models of this application do; or {OURS}",
        )
    elif (
        len(set(here.counts)) > 1
        and "loss" in differences
        and apart(here.weighted_loss, there.loss) < 1e-5
    ):
        yield Cause(
            f"a mean of means, of unequal shares ({', '.join(map(str, here.counts))} samples), at {place.where}",
            "sum each share's loss, and multiply it by the number of shares / samples of the step; or drop the last "
            f"batch; or {OURS}",
        )
    elif world > 1 and "loss" in differences and apart(here.loss * world, there.loss) < 1e-4:
        yield Cause(
            f"the loss is a sum over a rank's samples: {here.loss:.6g}, {there.loss:.6g} in the reference",
            "return the mean over samples: ddp averages the ranks' gradients",
        )
    elif (
        world > 1
        and "loss" in differences
        and differences["loss"].step == place.step
        and not [*_over_a_batch(case)]
    ):
        yield Cause(
            "the loss of a batch is not the mean over its samples: it weights or compares samples, or reads the rank",
            "divide a weighted sum by the ranks' mean weight; gather samples that are compared",
        )


def _state(case: Case) -> Iterator[Cause]:
    """Yield causes in the model's state: ranks that differ at the end, and attributes that a resume or dp loses."""
    way = case.way
    reference = case.reference
    differences = case.differences
    first = way.ranks[0]["digests"]
    trained = way.ranks[0]["parameters"]
    names = [
        name
        for name in first
        if any(rank["digests"].get(name) != first[name] for rank in way.ranks)
    ]
    parameters = [name for name in names if name in trained]
    if parameters:
        yield Cause(
            f"parameters differ between ranks at the end: {listed(parameters)} were changed outside of the optimizer",
            "change them on all ranks alike, or broadcast them",
        )
    if "samples" not in differences:
        names += [place.where for place in weights_apart(reference, way, TOLERANCE)]
    layers = tuple(f"{layer}." for layer in way.facts["batchnorm"])
    buffers = [
        name for name in dict.fromkeys(names) if name not in trained and not name.startswith(layers)
    ]
    if buffers and len(way.ranks) > 1 and not {"loss", "gradients"} & differences.keys():
        yield Cause(
            f"buffers are computed from each rank's own share: {listed(buffers)}",
            "reduce their inputs over all ranks",
            changes_loss=False,
        )
    attributes = way.ranks[0]["attributes"]
    expected = reference.ranks[0]["attributes"]
    lost = [
        name
        for name in expected
        if name not in attributes or apart(attributes[name], expected[name]) > TOLERANCE
    ]
    numbers = {"loss", "gradients", "weights", "evaluation"} & differences.keys()
    if not lost or not numbers or "samples" in differences:
        return
    if way.resumed_at is not None:
        yield Cause(
            f"state that is in no checkpoint: {listed(lost)}",
            "save it in on_save_checkpoint or in a callback's state_dict, or keep it in a buffer",
        )
    elif way.facts["strategy"] == "dp":
        yield Cause(
            f"attributes that forward sets are lost with dp's replicas: {listed(lost)}",
            "return them from forward, and set them in training_step; or use ddp",
        )


def _evaluation(case: Case) -> Iterator[Cause]:
    """Yield causes that change only the evaluation."""
    if "evaluation" not in case.differences:
        return
    way = case.way
    evaluated = case.way.evaluated
    expected = case.reference.evaluated
    world = len(way.ranks)
    more = (evaluated - expected).total()
    fewer = (expected - evaluated).total()
    if more and not fewer:
        text = f"{more} of {expected.total()} samples are evaluated twice: the shares are padded to equal size"
        if more == expected.total() * (world - 1):
            text = "every rank evaluates all samples"
        yield Cause(
            text,
            f"drop the repeated samples (torch's DistributedSampler repeats); or {OURS}",
            changes_loss=False,
        )
    if fewer and not more:
        yield Cause(
            f"{fewer} of {expected.total()} samples are not evaluated: drop_last, or a sampler that truncates shares",
            f"evaluate the last, smaller batch, too; or {OURS}",
            changes_loss=False,
        )
    if world == 1:
        return
    first, *others = (rank["metrics"] for rank in way.ranks)
    of_a_rank = {
        name
        for other in others
        for name in other.keys() & first.keys()
        if apart(other[name], first[name])
    }
    if of_a_rank:
        yield Cause(
            f"each rank has its own {listed(sorted(of_a_rank))}: logged without sync_dist",
            "self.log(…, sync_dist=True), or a metric of torchmetrics, which adds up over ranks",
            changes_loss=False,
        )
    elif not more and not fewer and not {"loss", "gradients", "weights"} & case.differences.keys():
        yield Cause(
            f"a mean of the ranks' values, not the value over all samples: {case.differences['evaluation']}",
            "log a metric of torchmetrics instead of a value with sync_dist=True; draw no random numbers",
            changes_loss=False,
        )
