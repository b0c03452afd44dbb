"""Exit code of a run that a signal ended."""

from types import SimpleNamespace

import pytest

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
    monkeypatch.setattr("app.command.outcome.cause", lambda trainer: None)
    assert exit_code(trainer, Record(), launcher) == 0
