"""Training run as a function: `run_fit(flags, limit) -> Record`."""

from app.runs.starter import CommandLine, run_fit

__all__ = ["CommandLine", "run_fit"]
