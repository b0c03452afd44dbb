"""Commands `fit`, `validate`, `test` and `predict`. From Python, `app.fit(…)` trains like the command `fit`.

    record = app.fit(model="resnet18", data="Synthetic", max_epochs=2, name="shapes")
    record = app.fit(**{"model.optimizer.lr": 0.1})

`help(app.fit.__call__)` explains the arguments.
"""

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from app.errors import UserError
from app.record import Record


class _Fit(ModuleType):
    """Package that can be called as a function: `app.fit(model="resnet50", data="Synthetic", devices=2)`."""

    def __call__(self, **flags: Any) -> Record:
        """Train in separate processes, as `python -m app fit` does, and return the run's record (`run.json`).

        The processes write their output to `output_node0.txt`, in the folder that contains the run's directory.

        Args:
            **flags: Flags of `fit` without their section, such as `max_epochs=2` for `--trainer.max_epochs 2`, or by
                their whole name, such as `**{"model.optimizer.lr": 0.1}`.

        Raises:
            UserError: When a flag is invalid or ambiguous, or when the run fails.
        """
        # imported in the function, because these modules import this package
        from app.fit.configuration import FIT_FLAGS, MADE, classes_of, find_class, parameters, read_arguments, resolve
        from app.fit.run_options import default_name
        from app.runs import run_fit

        values = {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in flags.items()}
        chosen = [f"--{flag}={values[flag]}" for flag in ("config", "model", "data") if flag in values]
        sections = {name: parameters(MADE[name]) for name in ("trainer", "run")}
        for name, path in classes_of(read_arguments(["fit", *chosen])).items():
            sections[name] = parameters(find_class(name, path))
        words = []
        for flag, value in values.items():
            is_whole = "." in flag or f"--{flag}" in (*FIT_FLAGS, "--ckpt_path")
            names = [flag] if is_whole else [f"{name}.{flag}" for name in sections if flag in sections[name]]
            if len(names) > 1:
                raise UserError(f"app.fit({flag}={value}): give **{{'{names[0]}': {value}}}, or {names[1]}")
            words.append(f"--{names[0] if names else f'model.{flag}'}={value}")
        config = resolve(["fit", *words])
        folder = Path(config.run.root, config.run.name or default_name(config))
        record = run_fit([f"--run.test={config.run.test}".lower(), *words], math.inf, folder)
        if record.status == "failed":
            raise UserError(f"{record.error} (see {folder / 'output_node0.txt'})")
        return record


sys.modules[__name__].__class__ = _Fit
