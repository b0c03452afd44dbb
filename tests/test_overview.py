"""`runs`: the table of all runs, their curves, and the settings in which two differ."""

import pytest
from harness import refusals, tiny

from app.record import DataSet, Epoch, Model, Record, Throughput


@pytest.fixture
def folder(tmp_path):
    """Records of three runs, and of a test of the first."""
    first = Record(run_dir="a", data=DataSet("Photos", 4, {"val": 23}), train_s=30.0, lr=0.01)
    first.model = Model("ImageClassifier, ResNet", 9)
    first.epochs = [Epoch(0, val_acc=8 / 23, val_loss=3.0, val_samples=23), Epoch(1, val_acc=0.1)]
    first.throughput = Throughput(1234.0)
    first.save(tmp_path / "a/run.json")
    first.save(tmp_path / "a/test_1/run.json")
    Record(run_dir="b", train_s=90.0, epochs=[Epoch(0, False, val_acc=0.3)]).save(
        tmp_path / "b/run.json"
    )
    Record(run_dir="c", status="failed").save(tmp_path / "c/run.json")
    return tmp_path


ROWS = {
    "a": "a Photos ResNet 0.01 2 34.8 % (18.8 to 55.1) 1,234 0.50 running",
    "b": "b — — — 0 30.0 % — 1.50 running",
    "c": "c — — — 0 — — — failed",
}


@pytest.mark.parametrize(
    ("column", "order"),
    [("accuracy", "abc"), ("minutes", "bac"), ("name", "abc"), ("status", "cab")],
)
def test_runs_are_listed_by_a_column(column, order, drawn, app, folder):
    lines = app("runs", folder, "--sort", column).splitlines()
    assert [" ".join(line.split()) for line in lines[4:7]] == [ROWS[name] for name in order]
    assert lines[-1] == f"curves  {folder}/runs.html"
    assert (folder / "runs.html").read_text().count("<svg") == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"epochs": [{"epoch": "one"}]}', "run.json cannot be read (epochs.0.epoch: Input should"),
        ("{", "run.json cannot be read (Expecting property name"),
        ("null", "run.json cannot be read ("),
        ('{"loss": 3}', "run.json is not the record of a run"),
    ],
)
def test_other_records_are_named(text, problem, app, folder):
    (folder / "b/run.json").write_text(text)
    out = app("runs", folder)
    assert f"left out: {folder}/b/{problem}" in out.splitlines()[0]
    assert "ResNet" in out


MISTAKES = {
    "nowhere": "runs nowhere: there is no run below this folder",
    ". --sort nme": "--sort: invalid choice: 'nme' (choose from 'name', 'data',",
    "--diff a b": "--diff a/config.yaml: there is no such file",
}
test_mistakes = refusals(MISTAKES, command="runs")


def test_settings_in_which_two_runs_differ(app, fit):
    runs = [fit(*tiny(max_steps=1), f"--model.optimizer.lr={rate}") for rate in (0.1, 0.2)]
    out = app("runs", "--diff", *runs)
    assert [line.split() for line in out.splitlines()[4:-1]] == [
        ["--model.optimizer.lr", "0.1", "0.2"]
    ]
    assert "LeNet  0.2 " in app("runs", runs[0].parent)
