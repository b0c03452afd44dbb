"""Pytest hooks. Only processes that run tests load the plugin with the fixtures.

The plugin's imports take seconds.
"""

import pytest
from fork_server import start_server

from app.system.program import set_up

TALLIES: list[tuple[str, object]] = []


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config):
    """Start the fork server once. Load the fixtures, except in xdist's main process."""
    if not hasattr(config, "workerinput"):
        config.add_cleanup(start_server())
    if not config.pluginmanager.has_plugin("dsession"):
        set_up()
        config.pluginmanager.import_plugin("shared_fixtures")
        category = "lightning.pytorch.utilities.warnings.PossibleUserWarning"
        # not in pyproject.toml, because xdist's main process would then import Lightning, which
        # takes seconds
        config.addinivalue_line("filterwarnings", f"ignore::{category}")


def pytest_runtest_logreport(report: pytest.TestReport):
    """Collect the fault counts of passed tests from all of pytest's workers."""
    if report.when == "call" and report.passed:
        TALLIES.extend(report.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
    """Print the counts of survived faults, as a table for the README."""
    if TALLIES:
        terminalreporter.write_line("\n| fault | times, all held |\n|---|---:|")
        for fault, times in TALLIES:
            terminalreporter.write_line(f"| {fault} | {times:,} |")
