"""Command `python -m app compare`: runs every variant of an experiment, and reports the fastest.

Each run is a `python -m app fit …`. Every setting of the experiment file is a flag, too. Flags of
fit, such as --data.root or --trainer.precision, are added to every variant.
"""

import json
import os
import re
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from app.command.arguments import load_yaml, read_yaml, shipped, tokenise
from app.command.configuration import by_name, split_flags
from app.command.parser import PlainParser
from app.errors import UserError, nearest
from app.lab.compare.experiment import Experiment, FitFlags, expand
from app.lab.compare.report import write_report
from app.lab.compare.runner import Outcome, Runner
from app.lab.runs import CommandLine
from app.lab.variant import Variant, inherited
from app.monitor.loggers import next_version, tracking_mode
from app.record.words import duration
from app.system.files import read_json, write_json
from app.system.machine import driver, hardware, usable_cores, versions
from app.system.terminal import make_console

DEFAULT = "configs/compare/this_machine.yaml"
SETTINGS = "configs/compare/settings.yaml"  # the default of --by accuracy
USAGE = "python -m app compare [--experiment FILE] [--SETTING VALUE ...] [--FLAG.OF.FIT VALUE ...]"


@dataclass
class Options:
    """Options of `compare` beside the experiment.

    Args:
        dry_run: Only print the commands and the estimated time.
        fresh: Start a new report; do not continue the last one.
        wandb: Track the runs in Weights & Biases, as one group.
        root: Reports go to ROOT/compare.
    """

    dry_run: bool = False
    fresh: bool = False
    wandb: bool = False
    root: str = "runs"


def run(arguments: list[str]) -> int:
    """Run the comparison, and write the report.

    Args:
        arguments: The arguments after `compare`.

    Returns:
        Exit code: 1 when a variant failed, else 0.

    Raises:
        UserError: For invalid settings, or when no variant can run here.
        KeyboardInterrupt: On Ctrl-C, after a report of the runs so far.
    """
    options, experiment, typed = _parse(arguments)
    variants = expand(experiment, typed)
    console = make_console(soft_wrap=True, markup=False, highlight=False)
    folder = Path(options.root, "compare", str(experiment.name))
    fingerprint = _fingerprint(experiment, variants, options.wandb)
    tracking = ["--run.wandb", "off"]
    try:
        folder /= _version(folder, fingerprint, options.fresh)
        group = f"{experiment.name}/{folder.name}"
        if options.wandb:
            tracking = ["--run.group", group]
        runner = Runner(experiment, variants, folder, tracking)
    except ValueError as error:
        raise UserError(f"{error}: give --fresh true to begin a new report") from error
    if options.dry_run:
        _announce(runner, console)
        return 0
    write_json(folder / "experiment.json", asdict(experiment) | fingerprint)
    head = {
        "command": str(CommandLine(["compare", *arguments])),
        "usable_cores": usable_cores(),
        "hardware": hardware(),
        "load": os.getloadavg()[0],
        "driver": driver(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    console.print(
        f"{experiment.name}: {len(variants)} variants, {experiment.repeats} runs of each, in turn"
    )
    done = sum(len(outcome.records) for outcome in runner.outcomes)
    if done:
        console.print(f"{done} runs are done already; --fresh starts over")
    try:
        _follow(runner, console)
    finally:
        short, following = write_report(experiment, runner.outcomes, head, folder)
        console.print(Markdown(short, code_theme="bw"), soft_wrap=False)
        if following:
            console.print(f"\n{following}")
        console.print(f"\nreport  {folder}/report.html, report.md, results.csv, results.json")
    if options.wandb and tracking_mode(None) != "off":
        console.print(
            f"tracked  group {group} of Weights & Biases; upload offline runs with  "
            f"find {shlex.quote(str(folder))} -name 'offline-run-*' -exec wandb sync {{}} +"
        )
    if not any(outcome.records for outcome in runner.outcomes):
        reasons = dict.fromkeys(str(outcome.reason) for outcome in runner.outcomes)
        raise UserError(f"nothing could be measured: {'; '.join(reasons)}")
    return int(any(outcome.status == "failed" for outcome in runner.outcomes))


def _parse(arguments: list[str]) -> tuple[Namespace, Experiment, FitFlags]:
    """Return the options of `compare`, the experiment, and the command line's flags for `fit`."""
    remaining, flags = split_flags(arguments, ["--experiment"])
    configs, typed = by_name(flags)
    grid = {}
    words = []
    for token in tokenise(remaining):
        flag_and_values = re.fullmatch(r"--grid=([\w.+]+)=(.*)", token.word)
        if flag_and_values:
            grid[flag_and_values[1]] = load_yaml(flag_and_values[2])
        else:
            words.append(token.word)
    if grid:
        words.append(f"--grid={json.dumps(grid)}")
    default = DEFAULT
    if "--by=accuracy" in words:
        default = SETTINGS
    file = shipped(typed.pop("experiment", default))
    parser = PlainParser(usage=USAGE, description=__doc__, print_config=None)
    parser.add_argument(
        "--experiment", action="config", help=f"the experiment file (default: {DEFAULT})"
    )
    parser.add_class_arguments(Options)
    settings = parser.add_class_arguments(Experiment)
    for key in read_yaml(file, "--experiment").keys() - settings:
        near = nearest(key, settings)
        raise UserError(f"--experiment {file}: {key}: there is no such setting{near}")
    options = parser.parse_args(["--experiment", file, *words])
    if options.quick:
        form = options.quick_form
        if not form:
            raise UserError(f"--experiment {file} has no quick_form: remove --quick")
        form["flags"] = options.flags | form.get("flags", {})
        small = yaml.safe_dump(form)
        options = parser.parse_args(["--experiment", file, "--experiment", small, *words])
    options = parser.instantiate_classes(options)
    experiment = Experiment(**{name: options[name] for name in settings})
    experiment.name = experiment.name or Path(file).stem
    experiment.configs += configs
    # if the command line replaces the model or data class, drop the experiment's flags for the old
    # class
    chosen = dict(typed)
    for config in configs:
        chosen |= read_yaml(config)
    for section in ("model", "data"):
        if section in chosen and chosen[section] != experiment.flags.get(section):
            for name in list(experiment.flags):
                if name.partition(".")[0] == section:
                    del experiment.flags[name]
    return options, experiment, typed


def _fingerprint(experiment: Experiment, variants: list[Variant], tracked: bool) -> dict[str, Any]:
    """Return settings, hardware and versions. If one differs, a new report begins."""
    return {
        "tracked": tracked,
        "by": experiment.by,
        "commands": {variant.name: variant.arguments for variant in variants},
        "environment": inherited(),
        "warmup_epochs": experiment.warmup_epochs,
        "hardware": hardware(),
        "versions": versions(),
    }


def _version(folder: Path, fingerprint: dict[str, Any], fresh: bool) -> str:
    """Return the name of the newest report's folder if its fingerprint matches; else a new name."""
    version = next_version(folder)
    number = int(version.removeprefix("version_"))
    newest = folder / f"version_{number - 1}"
    settings = newest / "experiment.json"
    if not fresh and settings.exists() and read_json(settings).items() >= fingerprint.items():
        return newest.name
    return version


def _announce(runner: Runner, console: Console) -> None:
    """Print the commands, and an upper bound of their time."""
    for outcome in runner.outcomes:
        state = outcome.note or f"{runner.experiment.repeats} runs"
        console.print(f"{outcome.variant.name}  ({state})", style="bold")
        if outcome.status != "measured":
            console.print(outcome.variant.commands() + "\n")
    left = len(list(runner.todo()))
    console.print(f"{left} runs to do: at most {duration(left * runner.experiment.time_limit)}")


def _follow(runner: Runner, console: Console) -> None:
    """Run the experiment. Print each finished run; on a terminal, also show the progress."""
    repeats = runner.experiment.repeats

    def report(outcome: Outcome) -> None:
        state = outcome.note or f"run {len(outcome.records)} of {repeats}"
        console.print(f"{outcome.variant.name}: {state}, {outcome.rate} samples/s")

    for outcome in runner.outcomes:
        if outcome.records or outcome.reason:
            report(outcome)
    total = len(list(runner.todo()))
    for repeat, outcome in track(runner.todo(), "", total, console=console, transient=True):
        runner.run(repeat, outcome)
        report(outcome)
