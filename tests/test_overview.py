"""`runs`: the table of all runs, their curves, and the settings in which two differ."""

from pathlib import Path

import pytest
from harness import App, error_of, output_of, tiny

from app.record import DataSet, Epoch, Metrics, Model, Record, Throughput
from app.record.words import interval


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records of three runs."""
    images = {"val": 23, "test": 200}
    data = DataSet("Photos", 4, images)
    better = Record(
        run_dir="a",
        status="completed",
        data=data,
        model=Model("ImageClassifier, ResNet", 9),
        lr=0.01,
        epochs=[Epoch(0, val_acc=0.25, val_loss=2.0), Epoch(1, val_acc=0.5, val_loss=1.0)],
        max_epochs=2,
        test=Metrics(0.5, 0.83),
        throughput=Throughput(1234.0),
        train_s=90.0,
    )
    worse = Record(
        run_dir="b",
        status="interrupted",
        data=data,
        model=Model("Mine", 9),
        epochs=[Epoch(0, lr=0.2, val_acc=8 / 23, val_loss=3.0), Epoch(1, whole=False)],
        max_epochs=5,
        train_s=600.0,
    )
    better.save(tmp_path / "photos" / "version_0" / "run.json")
    better.save(tmp_path / "photos" / "version_0" / "test_1" / "run.json")
    worse.save(tmp_path / "compare" / "x" / "version_0" / "runs" / "version_0" / "run.json")
    Record(run_dir="c", status="failed").save(tmp_path / "photos" / "version_1" / "run.json")
    return tmp_path


BETTER = "photos/version_0 Photos ResNet 0.01 2 test 83.0 % (77 to 88) 1,234 1.50 completed"
WORSE = (
    "compare/x/version_0/runs/version_0 Photos Mine 0.2 1/5 val 34.8 % (19 to 55) — 10.00 "
    "interrupted"
)
FAILED = "photos/version_1 — — — 0 — — — failed"


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        (None, [BETTER, WORSE, FAILED]),
        ("minutes", [WORSE, BETTER, FAILED]),
        ("lr", [WORSE, BETTER, FAILED]),
        ("name", [WORSE, BETTER, FAILED]),
        ("status", [BETTER, FAILED, WORSE]),
    ],
)
def test_runs_are_listed_by_a_column(
    column: str | None, rows: list[str], app: App, folder: Path
) -> None:
    """Nested runs such as `test_1` are no rows. 8 of 23 are 34.8 %, and by Wilson 19 to 55 %."""
    sorting = []
    if column is not None:
        sorting = ["--sort", column]
    out = output_of(*app("runs", folder, *sorting))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert [line for line in lines if "/version_" in line] == rows
    assert lines[-1] == f"curves {folder}/runs.html"


def test_the_page_draws_each_validated_run(drawn: None, app: App, folder: Path) -> None:
    output_of(*app("runs", folder))
    html = (folder / "runs.html").read_text()
    assert "<h1>3 runs; the most accurate is photos/version_0: test 83.0 % (77 to 88)</h1>" in html
    assert html.count("<svg") == 2
    curves = html[html.index("<svg") : html.rindex("</svg>")]
    assert curves.count("photos/version_0") == 2
    assert "version_1" not in curves


def test_interval_of_an_accuracy() -> None:
    """With z = 1.96: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    assert interval(8 / 23, 23) == pytest.approx((0.188, 0.551), abs=5e-4)
    low, high = interval(1.0, 10)
    assert (low, high) == pytest.approx((1 / (1 + 0.38415), 1.0), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("run.json", '{"epochs": 3}', "run.json cannot be read (epochs: Input should be a valid"),
        ("run.json", "{", "run.json cannot be read ("),
        ("run.json", '{"loss": 3}', "odd is not a run of this program"),
        ("metrics.csv", "", "run.json cannot be read (No such file or directory)"),
    ],
)
def test_other_folders_are_named(
    name: str, text: str, problem: str, app: App, folder: Path
) -> None:
    (folder / "odd").mkdir()
    (folder / "odd" / name).write_text(text)
    out = output_of(*app("runs", folder))
    assert [problem in line for line in out.splitlines() if "left out" in line] == [True]
    assert "photos/version_0" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "runs nowhere: there is no such folder"),
        ([".", "--sort", "nme"], "--sort nme: expected one of name, data,"),
        (["."], "runs .: no run is below this folder"),
        (["--diff", "a", "b"], "--diff a/config.yaml: there is no such file"),
    ],
)
def test_mistakes(
    words: list[str], message: str, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_of(*app("runs", *words))


def test_settings_in_which_two_runs_differ(app: App, tmp_path: Path) -> None:
    for rate in ("0.1", "0.2"):
        rates = ["--model.optimizer", "SGD", "--model.optimizer.lr", rate]
        output_of(*app("fit", *tiny(max_steps=1), *rates, "--run.name", "a"))
    one, other = (tmp_path / "runs" / "a" / f"version_{version}" for version in (0, 1))
    out = output_of(*app("runs", "--diff", one, other))
    assert [line.split() for line in out.splitlines() if "--" in line] == [
        ["--model.optimizer.lr", "0.1", "0.2"]
    ]
    assert out.endswith("1 setting in which the runs differ\n")
    out = output_of(*app("runs", tmp_path, "--sort", "lr"))
    assert "runs/a/version_1  Synthetic  LeNet  0.2  " in " ".join(out.split(" "))
