"""Why a way of running parts from the reference, where that can be told, and what to do about it."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from app.verify.differences import TOLERANCE, Parting, Recorded, apart, weights_apart


class Cause(NamedTuple):
    """What makes a difference.

    Attributes:
        columns: Those that it explains.
        said: What it is, with figures.
        remedy: What to do.
    """

    columns: tuple[str, ...]
    said: str
    remedy: str


class Case(NamedTuple):
    """A way of running that parts from the reference.

    Attributes:
        reference: What the reference has recorded.
        way: What the way has recorded.
        found: Where they part, by column.
        replicas: Devices that share a batch.
    """

    reference: Recorded
    way: Recorded
    found: dict[str, Parting]
    replicas: int

    @property
    def splits(self) -> bool:
        """Whether what the network sees at once is a part of what it sees in the reference."""
        return self.replicas > 1 or self.way.facts["accumulate"] > self.reference.facts["accumulate"]


NUMBERS = ("loss", "gradients", "weights", "evaluation", "optimizer")
OURS = "subclass app.data.ImageData, whose ranks share one permutation and every batch of it"


def causes(case: Case) -> list[Cause]:
    """The causes of the differences, the first one first."""
    found = [cause for look in LOOKS for cause in look(case)]
    explained = {column for cause in found for column in cause.columns}
    # what follows from a difference of samples needs no cause of its own
    return found if explained or not case.found else []


def _samples(case: Case) -> Iterator[Cause]:
    way, reference = case.way, case.reference
    if "samples" not in case.found:
        return
    here, there, world = way.steps[0], reference.steps[0], len(way.ranks)
    everything = ("samples", *NUMBERS)
    if way.resumed_at is not None:
        yield from _resumed_samples(case)
        return
    if len(here.samples) == world * len(there.samples) and world > 1:
        same = Counter(map(str, here.ranks[0]["samples"])) == Counter(map(str, here.ranks[1]["samples"]))
        if same:
            yield Cause(
                everything,
                f"every rank sees all samples: the same {here.counts[0]} on each of {world} ranks",
                "leave --trainer.use_distributed_sampler on, or have an iterable data set give each rank its share",
            )
            return
        epochs = f"{way.facts['batches']} steps an epoch, {reference.facts['batches']} in the reference"
        yield Cause(
            ("samples", "rate", *NUMBERS),
            f"the batch size is that of each rank: {len(here.samples)} samples a step, {len(there.samples)} in the "
            f"reference ({epochs})",
            f"divide the batch size by the number of ranks (here {len(there.samples) // world}), or {OURS}",
        )
        return
    if here.labels and Counter(here.labels) == Counter(there.labels):
        yield Cause(
            everything,
            "the same samples with other pixels: augmentation is drawn from global random state, which differs "
            "between processes",
            "draw it from a generator that is seeded by seed, epoch and sample",
        )
        return
    rank_samples = [
        [str(s) for step in way.epoch(0) for b in step.ranks[r]["samples"] for s in b] for r in range(world)
    ]
    seen = Counter(sample for each in rank_samples for sample in each)
    twice = sum(count - 1 for count in seen.values())
    total = sum(seen.values())
    if twice >= world > 1 and all(len(set(each)) == len(each) for each in rank_samples):
        if all(Counter(each) == Counter(rank_samples[0]) for each in rank_samples):
            said = f"every rank sees all samples: each of {len(seen)} was seen by all {world} ranks in the first epoch"
            yield Cause(everything, said, "leave --trainer.use_distributed_sampler on, or give each rank its share")
        else:
            said = f"ranks draw their shares from different permutations: {twice} of {total} samples of the first epoch"
            yield Cause(everything, f"{said} were seen twice", "seed the sampler alike on all ranks")
        return
    orders = [[list(map(str, step.samples)) for step in way.epoch(number)] for number in (0, 1)]
    shortest = min(map(len, orders))
    if shortest and orders[0][:shortest] == orders[1][:shortest] and world > 1:
        yield Cause(
            everything,
            "every epoch has the same order: nobody calls set_epoch of the sampler",
            "give the loader itself to Lightning, which calls it, or call it in on_train_epoch_start",
        )
        return
    ours, theirs = (each.facts["loader"]["sampler"] for each in (way, reference))
    by = f": here by {ours}, there by {theirs}" if ours != theirs else ""
    yield Cause(
        everything,
        f"samples come in another order{by}, from other random numbers: the same training only on average",
        f"draw one permutation from the seed and share it out; {OURS}",
    )


def _resumed_samples(case: Case) -> Iterator[Cause]:
    way, reference, at = case.way, case.reference, case.way.resumed_at or 0
    if at >= len(way.steps):
        return
    first = Counter(map(str, way.steps[at].samples))
    match = next((step for step in reference.steps if Counter(map(str, step.samples)) == first), None)
    where = f"those of step {match.number + 1}" if match else "none of one step of the reference"
    again = "repeats" if match and match.number < at else "skips" if match else "draws anew"
    yield Cause(
        ("samples", *NUMBERS),
        f"the order of samples is lost on resume, which {again} some: step {at + 1} has {where}",
        f"give the loader a state_dict, as torchdata's StatefulDataLoader has, and a seed of its own; or {OURS}",
    )


def _rates(case: Case) -> Iterator[Cause]:
    if "rate" not in case.found:
        return
    way, reference, place = case.way, case.reference, case.found["rate"]
    pairs = [(a, b) for a, b in zip(way.steps[0].rates[0], reference.steps[0].rates[0], strict=False) if b]
    ratios = {round(a / b, 6) for a, b in pairs}
    columns = ("rate", *NUMBERS)
    if place.step == 0 and len(ratios) == 1 and (ratio := ratios.pop()) != 1:
        by = "the number of ranks" if ratio == len(way.ranks) else "something that differs"
        yield Cause(
            columns,
            f"the learning rate is {ratio:g} times that of the reference from the first step on: it is scaled by {by}",
            "leave it as it is where the global batch stays; scale it only with the global batch",
        )
        return
    if way.resumed_at is not None and place.step is not None and place.step >= way.resumed_at:
        yield Cause(
            columns,
            f"the schedule is lost on resume: {place}",
            "return the scheduler from configure_optimizers, so that Lightning saves it; or save its state",
        )
        return
    for mine, theirs in zip(way.facts["schedulers"], reference.facts["schedulers"], strict=False):
        total = next((key for key in theirs["state"] if "total" in key or "T_max" in key), None)
        if total and mine["state"].get(total) != theirs["state"][total]:
            lengths = f"{total} is {mine['state'].get(total)}, {theirs['state'][total]} in the reference"
            of = "estimated_stepping_batches or another count of this process' steps"
            yield Cause(
                columns,
                f"{mine['class']} is counted in {of}: its {lengths}",
                "compute its length from the global batch and the size of the data set",
            )
            return
        ours, wanted = ([len(each.epoch(number)) for number in (0, 1)] for each in (way, reference))
        if mine["interval"] == "epoch" and ours != wanted:
            yield Cause(
                columns,
                f"{mine['class']} advances with each epoch, which has {ours[0]} steps, {wanted[0]} in the reference",
                "have it advance with each step, or keep the global batch",
            )
            return
        if way.facts["accumulate"] > 1 and mine["interval"] == "step":
            yield Cause(
                columns,
                f"{mine['class']} advances with each batch, of which a step accumulates {way.facts['accumulate']}",
                "advance it when an optimizer step was made: leave that to Lightning (interval: step)",
            )
            return


def _over_a_batch(case: Case) -> Iterator[Cause]:
    """BatchNorm, and what is drawn in the step."""
    facts = case.way.facts
    if "samples" in case.found or not ({"loss", "gradients", "weights"} & case.found.keys()):
        return
    if facts["batchnorm"] and case.splits:
        yield Cause(
            NUMBERS,
            f"BatchNorm normalises each replica's part of a batch by itself: {_some(facts['batchnorm'])}",
            "--trainer.sync_batchnorm true under ddp; or GroupNorm",
        )
    if any(rank.get("draws") for rank in case.way.ranks) and (case.splits or case.way.resumed_at is not None):
        what = f"dropout ({_some(facts['dropout'])})" if facts["dropout"] else "random numbers in the step"
        state = (
            "whose state is lost on resume" if case.way.resumed_at is not None else "of which each process has its own"
        )
        yield Cause(
            NUMBERS,
            f"{what} drawn from torch's global random state, {state}",
            "for a proof, give dropout 0; trainings with it are the same on average",
        )


def _gradients(case: Case) -> Iterator[Cause]:
    way, reference, found = case.way, case.reference, case.found
    place = found.get("gradients") or found.get("loss")
    if "samples" in found or place is None or place.step is None:
        return
    here, there = way.steps[place.step], reference.steps[place.step]
    if way.facts["hooked"] and len(way.ranks) > 1:
        yield Cause(
            NUMBERS,
            f"hooks of parameters change each rank's gradients before they are averaged: {_some(way.facts['hooked'])}",
            "clip or change them in on_before_optimizer_step, or by --trainer.gradient_clip_val: after the reduction",
        )
    if here.micro_batches < way.facts["accumulate"] and here.micro_batches != there.micro_batches:
        yield Cause(
            NUMBERS,
            f"the last window of an epoch accumulates {here.micro_batches} of {way.facts['accumulate']} batches, "
            "divided as if it were whole",
            f"weight each loss by its samples in the window, as the models of this application do; or {OURS}",
        )
    elif len(set(here.counts)) > 1 and "loss" in found and apart(here.weighted_loss, there.loss) < 1e-5:
        yield Cause(
            NUMBERS,
            f"the mean of the ranks' means, of unequal shares ({', '.join(map(str, here.counts))} samples), at step "
            f"{place.step + 1}",
            f"multiply each rank's summed loss by ranks / samples of all ranks; or drop the last batch; or {OURS}",
        )
    skipped = [step.number for step in way.steps if any(rank.get("skipped") for rank in step.ranks)]
    if skipped != [step.number for step in reference.steps if any(rank.get("skipped") for rank in step.ranks)]:
        yield Cause(
            NUMBERS,
            f"float16's scaler has left out other steps: {_some([str(number + 1) for number in skipped])}",
            "--trainer.precision bf16-mixed, or a lower init_scale",
        )


def _state(case: Case) -> Iterator[Cause]:
    """What ranks have of their own, and what lies in attributes."""
    way, reference = case.way, case.reference
    first = way.ranks[0]["digests"]
    apart_on = [name for name in first if any(rank["digests"].get(name) != first[name] for rank in way.ranks)]
    parameters = [name for name in apart_on if name in way.ranks[0]["parameters"]]
    of_reference = (
        [] if "samples" in case.found else [place.where for place in weights_apart(reference, way, TOLERANCE)]
    )
    buffers = [
        name
        for name in [*apart_on, *of_reference]
        if name not in way.ranks[0]["parameters"] and not _of(name, way.facts["batchnorm"])
    ]
    if parameters:
        yield Cause(
            NUMBERS,
            f"parameters differ between ranks at the end: {_some(parameters)} were changed outside of the optimizer",
            "change them on all ranks alike, or broadcast them",
        )
    if buffers and len(way.ranks) > 1 and not {"loss", "gradients"} & case.found.keys():
        yield Cause(
            ("weights", "evaluation"),
            f"buffers are computed from each rank's own share: {_some(list(dict.fromkeys(buffers)))}",
            "reduce what they are computed from over all ranks",
        )
    mine, theirs = way.ranks[0]["attributes"], reference.ranks[0]["attributes"]
    lost = [name for name in theirs if mine.get(name) != theirs[name]]
    numbers = {"loss", "gradients", "weights", "evaluation"} & case.found.keys()
    if lost and numbers and "samples" not in case.found:
        if way.resumed_at is not None:
            yield Cause(
                NUMBERS,
                f"state that is in no checkpoint: {_some(lost)}",
                "return it from state_dict (of a callback), on_save_checkpoint, or keep it in a buffer",
            )
        elif way.facts["strategy"] == "dp":
            yield Cause(
                NUMBERS,
                f"what forward keeps in attributes is lost with dp's replicas: {_some(lost)}",
                "return it from forward and keep it in training_step; or use ddp",
            )


def _evaluation(case: Case) -> Iterator[Cause]:
    if "evaluation" not in case.found:
        return
    way, reference = case.way, case.reference
    ours, theirs = way.evaluated, reference.evaluated
    more, fewer = sum((ours - theirs).values()), sum((theirs - ours).values())
    if more and not fewer:
        if more == sum(theirs.values()) * (len(way.ranks) - 1):
            said = "every rank evaluates all samples"
        else:
            said = f"{more} of {sum(theirs.values())} samples are evaluated twice: the shares are filled up to one size"
        yield Cause(
            ("evaluation",), said, f"leave out what is filled up (torch's DistributedSampler repeats); or {OURS}"
        )
    if fewer and not more:
        yield Cause(
            ("evaluation",),
            f"{fewer} of {sum(theirs.values())} samples are not evaluated: drop_last, or a sampler that cuts shares",
            f"evaluate the last, smaller batch, too; or {OURS}",
        )
    if len(way.ranks) > 1:
        first = way.metrics()
        own = [
            name
            for name in first
            for rank in range(1, len(way.ranks))
            if apart(way.metrics(rank).get(name, 0), first[name]) > 1e-12
        ]
        trained = {"loss", "gradients", "weights"} & case.found.keys()
        if own:
            yield Cause(
                ("evaluation",),
                f"each rank has its own {_some(sorted(set(own)))}: logged without sync_dist",
                "self.log(…, sync_dist=True), or a metric of torchmetrics, which adds up over ranks",
            )
        elif not more and not fewer and not trained:
            yield Cause(
                ("evaluation",),
                f"a mean of the ranks' means, of unequal shares: {case.found['evaluation']}",
                "log a metric of torchmetrics, which counts samples, instead of a value with sync_dist=True",
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _of(name: str, modules: list[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


LOOKS: tuple[Callable[[Case], Iterator[Cause]], ...] = (
    _samples,
    _rates,
    _over_a_batch,
    _gradients,
    _state,
    _evaluation,
)
