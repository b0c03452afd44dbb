"""Exit code of a run that a signal ended, and closing lines."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from app.command import outcome
from app.command.outcome import exit_code
from app.launch.cluster_environment import OWN_AGENT, Launched
from app.record import Record

CODES = [  # launcher, local and global rank, and the exit code
    (None, 1, 1, 143),
    ("torchrun", 1, 3, 143),
    ("srun", 0, 0, 143),
    ("srun", 0, 2, 0),
    (OWN_AGENT, 0, 2, 143),
    (OWN_AGENT, 1, 3, 0),
]


@pytest.mark.parametrize(("by", "local_rank", "rank", "code"), CODES)
def test_code_after_sigterm(by, local_rank, rank, code, monkeypatch):
    """One rank of a node, or of a job, has a nonzero code."""
    monkeypatch.setattr("app.command.outcome.cause", lambda trainer: "SIGTERM")
    trainer = SimpleNamespace(
        local_rank=local_rank, is_global_zero=rank == 0, strategy=SimpleNamespace(launcher=None)
    )
    launcher = Launched(by, 2, 2, 4) if by else None
    assert exit_code(trainer, Record(), launcher) == code
    monkeypatch.setattr("app.command.outcome.cause", lambda trainer: "SIGUSR1")
    for requeued, expected in ((False, code), (True, 0)):
        monkeypatch.setattr(outcome, "requeue", Mock(return_value=requeued))
        assert exit_code(trainer, Record(), launcher) == expected
    monkeypatch.setattr("app.command.outcome.cause", lambda trainer: None)
    assert exit_code(trainer, Record(), launcher) == 0


ENDS = [  # record, and the stage that the closing lines name
    (Record(run_dir="x", status="completed"), "validate"),
    (Record(run_dir="x", status="failed", train_s=3.0), "validate"),
    (Record(run_dir="x", status="completed", tested="best"), "predict"),
    (Record(run_dir="x", status="failed"), None),
    (Record(status="completed", train_s=3.0), None),
]


@pytest.mark.parametrize(("record", "stage"), ENDS)
def test_closing_lines(record, stage, monkeypatch, capsys):
    """The report is written with or without lines; only after an error, no signal disturbs it."""
    for name in ("end_undisturbed", "write_report"):
        monkeypatch.setattr(outcome, name, Mock())
    monkeypatch.setattr(outcome, "report", lambda *arguments: [arguments[-1]])
    monkeypatch.setattr(outcome, "can", lambda stage, model, data: stage != "test")
    arguments = (Mock(loggers=[]), Mock(record=record), True, Mock(), Mock())
    outcome.close(*arguments)
    assert outcome.write_report.called == bool(record.run_dir)
    assert capsys.readouterr().out.split() == ([stage] if stage else [])
    assert not outcome.end_undisturbed.called
    try:
        raise ValueError
    except ValueError:
        outcome.close(*arguments)
    assert outcome.end_undisturbed.called
