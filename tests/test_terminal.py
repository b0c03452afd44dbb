"""What a run says: its header, a line for each epoch, the progress bar, and what to try next."""

import io
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import QUIET, App
from rich.console import Console

from app.monitor.progress_bar import ProgressBar

SMALL = ["--data", "Synthetic", "--data.size", "200", "--data.batch_size", "20", *QUIET]


def test_the_summary_shows_the_layers(app: App) -> None:
    flags = ["fit", *SMALL[:-2], "--run.test", "false", "--trainer.max_steps", "1"]
    assert "network" not in app(*flags, "--trainer.enable_model_summary", "false")[1]
    code, out = app(*flags)
    assert code == 0, out
    assert "network    LeNet, 62,006 parameters, 3 × 32 × 32 → 10 classes\n" in out
    assert "optimizer  SGD, lr 0.001, momentum 0.9\n" in out
    assert "features.0" not in out
    code, out = app(*flags, "--verbose")
    assert code == 0, out
    assert "features.0" in out


def test_a_line_for_each_epoch(app: App) -> None:
    """Also in a pipe, where the progress bar shows at its end."""
    code, out = app("fit", *SMALL[:4], "--trainer.max_epochs", "2", "--run.test", "false")
    assert code == 0, out
    said = [line for line in out.splitlines() if line.startswith("epoch ")]
    assert [line.split("  ")[0] for line in said] == ["epoch 1/2", "epoch 2/2"]
    for line in said:
        assert re.search(r"train \d\.\d{3}  val \d\.\d{3}  acc +\d+\.\d % [* ]  lr 0\.001  [\d,]+/s  \d\.\d GiB", line)
        assert len(line) < 100
    assert re.search(r"\d s left$", said[0])
    assert "left" not in said[1]


def test_the_bar_is_drawn_a_few_times_a_second(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps there are; its last state is the last step, and a bar of one's own is left alone."""
    from lightning.pytorch.callbacks import RichProgressBar

    ours, theirs = [], []
    monkeypatch.setattr(ProgressBar, "_show", lambda self, *args: ours.append(args))
    monkeypatch.setattr(RichProgressBar, "on_train_batch_end", lambda self, *args: theirs.append(args[-1]))
    monkeypatch.setattr("app.monitor.progress_bar.time", SimpleNamespace(perf_counter=lambda: 1.0))
    monkeypatch.setattr(
        "app.monitor.progress_bar.get_console", lambda: Console(file=io.StringIO(), force_terminal=True)
    )
    flags = ["fit", *SMALL[:-4], "--trainer.max_epochs", "2", "--run.test", "false"]
    code, out = app(*flags)
    assert code == 0, out
    assert [shown[0] for shown in ours] == [1, 9, 9], "one of the sanity check, and the last step of each epoch"
    assert re.fullmatch(r"([\d,]+/s  )?[\d.]+ s left", ours[1][1])
    ours.clear()
    code, out = app(*flags, "--trainer.callbacks", "RichProgressBar")
    assert code == 0, out
    assert theirs == [*range(9), *range(9)]
    assert not ours


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_the_bar_is_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=columns)
    monkeypatch.setattr("app.monitor.progress_bar.get_console", lambda: console)
    bar = ProgressBar()
    bar._begin("epoch 1/2", 100)
    bar._show(50, "  ".join(["train_loss 0.123"] * 20))
    progress = bar._progress
    assert progress is not None
    (line,) = console.render_lines(progress.get_renderable())
    assert sum(segment.cell_length for segment in line) <= columns
    bar._end()


@pytest.mark.parametrize("label", ["use it", "train longer"])
def test_a_printed_command_can_be_pasted(label: str, app: App, tmp_path: Path) -> None:
    root = ["--run.root", tmp_path / "my runs"]
    code, out = app("fit", *SMALL[:-2], "--trainer.max_epochs", "1", *root)
    assert code == 0, out
    typed = re.findall(rf"^{label} +python -m app (.+)$", out, flags=re.MULTILINE)
    code, out = app(*shlex.split(typed[0]), *root)
    assert code == 0, out


def test_a_busy_machine_is_said(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (1e4, 0.0, 0.0))
    code, out = app("fit", *SMALL, "--trainer.max_steps", "1", "--run.test", "false")
    assert code == 0, out
    assert "warning: other processes keep this machine busy: a load of 10000.0 on " in out
