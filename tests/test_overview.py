"""`runs`: the table of all runs, their curves, and the settings in which two differ."""

from pathlib import Path

import pytest
from harness import App, error_of, output_of, tiny

from app.record import DataSet, Epoch, Metrics, Model, Record, Throughput
from app.record.words import interval


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records of three runs."""
    run = Record(run_dir="a", data=DataSet("Photos", 4, {"val": 23, "test": 200}), train_s=90.0)
    run.epochs = [Epoch(0, val_acc=8 / 23, val_loss=3.0), Epoch(1, whole=False)]
    run.save(tmp_path / "compare" / "x" / "version_0" / "run.json")
    run.model = Model("ImageClassifier, ResNet", 9)
    run.lr = 0.01
    run.test = Metrics(0.5, 0.83)
    run.throughput = Throughput(1234.0)
    run.train_s = 30.0
    run.save(tmp_path / "photos" / "version_0" / "run.json")
    run.save(tmp_path / "photos" / "version_0" / "test_1" / "run.json")
    Record(run_dir="c", status="failed").save(tmp_path / "photos" / "version_1" / "run.json")
    return tmp_path


BETTER = "photos/version_0 Photos ResNet 0.01 1 83.0 % (77 to 88) test 1,234 0.50 running"
WORSE = "compare/x/version_0 Photos — — 1 34.8 % (19 to 55) val — 1.50 running"
FAILED = "photos/version_1 — — — 0 — — — failed"


@pytest.mark.parametrize(
    ("sorting", "rows"),
    [
        ([], [BETTER, WORSE, FAILED]),
        (["--sort", "minutes"], [WORSE, BETTER, FAILED]),
        (["--sort", "name"], [WORSE, BETTER, FAILED]),
        (["--sort", "status"], [FAILED, WORSE, BETTER]),
    ],
)
def test_runs_are_listed_by_a_column(
    sorting: list[str], rows: list[str], drawn: None, app: App, folder: Path
) -> None:
    """`test_1` is no row. 8 of 23 are 34.8 %, and by Wilson's formula 19 to 55 %."""
    out = output_of(*app("runs", folder, *sorting))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert [line for line in lines if "/version_" in line] == rows
    assert lines[-1] == f"curves {folder}/runs.html"
    html = (folder / "runs.html").read_text()
    assert html.count("<svg") == 2
    assert html.count("photos/version_0") == 3, "two legends and the table"


def test_interval_of_an_accuracy() -> None:
    """(p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), with z = 1.96."""
    assert interval(8 / 23, 23) == pytest.approx((0.188, 0.551), abs=5e-4)
    assert interval(1.0, 10) == pytest.approx((1 / 1.384, 1.0), abs=5e-4)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("run.json", '{"epochs": 3}', "run.json cannot be read (epochs: Input should be a valid"),
        ("run.json", "{", "run.json cannot be read ("),
        ("run.json", '{"loss": 3}', "odd/run.json is not the record of a run"),
    ],
)
def test_other_folders_are_named(
    name: str, text: str, problem: str, app: App, folder: Path
) -> None:
    (folder / "odd").mkdir()
    (folder / "odd" / name).write_text(text)
    out = output_of(*app("runs", folder))
    assert problem in out.splitlines()[0]
    assert "photos/version_0" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "runs nowhere: there is no run below this folder"),
        ([".", "--sort", "nme"], "--sort: invalid choice: 'nme' (choose from 'name', 'data',"),
        (["--diff", "a", "b"], "--diff a/config.yaml: there is no such file"),
    ],
)
def test_mistakes(words: list[str], message: str, app: App) -> None:
    assert message in error_of(*app("runs", *words))


def test_settings_in_which_two_runs_differ(app: App, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    for rate in (0.1, 0.2):
        words = tiny(max_steps=1, name="a")
        output_of(*app("fit", *words, f"--model.optimizer.lr={rate}"))
    out = output_of(*app("runs", "--diff", folder / "version_0", folder / "version_1"))
    rows = [line.split() for line in out.splitlines() if "--" in line]
    assert rows == [["--model.optimizer.lr", "0.1", "0.2"]]
    assert "Synthetic  LeNet      0.2 " in output_of(*app("runs", folder))
