"""Runs one training in several ways, and finds whether they are the same."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from app.compare.experiment import OWN, Experiment, Variant, expand
from app.compare.runner import Outcome, Runner
from app.errors import UserError
from app.verify.causes import Case, Cause, causes, unused
from app.verify.differences import EXACT, Parting, Recorded, differences, largest

REFERENCE, STOPPED, RESUMED = "one device", "stopped", "stop and resume"
ALONE = {"trainer.strategy": "auto", "trainer.devices": 1, "trainer.num_nodes": 1}
MAY_BE_ROUNDING = 1e-2  # a first difference that is larger than this is none, in 16 bits either
UNUSED = re.compile("find_unused_parameters|finished reduction")


@dataclass
class Settings:
    """What `verify` does beside what `fit` is told.

    Args:
        steps: Optimizer steps of each run.
        ways: Further ways of running: names, with their flags of `fit`.
        quick: Only one device, two processes, and stop and resume.
        time_limit: Seconds after which a run is ended and counts as failed.
    """

    steps: int = 30
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)
    quick: bool = False
    time_limit: float = 600.0


@dataclass
class Way:
    """A way of running, beside the reference.

    Attributes:
        name: Its name.
        command: What a person would type for it.
        recorded: What its run has recorded; None where it has failed or was left out.
        found: Where it parts from the reference, by column.
        causes: Why, as far as that can be told.
        rounding: What parts by rounding alone, by column.
        in_float64: The largest difference of the numbers of a step in float64, where that was tried.
        failed: Why it has not run to the end.
        left_out: Why it was not tried.
    """

    name: str
    command: list[str]
    recorded: Recorded | None = None
    found: dict[str, Parting] = field(default_factory=dict)
    causes: list[Cause] = field(default_factory=list)
    rounding: dict[str, Parting] = field(default_factory=dict)
    in_float64: float | None = None
    failed: str | None = None
    left_out: str | None = None

    @property
    def same(self) -> bool:
        """Whether it is the same training, or was not tried."""
        return self.failed is None and not self.found


@dataclass(repr=False)
class Verdict:
    """What was found; true where every way is the same training.

    Attributes:
        reference: What the run on one device has recorded.
        ways: The others.
    """

    reference: Recorded
    ways: list[Way]

    def __bool__(self) -> bool:
        return all(way.same for way in self.ways)

    def __repr__(self) -> str:
        """The table and the causes, as pytest shows them."""
        from app.verify.report import show

        console = Console(width=110, file=io.StringIO(), record=True)
        show(self, console)
        return f"\n{console.export_text()}"


class Prover:
    """Runs the ways, and compares what they record.

    Args:
        settings: What to run.
        configs: Config files of `fit`.
        typed: Flags of `fit`, without dashes.
        folder: Where the runs are kept.
        say: Told what is going on, line by line.

    Raises:
        UserError: When a flag cannot be read, or this application sets it.
    """

    def __init__(
        self,
        settings: Settings,
        configs: Sequence[str],
        typed: Mapping[str, Any],
        folder: Path,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if settings.steps < 4:
            raise UserError(f"--steps {settings.steps}: give 4 or more")
        for flag in typed:
            if flag in OWN:
                raise UserError(f"--{flag} is set by verify itself: leave it out")
            if flag in ("trainer.devices", "trainer.strategy", "trainer.num_nodes"):
                raise UserError(
                    f"--{flag} is what the ways differ in: leave it out, or name a way of your own in --ways"
                )
        for name, each in settings.ways.items():
            if re.match("fsdp|deepspeed|modelparallel|xla", str(each.get("trainer.strategy"))):
                raise UserError(
                    f"--ways: {name}: {each['trainer.strategy']} keeps a part of the weights on each rank: leave it out"
                )
        self.settings, self.configs, self.typed, self.folder, self.say = settings, list(configs), typed, folder, say
        self.epoch_steps = math.ceil(settings.steps / 2)
        self.device: dict[str, Any] = {}
        self.config = self.expand({REFERENCE: ALONE})[1][0].settings
        if self.config.trainer.accelerator == "auto":
            self.device = {"trainer.accelerator": "gpu" if torch.cuda.device_count() > 1 else "cpu"}

    def ways(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Names and flags of the ways beside the reference; and why some are left out."""
        ddp = {**ALONE, "trainer.strategy": "ddp", "trainer.devices": 2}
        left_out: dict[str, str] = {}
        if self.settings.quick:
            return {"ddp × 2": ddp, **self.settings.ways}, left_out
        ways: dict[str, dict[str, Any]] = {
            "dp × 2": {**ddp, "trainer.strategy": "dp"},
            "ddp × 2": ddp,
            "ddp × 4": {**ddp, "trainer.devices": 4},
            "ddp_spawn × 2": {**ddp, "trainer.strategy": "ddp_spawn"},
            "ddp, 2 nodes": {**ddp, "trainer.devices": 1, "trainer.num_nodes": 2},
        }
        accumulated = "accumulation × 2"
        size = self.config.data.get("init_args.batch_size")
        if self.config.trainer.accumulate_grad_batches != 1:
            left_out[accumulated] = "--trainer.accumulate_grad_batches is given"
        elif not isinstance(size, int) or size % 2:
            left_out[accumulated] = f"there is no --data.batch_size that can be halved: it is {size}"
        else:
            ways[accumulated] = {**ALONE, "trainer.accumulate_grad_batches": 2, "data.batch_size": size // 2}
        return ways | self.settings.ways, left_out

    def run(self) -> Verdict:
        """Run everything.

        Raises:
            UserError: When the reference cannot be run.
        """
        flags, left_out = self.ways()
        self.expand(dict.fromkeys((REFERENCE, STOPPED, RESUMED), ALONE) | flags)  # before anything is run
        (reference,) = self._run({REFERENCE: ALONE})
        if not reference.records:
            raise UserError(f"the run on one device cannot be made: {reference.reason}")
        recorded = Recorded(self._run_dir(reference))
        outcomes = self._run(flags)
        ways = [self._way(outcome, recorded) for outcome in outcomes]
        ways += [Way(name, [], left_out=reason) for name, reason in left_out.items()]
        ways.append(self._resume(recorded))
        replicas = {outcome.variant.name: outcome.variant.replicas for outcome in outcomes}
        for way in ways:
            if way.found:
                self._prove(way, flags.get(way.name), replicas.get(way.name, 1))
        return Verdict(recorded, ways)

    def expand(self, flags: Mapping[str, Mapping[str, Any]]) -> tuple[Experiment, list[Variant]]:
        """Check the flags of some ways.

        Raises:
            UserError: When one of them cannot be read by `fit`.
        """
        experiment = Experiment(
            name="verify",
            configs=self.configs,
            flags={**self.device, **self.typed},
            variants={name: dict(each) for name, each in flags.items()},
            repeats=1,
            warmup_epochs=0,
            time_limit=self.settings.time_limit,
        )
        variants = expand(experiment)
        for variant in variants:
            if variant.settings.trainer.accelerator == "cpu":
                variant.lacking = None  # threads and processes share cores: slow, but the same
        return experiment, variants

    def _run(self, flags: Mapping[str, Mapping[str, Any]], steps: int | None = None, more: str = "") -> list[Outcome]:
        recording = "app.verify.recording.Recording"
        own = {
            "trainer.callbacks+": recording,
            "trainer.callbacks.steps": steps or self.settings.steps,
            "trainer.callbacks.epoch_steps": self.epoch_steps,
            "run.wandb": "false",
        }
        experiment, variants = self.expand(flags)
        arguments = [f"--{key}={value}" for key, value in own.items()]
        runner = Runner(experiment, variants, self.folder / more, arguments)
        told: set[str] = set()

        def show(now: Runner) -> None:
            if now.running is not None and (name := now.running[0].variant.name) not in told:
                told.add(name)
                self.say(name + (f", {more}" if more else ""))

        runner.show = show
        runner.run()
        for outcome in runner.outcomes:
            if outcome.status == "slow":  # a part of its steps proves nothing
                outcome.records.clear()
        return runner.outcomes

    def _run_dir(self, outcome: Outcome) -> Path:
        return Path(outcome.records[1]["run_dir"])

    def _way(self, outcome: Outcome, reference: Recorded, earlier: Recorded | None = None) -> Way:
        variant: Variant = outcome.variant
        way = Way(variant.name, variant.arguments)
        if outcome.status == "skipped":
            way.left_out = outcome.reason
        elif not outcome.records:
            way.failed = outcome.reason
            if UNUSED.search(" ".join([outcome.reason or "", *outcome.tail])):
                way.causes = [unused(reference)]
        else:
            try:
                way.recorded = Recorded(self._run_dir(outcome), earlier)
            except UserError as error:
                way.failed = str(error)
                return way
            way.found = differences(reference, way.recorded)
            way.causes = causes(Case(reference, way.recorded, way.found, variant.replicas))
        return way

    def _resume(self, reference: Recorded, precision: Mapping[str, Any] | None = None, more: str = "") -> Way:
        """Stop in the middle of the first epoch, and go on from the checkpoint."""
        flags, middle = {**ALONE, **(precision or {})}, max(len(reference.epoch(0)) // 2, 1)
        (stopped,) = self._run({STOPPED: flags}, middle, more)
        if not stopped.records:
            return Way(RESUMED, stopped.variant.arguments, failed=stopped.reason)
        earlier = Recorded(self._run_dir(stopped))
        checkpoint = self._run_dir(stopped) / "checkpoints" / "last.ckpt"
        (resumed,) = self._run({RESUMED: {**flags, "ckpt_path": str(checkpoint)}}, more=more)
        return self._way(resumed, reference, earlier)

    def _prove(self, way: Way, flags: Mapping[str, Any] | None, replicas: int) -> None:
        """Tell rounding from other differences: in float64 it all but vanishes.

        Args:
            way: One that parts from the reference.
            flags: Its flags; None for the one that was stopped and resumed.
            replicas: Devices that share a batch.
        """
        numbers = [way.found[name] for name in ("loss", "gradients", "weights") if name in way.found]
        exact = str(self.config.trainer.precision).startswith("64")
        if exact or {"samples", "learning rate"} & way.found.keys() or not numbers or numbers[0].size > MAY_BE_ROUNDING:
            return
        double, more = {"trainer.precision": "64-true"}, "in float64"
        (alone,) = self._run({REFERENCE: {**ALONE, **double}}, more=more)
        if not alone.records:
            return
        reference = Recorded(self._run_dir(alone))
        if flags is None:
            here = self._resume(reference, double, more).recorded
        else:
            (outcome,) = self._run({way.name: {**flags, **double}}, more=more)
            here = Recorded(self._run_dir(outcome)) if outcome.records else None
        if here is None:
            return
        way.in_float64 = largest(reference, here)
        if way.in_float64 > EXACT:
            way.causes = way.causes or causes(Case(reference, here, differences(reference, here, EXACT), replicas))
            return
        others = differences(reference, here).keys() - {"loss", "gradients", "weights"}
        way.rounding = {name: place for name, place in way.found.items() if name not in others}
        way.found = {name: place for name, place in way.found.items() if name in others}
        way.causes = [cause for cause in way.causes if others & set(cause.columns)]
