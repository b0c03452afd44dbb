"""Printed lines of a run: header, epochs, progress bar, and the next commands."""

import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from harness import ROOT, SLOW, on_cpu, record, tiny
from lightning.pytorch.callbacks import RichProgressBar

from app.monitor.progress_bar import ProgressBar

SMALL = tiny(200, 20)


def test_header_shows_layers_only_with_verbose(app, monkeypatch):
    """Layers appear only with --verbose; the warning about a busy machine always appears."""
    monkeypatch.setattr("psutil.getloadavg", lambda: (1e4, 0.0, 0.0))
    flags = ["fit", *SMALL[:-2], "--run.test=false", "--trainer.max_steps=1"]
    assert "network" not in app.run(*flags, "--trainer.enable_model_summary=false")[1]
    out = app(*flags)
    assert "network    LeNet, 62,006 parameters, 3 × 32 × 32 → 10 classes\n" in out
    assert (
        "classes    circle, square, triangle, star, cross, ring, stripes, checker, letter, wave\n"
        in out
    )
    assert "optimizer  SGD, lr 0.001, momentum 0.9\n" in out
    assert "warning: other processes keep this machine busy: a load of 10000.0 on " in out
    assert "features.0" not in out
    assert "features.0" in app(*flags, "--verbose")


def test_lines_of_epochs_and_next_commands(app, tmp_path):
    """A run prints a line for each epoch, also into a pipe, and then commands that work."""
    root = ["--run.root", tmp_path / "my runs"]
    out = app("fit", *SMALL[:-4], "--trainer.max_epochs=2", *root)
    for label in ("use it", "train longer"):
        (typed,) = re.findall(rf"^{label} +python -m app (.+)$", out, flags=re.MULTILINE)
        app(*shlex.split(typed), *root)
    lines = [line for line in out.splitlines() if line.startswith("epoch ")]
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    for line in lines:
        assert re.search(
            r"train \d\.\d{3}  val \d\.\d{3}  acc +\d+\.\d % [* ]  lr 0\.001  [\d,]+/s  \d\.\d GiB",
            line,
        )
        assert len(line) < 100
    assert re.search(r"\d m?s left$", lines[0])
    assert "left" not in lines[1]


def test_bar_updates_a_few_times_a_second(app, monkeypatch):
    """Our bar also updates after an epoch's last step. A user's own bar updates as usual."""
    noted = []
    metrics = []
    then = RichProgressBar.on_train_batch_end

    def note(self, trainer, module, outputs, batch, index):
        noted.append((type(self), index))
        metrics.append(self.get_metrics(trainer, module))
        then(self, trainer, module, outputs, batch, index)

    monkeypatch.setattr(RichProgressBar, "on_train_batch_end", note)
    monkeypatch.setattr("app.monitor.progress_bar.time", SimpleNamespace(perf_counter=lambda: 1.0))
    monkeypatch.setenv("FORCE_COLOR", "1")  # so that rich treats a pipe as a terminal
    monkeypatch.setattr("rich._console", None)  # a console for this test alone
    flags = ["fit", *SMALL[:-4], "--trainer.max_epochs=2", "--run.test=false"]
    out = app(*flags)
    assert noted == [(ProgressBar, index) for index in (0, 8, 8)], (
        "the first step, and the last of each epoch"
    )
    assert re.search(r"epoch 1/2.*9/9.*left:", out)
    assert re.fullmatch(r"[\d.]+ m?s", metrics[1]["left"])
    noted.clear()
    app(*flags, "--trainer.callbacks=RichProgressBar")
    assert noted == [(RichProgressBar, index) for index in (*range(9), *range(9))]


@pytest.mark.parametrize("output", [">/dev/full", "2>&-", "<&- >&- 2>&-", "| head -1"])
def test_output_that_cannot_be_written(output):
    command = f"set -o pipefail; {sys.executable} -m app --help {output}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


@SLOW
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize("output", [">/dev/full", "2>&1 | head -1"])
def test_training_goes_on_without_its_output(strategy, output, tmp_path):
    flags = [*SMALL, *on_cpu(strategy, max_epochs=2, root=tmp_path)]
    command = f"set -o pipefail; {sys.executable} -m app fit {shlex.join(map(str, flags))} {output}"
    subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=200, check=True)
    assert record(tmp_path)["status"] == "completed"
