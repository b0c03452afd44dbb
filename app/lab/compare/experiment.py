"""Experiment files: settings, and expansion into variants."""

import itertools
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from app.errors import UserError, nearest
from app.lab.runs import typed
from app.lab.variant import RESERVED, Variant

FitFlags = dict[str, Any]  # flags of `fit` by name, without dashes
Seconds = restricted_number_type("Seconds", float, [(">=", 1), ("<", math.inf)])


@dataclass
class Experiment:
    """Experiment: variants, and settings of their measurement.

    Args:
        name: Name of the experiment; by default its file's name.
        by: Figure that decides: `speed`, or `accuracy`, the best of validation. The repeats of a
            variant then have different seeds.
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
            its steps so far are measured. A run that must be killed, or that has not reached its
            first step, is `failed`.
        scale_batch: Multiply the global batch and the learning rate by the number of replicas.
            Without a schedule, the learning rate warms up for an epoch.
        quick: Use the experiment's small form, which needs only two cores.
        quick_form: Settings of the small form. They override the settings above; only `flags` are
            merged.
        published: Figures published elsewhere, for the report: Markdown.
    """

    name: str | None = None
    by: Literal["speed", "accuracy"] = "speed"
    description: str = ""
    configs: list[str] = field(default_factory=list)
    flags: FitFlags = field(default_factory=dict)
    variants: dict[str, FitFlags] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    exclude: list[FitFlags] = field(default_factory=list)
    baseline: str | None = None
    repeats: PositiveInt = 3
    warmup_epochs: NonNegativeInt = 1
    max_epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    time_limit: Seconds = 3600.0  # type: ignore[valid-type]
    scale_batch: bool = False
    quick: bool = False
    quick_form: FitFlags = field(default_factory=dict)
    published: str = ""

    def __post_init__(self) -> None:
        """Reject a null, unless it is the setting's default.

        Raises:
            UserError: When a setting is null.
        """
        for setting in fields(self):
            if getattr(self, setting.name) is None and setting.default is not None:
                raise UserError(f"{setting.name}: null: give its settings, or leave it out")


def expand(experiment: Experiment, flags: FitFlags) -> list[Variant]:
    """Return the variants of an experiment, and check every flag.

    Args:
        experiment: The experiment.
        flags: Flags of `fit` from the command line, added to every variant.

    Raises:
        UserError: When the experiment has no variants, a flag is reserved or cannot take effect, or
            `fit` rejects a variant.
    """
    limits = {
        "trainer.max_epochs": experiment.max_epochs,
        "trainer.max_steps": experiment.max_steps,
    }
    limits = {flag: limit for flag, limit in limits.items() if limit is not None}
    for flag in limits.keys() & experiment.flags:
        name = flag.removeprefix("trainer.")
        raise UserError(f"flags: {flag}: the experiment has {name}, too: leave one of them out")
    flags = limits | flags
    common = experiment.flags | flags
    varied = set(experiment.grid).union(*experiment.variants.values())
    for flag in {*varied, *common}.intersection(RESERVED):
        raise UserError(f"{flag} is set by compare itself: leave it out of the experiment")
    for flag in varied.intersection(flags):
        raise UserError(
            f"--{flag} is a flag of the variants: leave it out, or change the experiment"
        )
    by_name = experiment.variants | _product(experiment)
    if not by_name:
        raise UserError("the experiment has neither variants nor a grid: give one of them")
    baseline = experiment.baseline
    if baseline is not None and baseline not in by_name:
        raise UserError(f"--baseline {baseline}: no such variant{nearest(baseline, by_name)}")
    folders = {}
    for name, more in by_name.items():
        variant = _variant(experiment, str(name), common | more)
        if variant.slug in folders:
            raise UserError(
                f"two variants have the folder {variant.slug}: name {name!r} differently"
            )
        folders[variant.slug] = variant
    return list(folders.values())


def _product(experiment: Experiment) -> dict[str, FitFlags]:
    """Return each combination of the grid's values, by a name such as `strategy=ddp devices=2`."""
    grid = experiment.grid
    for key in set().union(*experiment.exclude) - grid.keys():
        raise UserError(f"exclude: {key} is not in the grid{nearest(key, grid)}")
    by_name = {}
    for values in itertools.product(*grid.values()):
        flags = dict(zip(grid, values, strict=True))
        is_excluded = any(excluded.items() <= flags.items() for excluded in experiment.exclude)
        if flags and not is_excluded:
            name = " ".join(f"{key.rpartition('.')[2]}={typed(flags[key])}" for key in flags)
            by_name[name] = flags
    return by_name


def _variant(experiment: Experiment, name: str, flags: FitFlags) -> Variant:
    variant = Variant.of_flags(name, flags, experiment.configs)
    if experiment.scale_batch:
        variant = Variant.of_flags(name, flags | _scaled(variant), experiment.configs)
    epochs = variant.settings.trainer.max_epochs
    warmup = experiment.warmup_epochs
    if epochs is not None and 0 <= epochs <= warmup:
        raise UserError(
            f"variant {name!r}: --trainer.max_epochs {epochs} leaves nothing to measure after "
            f"--warmup_epochs {warmup}: give more epochs or less warm-up"
        )
    return variant


def _scaled(variant: Variant) -> FitFlags:
    """Return flags that multiply batch size and learning rate by the replicas (linear rule).

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
    flags = {"data.batch_size": batch * count, "model.optimizer.lr": rate * count}
    model = settings.model.init_args
    has_schedule = model.get("schedule") or model.get("scheduler") or model.get("warmup")
    epochs = settings.trainer.max_epochs or 0
    if count > 1 and epochs > 1 and "warmup" in model and not has_schedule:
        flags["model.warmup"] = "1ep"
    return flags
