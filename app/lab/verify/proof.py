"""Verification: runs a training in several variants, and compares each with a run on one device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from app.errors import UserError
from app.lab.runs import run_fit
from app.lab.variant import RESERVED, Variant
from app.lab.verify.causes import BITS, LOADER, REMEDIES, Case, Cause, causes
from app.lab.verify.differences import (
    EXACT,
    TOLERANCE,
    Difference,
    Recorded,
    differences,
    effect,
    first_bits,
)
from app.lab.verify.verdict import Result, Verdict
from app.record.words import duration

REFERENCE = "one device"
RESUMED = "stop and resume"
ALONE = {"trainer.strategy": "auto", "trainer.devices": 1, "trainer.num_nodes": 1}
# largest relative difference that 16-bit rounding can cause at the first step that differs
MAY_BE_ROUNDING = 1e-2
# variants that some flags do not allow
SKIPPED = {
    "dp × 2": "--run.virtual_devices needs separate processes",
    "accumulation × 2": "it halves --data.batch_size, which these flags do not allow",
}
NUMBERS = ("loss", "gradients", "weights")


@dataclass
class Settings:
    """Settings of `verify`, in addition to flags of `fit`.

    Args:
        steps: Number of optimizer steps of each run.
        variants: Flags of `fit` for further variants, by variant name.
        quick: Run only the variants `ddp × 2`, `stop and resume`, and those of `variants`.
        bits: Require the same bits, and print the first module whose output differs.
        time_limit: Seconds after which a run is stopped and counts as failed.
    """

    steps: int = 30
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    quick: bool = False
    bits: bool = False
    time_limit: float = 600.0


class Prover:
    """Verification of a training: runs the variants, and compares their recordings.

    Args:
        settings: Settings of `verify`.
        configs: Config files of `fit`.
        typed: Flags of `fit` from the command line, by name without dashes.
        folder: Folder of the runs.

    Attributes:
        say: Function called with the name of each run, and the time left.
        results: Results of the variants so far.
        global_batch: Samples of a step of the run on one device, if the user's loader is exact;
            else 0.

    Raises:
        UserError: When a flag is invalid, or set by `verify` itself.
    """

    def __init__(
        self, settings: Settings, configs: Sequence[str], typed: Mapping[str, Any], folder: Path
    ) -> None:
        if settings.steps < 4:
            raise UserError(f"--steps {settings.steps}: give 4 or more")
        for flag in typed:
            if flag in (*RESERVED, *ALONE):
                raise UserError(
                    f"--{flag} is set by verify itself: leave it out, or add a variant of your own "
                    "by --variants"
                )
        self.settings = settings
        self.configs = list(configs)
        self.typed = typed
        self.folder = folder
        self.say = lambda line: None
        self.results: list[Result] = []
        self.global_batch = 0
        self._seconds: list[float] = []  # of each run
        self.epoch_steps = math.ceil(settings.steps / 2)
        self.device: dict[str, Any] = {}
        # each run on one device, by its name with additional flags
        self.references: dict[str, Result] = {}
        self.config = self.variant(REFERENCE, ALONE).settings
        if self.config.trainer.accelerator == "auto":
            self.device["trainer.accelerator"] = "cpu"
            if torch.cuda.device_count() > 1:
                self.device["trainer.accelerator"] = "gpu"
        self.flags = {**self._variants(), **settings.variants, RESUMED: ALONE}

    def _variants(self) -> dict[str, dict[str, Any]]:
        """Return the flags of each of `verify`'s own variants, by name."""
        ddp = {**ALONE, "trainer.strategy": "ddp", "trainer.devices": 2}
        if self.settings.quick:
            return {"ddp × 2": ddp}
        variants = {
            "dp × 2": {**ddp, "trainer.strategy": "dp"},
            "ddp × 2": ddp,
            "ddp × 4": {**ddp, "trainer.devices": 4},
            "ddp_spawn × 2": {**ddp, "trainer.strategy": "ddp_spawn"},
            "ddp, 2 nodes": {**ddp, "trainer.devices": 1, "trainer.num_nodes": 2},
        }
        size = self.config.data.get("init_args.batch_size")
        is_even = isinstance(size, int) and size % 2 == 0
        is_whole = self.config.trainer.accumulate_grad_batches == 1
        if self.config.run.virtual_devices is not None:
            del variants["dp × 2"]
        elif is_even and is_whole:
            halved = {"trainer.accumulate_grad_batches": 2, "data.batch_size": size // 2}
            variants["accumulation × 2"] = {**ALONE, **halved}
        return variants

    def run(self) -> Verdict:
        """Run all variants, and return the verdict.

        Raises:
            UserError: When the reference fails, or `fit` rejects a variant's flags.
        """
        for name, flags in self.flags.items():  # check all flags before the first run
            self.variant(name, flags)
        reference = self._reference()
        if reference.recorded is None:
            raise UserError(f"the run on one device failed: {reference.failed}")
        self.global_batch = reference.recorded.facts["global_batch"]
        for name in self.flags:
            self.results.append(self._run(name))
        for name, reason in SKIPPED.items():
            if name not in self.flags and not self.settings.quick:
                self.results.append(Result(name, [], skipped=reason))
        faults: dict[str, Result] = {}
        for result in self.results:
            if result.differences and faults.setdefault(result.fault, result) is result:
                self._look_behind(result)
        return self.verdict()

    def verdict(self) -> Verdict:
        """Return the verdict on the variants that have run."""
        reference: Any = self.references[REFERENCE].recorded
        return Verdict(reference, self.results, self.settings.bits)

    def _announce(self, name: str) -> None:
        """Say which run begins, and how long the planned runs will take."""
        planned = 2 + len(self.flags)  # the reference, the variants, and the run to be resumed
        done = len(self._seconds)
        text = f"{name}  (run {done + 1} of {planned}"
        if done >= planned:
            text = f"{name}  (looks for further causes"
        elif done:
            text += f", about {duration(fmean(self._seconds) * (planned - done))} left"
        self.say(f"{text})")

    def variant(self, name: str, flags: Mapping[str, Any], more: Mapping[str, Any] = {}) -> Variant:
        """Create a `Variant`. Its flags override those of the command line.

        Args:
            name: Name of the variant.
            flags: Flags of the variant.
            more: Additional flags; they become a part of the name.

        Raises:
            UserError: When `fit` rejects the flags.
        """
        for flag, value in more.items():
            name += f" {flag}={value}"
        own = dict(flags)
        flags = {**self.device, **self.typed, **flags, **more}
        accumulated = own.get("trainer.accumulate_grad_batches", 1)
        if self.global_batch and ("data.batch_size" not in own or accumulated > 1):
            flags.setdefault("run.global_batch", self.global_batch // accumulated)
        variant = Variant.of_flags(name, flags, self.configs)
        if variant.settings.trainer.accelerator == "cpu":
            variant.lacking = None  # replicas that share cores are slow, but train the same
        return variant

    def _reference(self, more: Mapping[str, Any] = {}) -> Result:
        """Train on one device with additional flags, or return the earlier result."""
        variant = self.variant(REFERENCE, ALONE, more)
        if variant.name not in self.references:
            self.references[variant.name] = self._record(variant)
        return self.references[variant.name]

    def _run(self, name: str, more: Mapping[str, Any] = {}) -> Result:
        """Run a variant, and compare its recording with that of one device.

        Args:
            name: Name of the variant.
            more: Additional flags of both runs.

        Returns:
            The variant's result; if the run on one device fails, that run's.
        """
        flags = self.flags[name]
        try:
            variant = self.variant(name, flags, more)
        except UserError as error:  # `fit` does not allow the additional flags in this variant
            return Result(name, [], skipped=str(error))
        if variant.lacking:
            return Result(name, variant.arguments, skipped=variant.lacking)
        reference = self._reference(more).recorded
        if reference is None:
            return self._reference(more)
        earlier = None
        if name == RESUMED:
            # stop in the middle of the second epoch, or of the only one
            first = len(reference.epoch(0))
            second = len(reference.epoch(1))
            middle = max(first // 2, 1)
            if second:
                middle = first + second // 2
            stopped = self._record(self.variant("stopped", flags, more), middle)
            earlier = stopped.recorded
            if earlier is None:
                return replace(stopped, name=name)
            checkpoint = earlier.run_dir / "checkpoints" / "last.ckpt"
            variant = self.variant(name, {**flags, "ckpt_path": str(checkpoint)}, more)
        result = self._record(variant, earlier=earlier)
        result.name = name
        if result.recorded is None:
            return result
        bits = self.settings.bits
        result.reference = reference
        result.effect = effect(reference, result.recorded)
        result.differences = differences(reference, result.recorded, 0.0 if bits else TOLERANCE)
        case = Case(reference, result.recorded, result.differences, variant.replicas)
        result.causes = causes(case)
        if bits and result.differences:
            result.first_bits = first_bits(reference, result.recorded)
            if not result.causes and variant.settings.run.virtual_devices is None:
                text = (
                    "each rank sums over its own samples, and another order of summation rounds "
                    "differently"
                )
                result.causes = [Cause(text, BITS)]
        if not bits:
            self._repeat_in_float64(result, more)
        return result

    def _record(
        self, variant: Variant, steps: int | None = None, earlier: Recorded | None = None
    ) -> Result:
        """Run a variant, and read its recording.

        Args:
            variant: The variant.
            steps: Number of optimizer steps; by default the settings'.
            earlier: Recording of the run that this run resumes, or None.
        """
        self._announce(variant.name)
        arguments = [
            *variant.arguments[1:],
            "--trainer.callbacks+=app.lab.verify.recording.Recording",
            f"--trainer.callbacks.steps={steps or self.settings.steps}",
            f"--trainer.callbacks.epoch_steps={self.epoch_steps}",
            f"--trainer.callbacks.bits={self.settings.bits}",
            "--run.wandb=false",
            "--run.warmup_epochs=0",
            "--run.on_nonfinite=warn",
            "--run.on_divergence=warn",
        ]
        folder = self.folder / "runs" / variant.slug
        record = run_fit(arguments, self.settings.time_limit, folder, variant.nodes())
        self._seconds.append(record.wall_s or 0.0)
        result = Result(variant.name, variant.arguments)
        if record.status == "completed":
            result.recorded = Recorded(Path(str(record.run_dir)), earlier)
        elif record.time_limit is not None:
            result.failed = f"not finished after {record.time_limit:g} s: see --time_limit"
        else:
            result.failed = record.error
        return result

    def _look_behind(self, result: Result) -> None:
        """Repeat a variant with flags that remove known causes, to find hidden causes.

        Add the hidden causes to the result, and set each cause's effect on the loss.

        Args:
            result: Result of a variant that differs.
        """
        flags = self.flags[result.name]
        if "data.batch_size" in flags and "trainer.accumulate_grad_batches" not in flags:
            # the variant's batch size is another one on the ranks of a remedy
            return
        before = result
        more: dict[str, Any] = {}
        for name, value in REMEDIES.items():
            is_remedy = any(name in cause.remedy for cause in before.causes)
            is_given = name == LOADER and self.config.run.loader == value
            if is_given or not (is_remedy or (name == LOADER and "samples" in result.differences)):
                continue
            after = self._run(result.name, {**more, name: value})
            if after.skipped:
                continue
            more[name] = value
            result.remedied = _outcome(more, after)
            if after.recorded is None:
                return
            known = {cause.kind for cause in result.causes}
            remaining = {cause.kind for cause in after.causes}
            for cause in after.causes:
                if cause.kind not in known:
                    result.causes.append(cause)
            for cause in result.causes:
                if cause.changes_loss and cause.kind in remaining:
                    cause.effect = after.effect
                elif cause.changes_loss and cause.effect is None:
                    cause.effect = max(0.0, before.effect - after.effect)
            result.causes.sort(key=lambda cause: -(cause.effect or 0.0))
            before = after

    def _repeat_in_float64(self, result: Result, more: Mapping[str, Any]) -> None:
        """Repeat a variant in float64, to separate rounding from other differences.

        Do nothing if rounding cannot be the cause. This is so if the numbers are equal or far
        apart, if samples or learning rates differ, or if the variant ran in float64 already.

        Args:
            result: Result of a variant. This method updates it.
            more: Additional flags of the result's run.
        """
        sizes = _sizes(result.differences)
        precision = more.get("trainer.precision", self.config.trainer.precision)
        other = {"samples", "learning rate"} & result.differences.keys()
        if str(precision).startswith("64") or other or not sizes or sizes[0] > MAY_BE_ROUNDING:
            return
        repeated = self._run(result.name, {**more, "trainer.precision": "64-true"})
        if repeated.recorded is None:
            return
        assert repeated.reference
        runs = (repeated.reference, repeated.recorded)
        sizes = _sizes(differences(*runs, EXACT)) or _sizes(differences(*runs, 0.0))
        result.in_float64 = max(sizes, default=0.0)
        if result.in_float64 > EXACT:
            return
        for name in list(result.differences):
            if name in NUMBERS or name not in repeated.differences:
                result.rounding[name] = result.differences.pop(name)
        if not result.differences:
            result.causes = []


def _sizes(columns: Mapping[str, Difference]) -> list[float]:
    return [columns[name].size for name in NUMBERS if name in columns]


def _outcome(flags: Mapping[str, Any], result: Result) -> str:
    """Describe a run with more flags, such as `--run.loader exact: the same training`."""
    text = "the same training"
    if result.failed:
        text = f"does not run: {result.failed}"
    elif result.differences:
        text = f"still different {', '.join(result.differences)}"
    typed = " ".join(f"--{name} {value}" for name, value in flags.items())
    return f"{typed}: {text}"
