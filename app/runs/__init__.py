"""One training run as a function: `run_fit(flags, limit) -> Record`."""

from app.runs.run_fit import CommandLine, fit_commands, run_fit

__all__ = ["CommandLine", "fit_commands", "run_fit"]
