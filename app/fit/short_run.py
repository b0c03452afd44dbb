"""A few steps of a training on one device, in a process of its own, to measure them."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import UserError
from app.launch.process import run_app
from app.monitor.record_file import load_record

QUIET = {
    "trainer.devices": "1",
    "trainer.num_nodes": "1",
    "trainer.strategy": "auto",
    "trainer.max_epochs": "-1",
    "trainer.max_steps": "30",
    "trainer.limit_val_batches": "0",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.enable_checkpointing": "false",
    "trainer.fast_dev_run": "false",
    "trainer.barebones": "false",
    "run.test": "false",
    "run.wandb": "false",
    "run.name": "short",
}
LIMIT = 300  # seconds


def short_run(arguments: Sequence[str], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Make a run of 30 steps on one device, and return its record.

    Args:
        arguments: The arguments of `python -m app`, beginning with `fit`.
        changes: Other flags, without dashes, and their values.

    Raises:
        UserError: When it fails.
    """
    flags = QUIET | dict(changes or {})
    with tempfile.TemporaryDirectory() as folder:
        quiet = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
        try:
            done = run_app([*arguments, *quiet, "--run.root", folder], LIMIT)
        except subprocess.TimeoutExpired as error:
            steps = flags["trainer.max_steps"]
            raise UserError(f"{steps} steps on one device took more than {LIMIT} s: take a smaller model") from error
        said = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
        if done.returncode != 0:
            known = said and done.returncode > 0
            raise UserError(said[-1] if known else f"the run on one device ended with exit code {done.returncode}")
        return load_record(Path(folder, flags["run.name"], "version_0", "run.json"))
