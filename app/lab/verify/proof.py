"""Verification: runs a training in several variants, and compares each with a run on one device."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from app.errors import UserError
from app.lab.runs import run_fit
from app.lab.variant import RESERVED, Variant
from app.lab.verify.causes import ORDER, ROUNDING, SHARDS, Case, Cause, causes
from app.lab.verify.differences import (
    EXACT,
    TOLERANCE,
    Recorded,
    differences,
    effect,
    first_operation,
    largest,
)
from app.lab.verify.verdict import Result, Verdict

REFERENCE = "one device"
STOPPED = "stopped"
RESUMED = "stop and resume"
ALONE = {"trainer.strategy": "auto", "trainer.devices": 1, "trainer.num_nodes": 1}
# largest relative difference that 16-bit rounding can cause at the first step that differs
MAY_BE_ROUNDING = 1e-2
NUMBERS = ("loss", "gradients", "weights")


@dataclass
class Settings:
    """Settings of `verify`, in addition to flags of `fit`.

    Args:
        steps: Number of optimizer steps of each run.
        ways: Flags of `fit` for further variants, by variant name.
        quick: Run only the variants `ddp × 2`, `stop and resume`, and those of `ways`.
        bits: Require the same bits, and print the first operation whose output differs.
        time_limit: Seconds after which a run is stopped and counts as failed.
    """

    steps: int = 30
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)
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
        say: Function called with the name of each run.

    Raises:
        UserError: When a flag is invalid, or set by `verify` itself.
    """

    def __init__(
        self, settings: Settings, configs: Sequence[str], typed: Mapping[str, Any], folder: Path
    ) -> None:
        if settings.steps < 4:
            raise UserError(f"--steps {settings.steps}: give 4 or more")
        for flag in typed:
            if flag in RESERVED:
                raise UserError(f"--{flag} is set by verify itself: leave it out")
            if flag in ("trainer.devices", "trainer.strategy", "trainer.num_nodes"):
                raise UserError(
                    f"--{flag} is a flag of the variants: leave it out, or add a variant of your own by --ways"
                )
        self.settings = settings
        self.configs = list(configs)
        self.typed = typed
        self.folder = folder
        self.say = lambda line: None
        self.epoch_steps = math.ceil(settings.steps / 2)
        self.device: dict[str, Any] = {}
        self.references: dict[
            str, Result
        ] = {}  # each run on one device; the key is its additional flags
        self.config = self.variant(REFERENCE, ALONE).settings
        if self.config.trainer.accelerator == "auto":
            self.device = {"trainer.accelerator": "gpu" if torch.cuda.device_count() > 1 else "cpu"}

    def ways(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return two dictionaries by variant name: flags of the variants to run, and reasons of the skipped ones."""
        ddp = {**ALONE, "trainer.strategy": "ddp", "trainer.devices": 2}
        skipped: dict[str, str] = {}
        if self.settings.quick:
            return {"ddp × 2": ddp, **self.settings.ways}, skipped
        ways = {
            "dp × 2": {**ddp, "trainer.strategy": "dp"},
            "ddp × 2": ddp,
            "ddp × 4": {**ddp, "trainer.devices": 4},
            "ddp_spawn × 2": {**ddp, "trainer.strategy": "ddp_spawn"},
            "ddp, 2 nodes": {**ddp, "trainer.devices": 1, "trainer.num_nodes": 2},
        }
        sharded = self.config.run.virtual_devices is not None
        if sharded:
            skipped["dp × 2"] = "--run.virtual_devices needs separate processes"
            del ways["dp × 2"]
        accumulated = "accumulation × 2"
        size = self.config.data.get("init_args.batch_size")
        if (
            sharded
            or self.config.trainer.accumulate_grad_batches != 1
            or not isinstance(size, int)
            or size % 2
        ):
            skipped[accumulated] = "it halves --data.batch_size, which these flags do not allow"
        else:
            ways[accumulated] = {
                **ALONE,
                "trainer.accumulate_grad_batches": 2,
                "data.batch_size": size // 2,
            }
        return ways | self.settings.ways, skipped

    def run(self) -> Verdict:
        """Run all variants, and return the verdict.

        Raises:
            UserError: When the reference fails, or `fit` rejects a variant's flags.
        """
        flags, skipped = self.ways()
        for name, more in flags.items():  # check all flags before the first run
            self.variant(name, more)
        reference = self._run(REFERENCE, ALONE)
        if reference.recorded is None:
            raise UserError(f"the run on one device failed: {reference.failed}")
        results = [self._run(name, more, reference.recorded) for name, more in flags.items()]
        results += [Result(name, [], skipped=reason) for name, reason in skipped.items()]
        results.append(self._resume(reference.recorded, {}))
        faults: dict[str, Result] = {}
        for result in results:
            if not self.settings.bits:
                self._repeat_in_float64(result, flags.get(result.name), {})
            if result.differences and faults.setdefault(result.fault, result) is result:
                self._look_behind(result, flags.get(result.name), reference.recorded)
        return Verdict(reference.recorded, results, self.settings.bits)

    def variant(self, name: str, flags: Mapping[str, Any]) -> Variant:
        """Create a `Variant`. Its flags override those of the command line.

        Raises:
            UserError: When `fit` rejects the flags.
        """
        variant = Variant.of_flags(name, {**self.device, **self.typed, **flags}, self.configs)
        if variant.settings.trainer.accelerator == "cpu":
            variant.lacking = None  # replicas that share cores are slow, but train the same
        return variant

    def _run(
        self,
        name: str,
        flags: Mapping[str, Any],
        reference: Recorded | None = None,
        earlier: Recorded | None = None,
        steps: int | None = None,
        series: str = "",
    ) -> Result:
        """Run a variant, and compare its recording with the reference.

        Args:
            name: Name of the variant.
            flags: The variant's flags of `fit`.
            reference: Recording to compare with, or None.
            earlier: Recording of the run that this run resumes, or None.
            steps: Number of optimizer steps; by default the settings'.
            series: Label of a series of runs with additional flags, such as
                `run.global_order=true`. It is printed after the variant's name, and names the
                folder of the series.
        """
        variant = self.variant(name, flags)
        result = Result(name, variant.arguments, skipped=variant.lacking)
        if variant.lacking:
            return result
        self.say(name + (f", {series}" if series else ""))
        recording = {
            "trainer.callbacks+": "app.lab.verify.recording.Recording",
            "trainer.callbacks.steps": steps or self.settings.steps,
            "trainer.callbacks.epoch_steps": self.epoch_steps,
            "trainer.callbacks.bits": str(self.settings.bits).lower(),
            "run.wandb": "false",
            "run.warmup_epochs": 0,
            "run.on_nonfinite": "warn",
        }
        folder = self.folder / "runs" / series / variant.slug
        arguments = [
            *variant.arguments[1:],
            *(f"--{flag}={value}" for flag, value in recording.items()),
        ]
        record = run_fit(arguments, self.settings.time_limit, folder, variant.nodes())
        if record.status != "completed":
            result.failed = record.error
            if record.time_limit is not None:
                result.failed = f"not finished after {record.time_limit:g} s: see --time_limit"
            return result
        result.recorded = Recorded(Path(str(record.run_dir)), earlier)
        if reference is not None:
            tolerance = 0.0 if self.settings.bits else TOLERANCE
            result.differences = differences(reference, result.recorded, tolerance)
            result.causes = causes(
                Case(reference, result.recorded, result.differences, variant.replicas)
            )
            if self.settings.bits and result.differences:
                result.first_operation = first_operation(reference, result.recorded)
                if not result.causes and variant.settings.run.virtual_devices is None:
                    result.causes = [ROUNDING]
        return result

    def _resume(self, reference: Recorded, more: Mapping[str, Any], series: str = "") -> Result:
        """Run a training that stops in the middle of the first epoch, and resume it from the checkpoint."""
        flags = {**ALONE, **more}
        middle = max(len(reference.epoch(0)) // 2, 1)
        stopped = self._run(STOPPED, flags, steps=middle, series=series)
        if stopped.recorded is None:
            return Result(RESUMED, stopped.command, failed=stopped.failed)
        checkpoint = {"ckpt_path": str(stopped.recorded.run_dir / "checkpoints" / "last.ckpt")}
        return self._run(RESUMED, flags | checkpoint, reference, stopped.recorded, series=series)

    def _again(
        self, name: str, flags: Mapping[str, Any] | None, more: Mapping[str, Any]
    ) -> tuple[Recorded | None, Result]:
        """Run the reference, on one device, and a variant, both with additional flags.

        Args:
            name: Name of the variant.
            flags: Flags of the variant; None for the variant that is stopped and resumed.
            more: Additional flags.

        Returns:
            The reference's recording and the variant's result. If the reference fails, None and the
            reference's result.
        """
        series = " ".join(f"{flag}={value}" for flag, value in more.items())
        if series not in self.references:
            self.references[series] = self._run(REFERENCE, {**ALONE, **more}, series=series)
        reference = self.references[series].recorded
        if reference is None:
            return None, self.references[series]
        if flags is None:
            return reference, self._resume(reference, more, series)
        return reference, self._run(name, {**flags, **more}, reference, series=series)

    def _look_behind(
        self, result: Result, flags: Mapping[str, Any] | None, reference: Recorded
    ) -> None:
        """Repeat a variant with flags that remove the known causes of its difference, to find hidden causes.

        Add the hidden causes to the result, and set each cause's effect on the loss.

        Args:
            result: Result of a variant that differs.
            flags: Flags of the variant; None for the variant that was stopped and resumed.
            reference: Recording on one device.
        """
        before = result
        more = dict[str, Any]()
        left = result.causes
        if "data.batch_size" in (flags or ()) and "trainer.accumulate_grad_batches" not in (
            flags or ()
        ):
            # the variant sets a rank's batch size, but the global order would divide it among the
            # ranks again
            return
        for name, value in (ORDER, SHARDS):
            deals = name == ORDER[0] and "samples" in result.differences
            if not deals and not any(name in cause.remedy for cause in left):
                continue
            try:
                self.variant(result.name, {**(flags or ALONE), **more, name: value})
            except UserError:  # `fit` does not allow the flag in this variant
                continue
            more[name] = value
            same, after = self._again(result.name, flags, more)
            self._repeat_in_float64(after, flags, more)
            result.remedied = _outcome(more, after)
            if same is None or after.recorded is None:
                return
            assert before.recorded is not None
            change = effect(after.recorded, same)
            removed = effect(before.recorded, after.recorded)
            if name != ORDER[0]:
                removed = max(effect(before.recorded, reference) - change, 0.0)
            remaining = {_without_figures(cause) for cause in after.causes}
            known = {_without_figures(cause) for cause in (*result.causes, *result.behind)}
            result.behind += [
                cause for cause in after.causes if _without_figures(cause) not in known
            ]
            for causes_so_far in (result.causes, result.behind):
                causes_so_far[:] = [
                    _with_effect(cause, remaining, removed, change) for cause in causes_so_far
                ]
            before = after
            reference = same
            left = after.causes

    def _repeat_in_float64(
        self, result: Result, flags: Mapping[str, Any] | None, more: Mapping[str, Any]
    ) -> None:
        """Repeat a variant in float64, where rounding nearly vanishes, to separate rounding from other differences.

        Do nothing if rounding cannot be the cause. This is so if the numbers are equal or far
        apart, if samples or learning rates differ, or if the variant ran in float64 already.

        Args:
            result: Result of a variant. This method updates it.
            flags: Flags of the variant; None for the variant that was stopped and resumed.
            more: Additional flags of the result's run.
        """
        numbers = [result.differences[name] for name in NUMBERS if name in result.differences]
        exact = str(self.config.trainer.precision).startswith("64")
        other = {"samples", "learning rate"} & result.differences.keys()
        if exact or other or not numbers or numbers[0].size > MAY_BE_ROUNDING:
            return
        reference, repeated = self._again(
            result.name, flags, {**more, "trainer.precision": "64-true"}
        )
        if reference is None or repeated.recorded is None:
            return
        result.in_float64 = largest(reference, repeated.recorded)
        if result.in_float64 > EXACT:
            replicas = self.variant(result.name, flags or ALONE).replicas
            exactly = differences(reference, repeated.recorded, EXACT)
            result.causes = result.causes or causes(
                Case(reference, repeated.recorded, exactly, replicas)
            )
            return
        kept = repeated.differences.keys() - set(NUMBERS)
        result.rounding = {
            name: place for name, place in result.differences.items() if name not in kept
        }
        result.differences = {
            name: place for name, place in result.differences.items() if name in kept
        }
        result.causes = result.causes if kept else []


def _outcome(flags: Mapping[str, Any], result: Result) -> str:
    """Describe how a variant ran with additional flags, such as `--run.global_order true: the same training`."""
    text = (
        f"still different {', '.join(result.differences)}"
        if result.differences
        else "the same training"
    )
    text = f"does not run: {result.failed}" if result.failed else text
    return f"{' '.join(f'--{name} {value}' for name, value in flags.items())}: {text}"


def _without_figures(cause: Cause) -> str:
    return re.sub(r"\d", "", cause.text)


def _with_effect(cause: Cause, remaining: set[str], removed: float, change: float) -> Cause:
    """Set a cause's effect on the loss in a copy of it, after the variant was repeated with flags that remove causes.

    Args:
        cause: The cause.
        remaining: Texts, without digits, of the causes that are still there in the repetition.
        removed: Effect of the causes that are gone in the repetition.
        change: Effect of the causes that are still there.
    """
    if not cause.changes_loss:
        return cause
    if _without_figures(cause) in remaining:
        return replace(cause, effect=change)
    return cause if cause.effect is not None else replace(cause, effect=removed)
