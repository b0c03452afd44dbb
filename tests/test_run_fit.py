"""Damaged and incomplete records, and `run_fit`, which runs a training and returns its record."""

from pathlib import Path

import pytest

from app.lab import runs
from app.lab.runs import run_fit, typed
from app.record import Record

FLAGS = ["--data=Synthetic", "--data.images=200", "--data.batch_size=20", "--run.wandb=off"]


def test_missing_and_null_fields_get_defaults(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"status": "completed", "throughput": null, "of_a_later_version": 1}')
    record = Record.load(path)
    assert (record.throughput.median, record.epochs) == (None, [])
    record.save(path)
    assert Record.load(path) == record


def test_path_is_text_on_the_command_line():
    assert typed(Path("my runs")) == "my runs"
    assert typed([Path("x")]) == '["x"]'


@pytest.mark.slow
def test_run_fit_returns_the_record(tmp_path):
    record = run_fit([*FLAGS, "--trainer.max_steps=8"], 120, tmp_path / "x")
    assert (record.status, record.steps) == ("completed", 8)
    assert Record.load(tmp_path / "x/version_0/run.json") == record
    wrong = run_fit([*FLAGS, "--trainer.max_stepz=8"], 120)
    assert (wrong.status, wrong.setup_s) == ("failed", None)
    assert "did you mean --trainer.max_steps" in str(wrong.error)
    late = run_fit([*FLAGS, "--trainer.max_epochs=-1"], 8, tmp_path / "late")
    assert (late.status, late.time_limit) == ("interrupted", 8)


def test_run_that_completes_at_its_limit_is_completed(tmp_path, monkeypatch):
    """A run that completes while it is being stopped at its time limit counts as completed."""

    def complete(processes):
        stop(processes)
        Record(status="completed", run_dir=str(tmp_path)).save(tmp_path / "x/version_0/run.json")

    stop = runs._stop
    monkeypatch.setattr(runs, "_stop", complete)
    record = run_fit(FLAGS, 0.1, tmp_path / "x")
    assert (record.status, record.time_limit) == ("completed", None)
