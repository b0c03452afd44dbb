"""Functions that run `python -m app fit` in separate processes, and return the run's record.

`compare`, `verify`, `replay` and `doctor` run `fit` this way, because a new process has a
fresh accelerator, its own threads, and default settings.
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from app.command.arguments import Arguments
from app.command.configuration import FIT_FLAGS, classes_of, find_class, resolve
from app.command.flag_rules import MADE
from app.command.parser import parameters
from app.command.run_options import default_name
from app.errors import UserError, nearest
from app.launch.process import environment_of_a_run
from app.record import Record
from app.system.machine import busy_seconds, own_seconds

GRACE = 15.0  # seconds that a run has to stop cleanly, before it is killed
POLL = 0.5  # seconds between two checks of a run
QUIET = [
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--run.test=false",
]
SHORT = {  # names of flags in `fit`
    "epochs": "trainer.max_epochs",
    "lr": "model.optimizer.lr",
}
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class CommandLine(NamedTuple):
    """Command line of one process of a run.

    Attributes:
        arguments: Arguments of `python -m app`.
        environment: Variables that differ from this process's environment.
    """

    arguments: list[str]
    environment: Mapping[str, str] = {}

    def __str__(self) -> str:
        """Format the command for a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*words, "python -m app", shlex.join(self.arguments)])


def on_nodes(
    arguments: Sequence[str], nodes: Sequence[Mapping[str, str]], place: str
) -> list[CommandLine]:
    """Return the command lines, one for each node.

    Args:
        arguments: Arguments of `python -m app`.
        nodes: Environment variables of each node.
        place: Rendezvous of several nodes, as for `--cluster.init_method`.
    """
    if len(nodes) == 1:
        return [CommandLine([*arguments], nodes[0])]
    meeting = [*arguments, "--cluster.init_method", place, "--cluster.node_rank"]
    return [CommandLine([*meeting, str(rank)], variables) for rank, variables in enumerate(nodes)]


def run_fit(
    flags: Sequence[str],
    limit: float,
    folder: Path | None = None,
    nodes: Sequence[Mapping[str, str]] = ({},),
    show: bool = False,
) -> Record:
    """Run a training to its end or its time limit, and return its record.

    The output of node N is written to `folder/output_nodeN.txt`.

    Args:
        flags: Arguments of `fit`, such as `["--config", "a.yaml", "--trainer.max_steps", "30"]`.
        limit: Seconds after which the run is stopped.
        folder: Folder in which the run creates its directory, the next free `version_N`; temporary
            by default.
        nodes: Environment variables of each node; several nodes share this machine.
        show: Print the first node's lines, and test at the end, as the command does.

    Returns:
        The record. `status` is `completed`, `interrupted` for a run that stopped at the limit, or
        `failed` with the reason in `error`. `time_limit` is set if the limit ended the run.

    Raises:
        KeyboardInterrupt: On Ctrl-C, after stopping the run.
        SystemExit: On SIGTERM, after stopping the run.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run_fit(flags, limit, Path(temporary, "run"), nodes)
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [folder / f"output_node{node}.txt" for node in range(len(nodes))]
    if not show:
        flags = [*QUIET, *flags]
    arguments = ["fit", *flags, "--run.root", str(folder.parent), "--run.name", folder.name]
    commands = on_nodes(arguments, nodes, f"file://{(folder / 'rendezvous').resolve()}")
    started = time.time()
    began = time.monotonic()
    busy = busy_seconds() - own_seconds()
    with ExitStack() as stack:
        processes: list[Any] = []  # psutil's type hints declare no `Popen`
        stack.callback(_stop, processes)
        for command, output in zip(commands, outputs, strict=True):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "app", *command.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stack.enter_context(output.open("w")),
                    stderr=subprocess.STDOUT,
                    env=environment_of_a_run() | dict(command.environment),
                    start_new_session=True,  # so that only the parent receives Ctrl-C
                )
            )
        lines = stack.enter_context(outputs[0].open(errors="replace"))
        codes: list[int | None] = [None]
        # stop if a node fails, because the other nodes would wait for it
        while None in codes and not any(codes) and time.monotonic() < began + limit:
            psutil.wait_procs(processes, POLL)
            codes = [process.poll() for process in processes]
            if show:
                print(lines.read(), end="", flush=True)
    record = Record()
    for path in folder.glob("version_*/run.json"):
        if path.stat().st_mtime >= started:
            try:
                record = Record.load(path)
            except ValueError as error:
                record.error = str(error)
    record.wall_s = round(time.monotonic() - began, 3)
    others = busy_seconds() - own_seconds() - busy
    record.others_cores = round(max(others / record.wall_s, 0.0), 2)
    if None in codes and not any(codes) and record.status != "completed":
        record.time_limit = limit
        if record.setup_s is None or record.status != "interrupted":
            state = "no progress"
            if record.setup_s is None:
                state = "still setting up"
            record.status = "failed"
            record.error = f"{state} after {limit:g} s"
    elif record.status != "completed" or any(codes):
        record.status = "failed"
        record.error = _reason(record, codes, outputs)
    if record.run_dir is not None:
        record.save(Path(record.run_dir, "run.json"))
    return record


def last_lines(folder: Path) -> list[str]:
    """Return the last 12 output lines of each node of a failed run."""
    lines = []
    for output in sorted(folder.glob("output_node*.txt")):
        lines += [line[:300] for line in _lines(output)[-12:]]
    return lines


def _reason(record: Record, codes: Sequence[int | None], outputs: Sequence[Path]) -> str:
    """Return why a run failed, in one line; prefer a crashed node to a user error (exit code 2)."""
    failed = [node for node, code in enumerate(codes) if code] or [0]
    node = max(failed, key=lambda node: codes[node] != 2)
    lines = _lines(outputs[node])
    reason = record.error or "\n".join(lines[-1:]) or "no output"
    for line in lines:
        if "error: " in line:
            reason = line.partition("error: ")[2]
    if codes[node] == 2:
        return reason
    return f"exit code {codes[node]}: {reason}"


def _lines(output: Path) -> list[str]:
    text = COLOURS.sub("", output.read_text(errors="replace")).expandtabs()
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _stop(processes: Sequence[Any]) -> None:
    """Terminate a run's processes, and kill those that do not stop in time."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    psutil.wait_procs(processes, GRACE)
    for process in processes:
        # ranks die with their agent, because the kernel kills them
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fit(**flags: Any) -> Record:
    """Train in separate processes, as `python -m app fit` does, and return the run's record.

        record = app.fit(model="resnet18", data="Synthetic", max_epochs=2, name="shapes")

    It prints the command's lines. They are also in `output_node0.txt`, in the folder that contains
    the run's directory.

    Args:
        **flags: Flags of `fit` without their section, such as `max_epochs=2` for
            `--trainer.max_epochs 2`; by their whole name, such as `**{"model.optimizer.momentum":
            0.9}`; or by a name in `SHORT`.

    Raises:
        UserError: When a flag is unknown, invalid or ambiguous, or when the run fails.
    """
    values = {name: typed(value) for name, value in flags.items()}
    chosen = [f"--{name}={values[name]}" for name in ("config", "model", "data") if name in values]
    classes: dict[str, type | None] = {"trainer": MADE["trainer"], "run": MADE["run"]}
    for section, path in classes_of(Arguments(["fit", *chosen])).items():
        classes[section] = find_class(section, path)
    words = [f"--{_whole_name(name, classes)}={value}" for name, value in values.items()]
    config = resolve(["fit", *words])
    folder = Path(config.run.root, config.run.name or default_name(config))
    record = run_fit(words, math.inf, folder, show=True)
    if record.status == "failed":
        raise UserError(f"{record.error} (see {folder / 'output_node0.txt'})")
    return record


def typed(value: Any) -> str:
    """Format a value for a command line."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    return json.dumps(value, default=str)


def _whole_name(name: str, classes: Mapping[str, type | None]) -> str:
    """Return the whole name of a flag, such as `trainer.max_epochs` for `max_epochs`.

    Args:
        name: Name without its section, or the whole name.
        classes: Class whose parameters are the flags of each section.

    Raises:
        UserError: When no section has the flag, or several.
    """
    if "." in name or f"--{name}" in (*FIT_FLAGS, "--ckpt_path"):
        return name
    known = {section: parameters(cls) for section, cls in classes.items()}
    sections = [section for section in known if name in known[section]]
    if name == "root":  # of the data, if it has one, not of the runs
        sections = sections[-1:]
    if not sections and name not in SHORT:
        near = nearest(name, {*SHORT}.union(*known.values()))
        raise UserError(f"app.fit has no flag {name}{near or ': see python -m app fit --help_all'}")
    if not sections:
        return SHORT[name]
    if len(sections) > 1:
        whole = f"**{{'{sections[0]}.{name}': …}}"
        raise UserError(f"app.fit({name}=…): give {whole}, or {sections[1]}.{name}")
    return f"{sections[0]}.{name}"
