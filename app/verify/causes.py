"""Known causes of a variant's differences from the reference, and their remedies."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from app.verify.differences import COLUMNS, TOLERANCE, Parting, Recorded, apart, weights_apart


class Cause(NamedTuple):
    """Cause of a difference.

    Attributes:
        columns: Columns that the cause explains.
        text: Description of the cause, with figures.
        remedy: Remedy of the cause.
        effect: Largest change of a step's loss when the cause is removed; None if unknown.
    """

    columns: tuple[str, ...]
    text: str
    remedy: str
    effect: float | None = None


class Case(NamedTuple):
    """Variant that differs from the reference.

    Attributes:
        reference: Recording of the reference.
        way: Recording of the variant.
        found: First differences, by column.
        replicas: Number of devices that share a batch.
    """

    reference: Recorded
    way: Recorded
    found: dict[str, Parting]
    replicas: int

    @property
    def splits(self) -> bool:
        """Whether the network sees smaller batches than in the reference."""
        return self.replicas > 1 or self.way.facts["accumulate"] > self.reference.facts["accumulate"]


NUMBERS = ("loss", "gradients", "weights", "evaluation", "optimizer")
ORDER, SHARDS = {"run.global_order": "true"}, {"run.virtual_devices": "4"}  # flags that remove causes
OURS = "--run.global_order true: ranks share one permutation and every batch of it"
BITS = "--run.virtual_devices 4 in all ways but dp"


def causes(case: Case) -> list[Cause]:
    """Return the causes of the differences, in order of occurrence."""
    if not case.found:
        return []
    at_most_one = [_split(case), _samples(case), _rates(case)]
    return [*filter(None, at_most_one), *_over_a_batch(case), *_gradients(case), *_state(case), *_evaluation(case)]


def _samples(case: Case) -> Cause | None:
    """Return the cause of different samples in a step, or None."""
    way, reference, place = case.way, case.reference, case.found.get("samples")
    if place is None:
        return None
    everything, world = ("samples", *NUMBERS), len(way.ranks)
    if place.step is None:
        epochs = f"an epoch has {way.facts['batches']} batches, {reference.facts['batches']} in the reference"
        return Cause(everything, f"training ends at another step: {epochs}", f"keep the global batch; or {OURS}")
    here, there = way.steps[place.step], reference.steps[place.step]
    is_per_rank = world > 1 and len(here.samples) == world * len(there.samples)
    if _split(case) and not is_per_rank:
        return None
    if _other_pixels(case):
        return Cause(
            everything,
            "the same samples with other pixels: augmentation uses the global random state, which differs "
            "from the reference's",
            "--run.global_order true where a data set draws it, --run.virtual_devices 4 where a module does; or seed "
            "a generator by seed, epoch and sample",
        )
    if way.resumed_at is not None:
        return _lost_order(case, place.step)
    shares = [[str(s) for step in way.epoch(0) for b in step.ranks[r]["samples"] for s in b] for r in range(world)]
    if world > 1 and shares[0] and all(Counter(each) == Counter(shares[0]) for each in shares):
        return Cause(
            everything,
            f"every rank sees all samples: the same {len(shares[0])} in the first epoch on each of {world} ranks",
            "leave --trainer.use_distributed_sampler on, or have an iterable data set give each rank its share",
        )
    if is_per_rank:
        epochs = f"{way.facts['batches']} batches an epoch, {reference.facts['batches']} in the reference"
        return Cause(
            ("learning rate", *everything),
            f"the batch size is that of each rank: {len(here.samples)} samples a step, {len(there.samples)} in the "
            f"reference ({epochs})",
            f"divide the batch size by the number of ranks (here {len(there.samples) // world}), or {OURS}",
        )
    twice = sum(count - 1 for count in Counter(sample for each in shares for sample in each).values())
    if place.step and twice:
        return Cause(
            everything,
            f"shares are filled up to one size: {twice} samples of the first epoch were seen twice",
            f"weight each rank's loss by its samples instead (torch's DistributedSampler repeats); or {OURS}",
        )
    if twice >= world > 1:
        return Cause(
            everything,
            f"ranks draw their shares from different permutations: {twice} of {sum(map(len, shares))} samples of the "
            "first epoch were seen twice",
            "seed the sampler alike on all ranks",
        )
    same = [_same_order(each) for each in (way, reference)]
    if same == [True, False]:
        return Cause(
            everything,
            "every epoch has the same order: the sampler's set_epoch is never called",
            "give the loader itself to Lightning, which calls it, or call it in on_train_epoch_start",
        )
    ours, theirs = (each.facts["sampler"] for each in (way, reference))
    by = f": here by {ours}, there by {theirs}" if ours != theirs else ""
    return Cause(
        everything,
        f"samples come in another order{by}, from other random numbers: the same training only on average",
        f"draw one permutation from the seed and share it out; {OURS}",
    )


def _other_pixels(case: Case) -> bool:
    """Return whether a step has the reference's labels, but none of its samples."""
    place = case.found.get("samples")
    if place is None or place.step is None:
        return False
    pairs = list(zip(case.way.steps, case.reference.steps, strict=False))
    here, there = pairs[place.step]
    shared = set(map(str, here.samples)) & set(map(str, there.samples))
    return bool(here.labels) and not shared and all(Counter(a.labels) == Counter(b.labels) for a, b in pairs)


def _split(case: Case) -> Cause | None:
    """Return a cause if one run validates samples that the other run trains on, else None."""
    runs = case.way, case.reference
    ours, theirs = (run.evaluated for run in runs)
    here, there = ({sample for step in run.steps for sample in step.samples} for run in runs)
    more, fewer = ours - theirs, theirs - ours
    if more and fewer and ({*more} & there or {*fewer} & here):
        each, others = "process" if len(case.way.ranks) > 1 else "run", min(more.total(), theirs.total())
        return Cause(
            ("samples", *NUMBERS),
            f"each {each} draws its own split: {others} of {theirs.total()} validation samples differ",
            "seed random_split's generator: generator=torch.Generator().manual_seed(0)",
        )
    return None


def _same_order(recorded: Recorded) -> bool:
    """Return whether the second epoch, complete or not, repeats the first epoch's order."""
    orders = [[list(map(str, step.samples)) for step in recorded.epoch(number)] for number in (0, 1)]
    count = min(map(len, orders))
    return bool(count) and orders[0][:count] == orders[1][:count]


def _lost_order(case: Case, number: int) -> Cause:
    found = Counter(map(str, case.way.steps[number].samples))
    match = next((step.number for step in case.reference.steps if Counter(map(str, step.samples)) == found), None)
    step = f"step {number + 1}"
    if match is None:
        change = f"{step} has samples that are drawn anew"
    else:
        change = f"{step} {'repeats' if match < number else 'skips to'} those of step {match + 1}"
    return Cause(
        ("samples", *NUMBERS),
        f"the order of samples is lost on resume: {change}",
        f"give the loader a state_dict, as torchdata's StatefulDataLoader has, and a seed of its own; or {OURS}",
    )


def _rates(case: Case) -> Cause | None:
    """Return the cause of different learning rates, or None."""
    if "learning rate" not in case.found:
        return None
    way, reference, place = case.way, case.reference, case.found["learning rate"]
    here, there = way.steps[place.step or 0].rates[0], reference.steps[place.step or 0].rates[0]
    pairs = [(a, b) for a, b in zip(here, there, strict=False) if b]
    ratios = {round(a / b, 6) for a, b in pairs}
    columns = ("learning rate", *NUMBERS)
    if way.facts["accumulate"] > reference.facts["accumulate"]:
        return Cause(
            columns,
            f"the learning rate advances with each of the {way.facts['accumulate']} batches that a step accumulates",
            "advance it when an optimizer step was made: leave that to Lightning (interval: step)",
        )
    first = next((step.number for step in reference.steps if any(step.rates[0])), 0)  # after a warm-up from 0
    if place.step == first and len(ratios) == 1 and (ratio := ratios.pop()) != 1:
        by = "the number of ranks" if ratio == len(way.ranks) else "something that differs"
        return Cause(
            columns,
            f"the learning rate is {ratio:g} times the reference's from the first step on: it is scaled by {by}",
            "keep it while the global batch is the same; scale it only with the global batch",
        )
    if way.resumed_at is not None and place.step is not None and place.step >= way.resumed_at:
        return Cause(
            columns,
            f"the schedule is lost on resume: {place}",
            "return the scheduler from configure_optimizers, so that Lightning saves it; or save its state",
        )
    for mine, theirs in zip(way.facts["schedulers"], reference.facts["schedulers"], strict=False):
        total = next((key for key in theirs["state"] if "total" in key or "T_max" in key), None)
        if total and mine["state"].get(total) != theirs["state"][total]:
            lengths = f"{total} is {mine['state'].get(total)}, {theirs['state'][total]} in the reference"
            of = "estimated_stepping_batches or another count of this process' steps"
            return Cause(
                columns,
                f"{mine['class']} is counted in {of}: its {lengths}",
                "compute its length from the global batch and the size of the data set",
            )
        ours, wanted = ([len(each.epoch(number)) for number in (0, 1)] for each in (way, reference))
        if mine["interval"] == "epoch" and ours != wanted:
            return Cause(
                columns,
                f"{mine['class']} advances with each epoch, which has {ours[0]} steps, {wanted[0]} in the reference",
                "have it advance with each step, or keep the global batch",
            )
        if mine["interval"] == "step" and way.facts["estimated_steps"] != reference.facts["estimated_steps"]:
            counts = [f"{each.facts['estimated_steps']:g}" for each in (way, reference)]
            return Cause(
                columns,
                f"{mine['class']} is counted in estimated_stepping_batches: {counts[0]}, {counts[1]} in the reference",
                "compute its length from the global batch and the size of the data set",
            )
    return None


def _over_a_batch(case: Case) -> Iterator[Cause]:
    """Yield BatchNorm and random numbers in the step as causes."""
    facts = case.way.facts
    dealt = "samples" not in case.found or _other_pixels(case)
    if not dealt or not ({"loss", "gradients", "weights"} & case.found.keys()):
        return
    if facts["batchnorm"] and case.splits:
        yield Cause(
            NUMBERS,
            f"BatchNorm normalises each replica's part of a batch by itself: {_some(facts['batchnorm'])}",
            f"{BITS}; or GroupNorm",
        )
    draws = bool(facts["dropout"]) or any(rank.get("draws") for rank in case.way.ranks)
    if draws and (case.splits or case.way.resumed_at is not None):
        what = f"dropout ({_some(facts['dropout'])})" if facts["dropout"] else "random numbers in the step"
        state = "which is drawn in another order when a batch is split"
        if case.way.resumed_at is not None:
            state = "whose state is lost on resume"
        elif len(case.way.ranks) > 1:
            state = "which differs in each process"
        yield Cause(
            NUMBERS,
            f"{what} drawn from torch's global random state, {state}",
            f"{BITS}; trainings without it are the same on average",
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
    if here.micro_batches < way.facts["accumulate"] != reference.facts["accumulate"]:
        yield Cause(
            NUMBERS,
            f"the last window of an epoch accumulates {here.micro_batches} of {way.facts['accumulate']} batches, "
            "divided as if it were whole",
            f"weight each loss by its samples in the window, as the models of this application do; or {OURS}",
        )
    elif len(set(here.counts)) > 1 and "loss" in found and apart(here.weighted_loss, there.loss) < 1e-5:
        yield Cause(
            NUMBERS,
            f"a mean of means, of unequal shares ({', '.join(map(str, here.counts))} samples), at step "
            f"{place.step + 1}",
            f"multiply each summed loss by shares / samples of all of them; or drop the last batch; or {OURS}",
        )
    elif len(way.ranks) > 1 and "loss" in found and apart(here.loss * len(way.ranks), there.loss) < 1e-4:
        yield Cause(
            NUMBERS,
            f"the loss is a sum over a rank's samples: {here.loss:.6g}, {there.loss:.6g} in the reference",
            "return the mean over samples: ddp averages the ranks' gradients",
        )
    skipped = [step.number for step in way.steps if any(rank.get("skipped") for rank in step.ranks)]
    theirs = [step.number for step in reference.steps if any(rank.get("skipped") for rank in step.ranks)]
    if skipped != theirs:
        which = [_some([str(number + 1) for number in each]) or "none" for each in (skipped, theirs)]
        yield Cause(
            NUMBERS,
            f"float16's scaler skips steps {which[0]}, and {which[1]} in the reference",
            "--trainer.precision bf16-mixed, or a lower init_scale",
        )


def _state(case: Case) -> Iterator[Cause]:
    """Yield state that differs between ranks, or that only attributes hold, as causes."""
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
            "reduce their inputs over all ranks",
        )
    mine, theirs = way.ranks[0]["attributes"], reference.ranks[0]["attributes"]
    lost = [name for name in theirs if name not in mine or apart(mine[name], theirs[name]) > TOLERANCE]
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
                f"attributes that forward sets are lost with dp's replicas: {_some(lost)}",
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
            text = "every rank evaluates all samples"
        else:
            text = f"{more} of {sum(theirs.values())} samples are evaluated twice: the shares are filled up to one size"
        yield Cause(("evaluation",), text, f"drop the repeated samples (torch's DistributedSampler repeats); or {OURS}")
    if fewer and not more:
        yield Cause(
            ("evaluation",),
            f"{fewer} of {sum(theirs.values())} samples are not evaluated: drop_last, or a sampler that cuts shares",
            f"evaluate the last, smaller batch, too; or {OURS}",
        )
    if len(way.ranks) > 1:
        first, others = way.metrics(), [way.metrics(rank) for rank in range(1, len(way.ranks))]
        own = {
            name for other in others for name in other.keys() & first.keys() if apart(other[name], first[name]) > 1e-12
        }
        trained = {"loss", "gradients", "weights"} & case.found.keys()
        shares = {sum(len(batch) for loader in rank["evaluation"].values() for batch in loader) for rank in way.ranks}
        if own:
            yield Cause(
                ("evaluation",),
                f"each rank has its own {_some(sorted(own))}: logged without sync_dist",
                "self.log(…, sync_dist=True), or a metric of torchmetrics, which adds up over ranks",
            )
        elif not more and not fewer and not trained:
            of = "of unequal shares" if len(shares) > 1 else "which is not that of all samples"
            yield Cause(
                ("evaluation",),
                f"a mean of the ranks' values, {of}: {case.found['evaluation']}",
                "log a metric of torchmetrics, which counts samples, instead of a value with sync_dist=True",
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _of(name: str, modules: list[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def rounding() -> Cause:
    """Return the cause of different bits without another difference."""
    return Cause(NUMBERS, "each rank adds up its samples, and sums of other parts are rounded otherwise", BITS)


def unused(reference: Recorded) -> Cause:
    """Return the cause of a failure under ddp: parameters without a gradient in the reference."""
    used = reference.steps[0].gradients
    names = [name for name in reference.ranks[0]["parameters"] if name not in used]
    return Cause(
        COLUMNS,
        f"parameters that take no part in the loss: {_some(names) if names else 'of some steps'}: ddp waits for their "
        "gradients",
        "--trainer.strategy ddp_find_unused_parameters_true, or leave them out of the model",
    )
