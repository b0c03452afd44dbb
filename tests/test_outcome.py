"""Exit code of a run that a signal ended, and closing lines."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from exact_code import Linear, Ordinary
from lightning import LightningModule

from app.command import outcome
from app.command.outcome import can, end_early, exit_code, stopped_by
from app.data import ImageData
from app.errors import ExitStatus
from app.launch.cluster_environment import OWN_AGENT, Launched
from app.launch.elastic import STOPPED
from app.launch.spawn import SpawnLauncher
from app.modules import CIFARCNN
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
    monkeypatch.setattr(outcome, "note", Mock())
    launcher = Launched(by, 2, 2, 4) if by else None
    assert exit_code(trainer, Record(), launcher) == code
    assert outcome.note.call_args_list == [call(STOPPED, "143")] * (code > 0)
    monkeypatch.setattr("app.command.outcome.cause", lambda trainer: "SIGUSR1")
    for requeued, expected in ((False, code), (True, 0)):
        monkeypatch.setattr(outcome, "requeue", Mock(return_value=requeued))
        assert exit_code(trainer, Record(), launcher) == expected
    monkeypatch.setattr("app.command.outcome.cause", lambda trainer: None)
    assert exit_code(trainer, Record(), launcher) == 0


@pytest.mark.parametrize("own", [None, "Ctrl-C"])
def test_signal_that_spawned_processes_got(own, monkeypatch):
    monkeypatch.setattr("app.command.outcome.cause", lambda trainer: own)
    trainer = Mock()
    trainer.strategy.launcher = Mock(spec=SpawnLauncher)
    record = Record(status="interrupted", error="by SIGHUP")
    assert stopped_by(trainer, record) == (own or "SIGHUP")
    assert stopped_by(trainer, Record(status="failed", error="why")) == own


def test_stages_that_can_run():
    ours = Mock(spec=ImageData, val_size=1, source=SimpleNamespace(splits={"train": 9}))
    stages = ("validate", "test", "predict")
    assert [can(stage, CIFARCNN(), ours) for stage in stages] == [True, False, False]
    ours.val_size = 0
    assert not can("validate", CIFARCNN(), ours)
    assert [can(stage, Linear(), Ordinary()) for stage in stages] == [True, False, True]
    assert not can("predict", LightningModule(), Ordinary())


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
    trackers = [Mock()]
    monkeypatch.setattr(outcome, "trackers", lambda loggers: trackers)
    monkeypatch.setattr(outcome, "can", lambda stage, model, data: stage != "test")
    arguments = (Mock(loggers=[]), Mock(record=record), True, Mock(), Mock())
    outcome.close(*arguments)
    assert outcome.write_report.called == bool(record.run_dir)
    assert trackers[0].finish.called
    assert capsys.readouterr().out.split() == ([stage] if stage else [])
    assert not outcome.end_undisturbed.called
    try:
        raise ValueError
    except ValueError:
        outcome.close(*arguments)
    assert outcome.end_undisturbed.called


def test_end_of_a_run_whose_ranks_died(tmp_path):
    Record().save(tmp_path / "run.json")
    end_early(str(tmp_path), ExitStatus(1, "failed", "rank 1 died"))
    assert Record.load(tmp_path / "run.json").error == "rank 1 died"
