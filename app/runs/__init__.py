"""Training run as a function: `run_fit(flags, limit) -> Record`."""

from app.runs.starter import CommandLine, fit_commands, run_fit

__all__ = ["CommandLine", "fit_commands", "run_fit"]
