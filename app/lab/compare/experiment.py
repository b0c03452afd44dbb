"""Experiment files: settings, and expansion into variants."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from app.errors import UserError, nearest
from app.lab.variant import RESERVED, Variant, typed

MOST_VARIANTS = 1000  # upper limit of variants, and of repeats, because each run takes minutes
Seconds = restricted_number_type("Seconds", float, [(">=", 1), ("<", math.inf)])


@dataclass
class PublishedRow:
    """Row of published figures, for one configuration.

    Args:
        what: Name of the configuration.
        figures: Figures by their names in results.csv: numbers, or text such as `over 3000`.
        variant: Name of the corresponding variant, or None.
    """

    what: str
    figures: dict[str, float | str]
    variant: str | None = None


@dataclass
class Published:
    """Published figures to compare with.

    Args:
        hardware: Hardware of the published measurement.
        rows: Published figures.
        note: Remark about the figures.
    """

    hardware: str
    rows: list[PublishedRow]
    note: str = ""


@dataclass
class Experiment:
    """Experiment: variants, and settings of their measurement.

    Args:
        name: Name of the experiment; by default its file's name.
        description: Question of the experiment, in a sentence or two, for the top of the report.
        configs: Config files of `fit` that every variant starts from.
        flags: Flags of `fit` for every variant, such as `trainer.precision: bf16-mixed`. A null
            removes a flag.
        variants: Flags of `fit` for each variant, by its name.
        grid: Values of each flag; every combination is a variant, in addition to `variants`.
        exclude: Combinations to drop from the grid, each given by some of its flags.
        baseline: Variant that the others' speed-up and efficiency refer to; by default the first.
        repeats: Runs of each variant, in turn: A B C, A B C.
        warmup_epochs: Number of first epochs to exclude from throughput.
        max_epochs: Epochs of each run; by default the config's.
        max_steps: Steps of each run, instead of epochs.
        time_limit: Seconds after which a run is stopped. A run that stops cleanly is `slow`, and
            its steps so far are measured. A run that must be killed is `hanging`. A run that has
            not reached its first step is `starting`.
        scale_batch: Multiply the global batch and the learning rate by the number of replicas.
            Without a schedule, the learning rate warms up for an epoch.
        quick: Use the experiment's small form, which needs only two cores.
        quick_form: Settings of the small form. They override the settings above; only `flags` are
            merged.
        published: Figures published elsewhere, shown beside those measured here.
    """

    name: str | None = None
    description: str = ""
    configs: list[str] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    exclude: list[dict[str, Any]] = field(default_factory=list)
    baseline: str | None = None
    repeats: PositiveInt = 3
    warmup_epochs: NonNegativeInt = 1
    max_epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    time_limit: Seconds = 3600.0  # type: ignore[valid-type]
    scale_batch: bool = False
    quick: bool = False
    quick_form: dict[str, Any] = field(default_factory=dict)
    published: Published | None = None


def expand(experiment: Experiment, flags: Mapping[str, Any]) -> list[Variant]:
    """Return the variants of an experiment, and check every flag.

    Args:
        experiment: The experiment.
        flags: Flags of `fit` from the command line, added to every variant.

    Raises:
        UserError: When a setting is invalid, the experiment has no variants, or `fit` rejects a
            variant.
    """
    for name in (
        "configs",
        "flags",
        "variants",
        "grid",
        "exclude",
        "repeats",
        "warmup_epochs",
        "time_limit",
    ):
        if getattr(experiment, name) is None:
            raise UserError(f"{name}: null: give its settings, or leave it out")
    for name in itertools.chain(
        experiment.variants, experiment.flags, experiment.grid, *experiment.variants.values()
    ):
        if not isinstance(name, str) or not name.strip():
            raise UserError(
                f"{name!r} is not a name of a variant or flag: quote a name that YAML reads as a number or a boolean"
            )
    combinations = math.prod(len(values) for values in experiment.grid.values())
    if max(combinations + len(experiment.variants), experiment.repeats) > MOST_VARIANTS:
        raise UserError(
            f"{len(experiment.variants):,} variants, a grid of {combinations:,} combinations, "
            f"{experiment.repeats:,} repeats: give {MOST_VARIANTS:,} of each at most"
        )
    varied = {
        key for settings in (*experiment.variants.values(), experiment.grid) for key in settings
    }
    for flag in (*varied, *experiment.flags, *flags):
        limit = flag.removeprefix("trainer.")
        if flag in RESERVED:
            raise UserError(f"{flag} is set by compare itself: leave it out of the experiment")
        if limit in ("max_epochs", "max_steps") and getattr(experiment, limit) is not None:
            raise UserError(
                f"trainer.{limit}: the experiment sets {limit} for all variants: give only --{limit}"
            )
        if flag in flags and flag in varied:
            raise UserError(
                f"--{flag} is a flag of the variants: leave it out, or change the experiment"
            )
    by_name = {**experiment.variants, **_product(experiment)}
    if not by_name:
        raise UserError("the experiment has neither variants nor a grid: give one of them")
    if experiment.baseline is not None and experiment.baseline not in by_name:
        raise UserError(
            f"--baseline {experiment.baseline}: no such variant{nearest(experiment.baseline, by_name)}"
        )
    variants = [
        _variant(experiment, name, {**experiment.flags, **more, **flags})
        for name, more in by_name.items()
    ]
    slugs = [variant.slug for variant in variants]
    for variant in variants:
        if slugs.count(variant.slug) > 1:
            raise UserError(
                f"two variants have the folder {variant.slug}: name {variant.name!r} differently"
            )
    return variants


def _product(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Return the flags of each combination of the grid's values, by a name such as `strategy=ddp devices=2`."""
    grid = experiment.grid
    exclude = experiment.exclude
    for key, values in grid.items():
        if not values:
            raise UserError(f"grid: {key} has no values")
    for key in {key for excluded in exclude for key in excluded} - grid.keys():
        raise UserError(f"exclude: {key} is not in the grid{nearest(key, grid)}")
    combinations = [
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
        if values
    ]
    return {
        " ".join(f"{key.rsplit('.', 1)[-1]}={typed(value)}" for key, value in flags.items()): flags
        for flags in combinations
        if not any(excluded.items() <= flags.items() for excluded in exclude)
    }


def _variant(experiment: Experiment, name: str, flags: dict[str, Any]) -> Variant:
    limits = {
        "trainer.max_epochs": experiment.max_epochs,
        "trainer.max_steps": experiment.max_steps,
    }
    flags |= {name: value for name, value in limits.items() if value is not None}
    variant = Variant.of_flags(name, flags, experiment.configs)
    if experiment.scale_batch:
        variant = Variant.of_flags(name, flags | _scaled(variant), experiment.configs)
    limit = variant.settings.trainer.max_epochs
    warmup = experiment.warmup_epochs
    if limit is not None and 0 <= limit <= warmup:
        raise UserError(
            f"variant {name!r}: --trainer.max_epochs {limit} leaves nothing to measure after "
            f"--warmup_epochs {warmup}: give more epochs or less warm-up"
        )
    return variant


def _scaled(variant: Variant) -> dict[str, Any]:
    """Return flags that multiply batch size and learning rate by the number of replicas (linear rule).

    With several replicas, several epochs and no schedule, the flags also add a warm-up of one
    epoch. Source: Goyal et al., https://arxiv.org/abs/1706.02677.
    """
    count = variant.replicas
    settings = variant.settings
    batch = settings.get("data.init_args.batch_size")
    rate = settings.get("model.init_args.optimizer.init_args.lr")
    if not isinstance(batch, int) or rate is None:
        raise UserError(
            f"variant {variant.name!r}: --scale_batch needs a --data.batch_size in images and a "
            f"--model.optimizer.lr: they are {batch} and {rate}"
        )
    model = settings.model.init_args
    is_scheduled = any(model.get(name) for name in ("schedule", "scheduler", "warmup"))
    warms_up = (
        count > 1
        and "warmup" in model
        and not is_scheduled
        and (settings.trainer.max_epochs or 0) > 1
    )
    warmup = {"model.warmup": "1ep"} if warms_up else {}
    return {"data.batch_size": batch * count, "model.optimizer.lr": rate * count, **warmup}
