"""`compare`: from an experiment file to the report, by the real command."""

import json
import os
import re
import time
from html import escape
from pathlib import Path

import pandas as pd
import pytest
import yaml
from cluster.hosts import awaited
from harness import ROOT, SLOW, record_of, running, tiny
from jsonargparse import Namespace
from PIL import Image

from app.lab.compare.advice import Verdict
from app.lab.compare.figures import pictures
from app.lab.compare.results import COLUMNS
from app.lab.compare.runner import Outcome
from app.lab.variant import Variant
from app.record import PHASES, DataSet, Epoch, Record
from app.system.machine import own_seconds


def comparing(path, *words):
    root = path.parent / "runs"
    env = {"WANDB_MODE": "offline"}
    return running("compare", "--experiment", path, "--root", root, *words, env=env)


def compare(path, *words):
    with comparing(path, *words) as process:
        return process.end(400, code=0)


def folder_of(path):
    return path.parent / "runs/compare/tiny/version_0"


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


def by_name(path):
    return {row["variant"]: row for row in results_in(folder_of(path))["variants"]}


DDP = {"trainer.strategy": "ddp"}
DP = {"trainer.strategy": "dp", "trainer.devices": 2}
BF16 = {"trainer.precision": "bf16-mixed"}
LATE = "after 40 s: see --time_limit$"


@SLOW
def test_variants_that_cannot_run_fail_hang_or_are_slow(app, experiment):
    gpus = {"trainer.accelerator": "gpu", "trainer.devices": 4096}
    two = DDP | {"trainer.devices": 2}
    # status, pattern of the reason, and flags
    variants = {
        "one": ("measured", "", {}),
        "no GPU": ("skipped", "GPU", DDP | gpus),
        "too many": ("skipped", "needs 4096 CPU cores", DDP | {"trainer.devices": 4096}),
        "odd batch": ("failed", "shared equally by 2 ranks", two | {"data.batch_size": 25}),
        "fails": ("failed", "mat1 and mat2", {"model": "raising_code.Model"}),
        "hangs": ("failed", f"^no progress {LATE}", two | {"model": "stuck_code.HangingModel"}),
        "starts": ("failed", f"^still setting up {LATE}", {"model": "stuck_code.NeverReady"}),
        "slow": (
            "slow",
            r"^step \d after 40 s, warm-up included$",
            {"trainer.callbacks+": "stuck_code.TakesItsTime"},
        ),
        "a node fails": (
            "failed",
            "only here",
            DDP | {"model": "stuck_code.FailsWhileRankZeroIsStuck", "trainer.num_nodes": 2},
        ),
        "dp": ("measured", "", DP),
    }
    path = experiment(variants={name: case[2] for name, case in variants.items()}, repeats=2)
    app("compare", "--experiment", path, "--time_limit=40", code=1)
    rows = by_name(path)
    for name, (status, reason, _) in variants.items():
        assert rows[name]["status"] == status, name
        assert re.search(reason, rows[name]["reason"] or ""), name
    assert "mat1 and mat2" in "\n".join(rows["fails"]["tail"])
    slow = rows["slow"]
    assert slow["n"] == 1, "it is not tried again"
    assert 0 < slow["samples_per_s"] < 24 / 5
    assert slow["loss_last"] is None
    one = rows["one"]
    dp = rows["dp"]
    assert one["loss_last"] == pytest.approx(dp["loss_last"], abs=1e-5)
    runs = [one["runs"][0], dp["runs"][0], one["runs"][1], dp["runs"][1]]
    written = [Path(run, "metrics.csv").stat().st_mtime for run in runs]
    assert written == sorted(written), "repeats are in turn"
    windows = record_of(Path(one["runs"][0]))["throughput"]["n"]
    assert windows == 4, "of 2 epochs of 9 steps, the first is warm-up"


@SLOW
def test_a_users_loader_has_the_baselines_batch(app, experiment):
    """The loader's batch size counts per process: two processes would have another batch."""
    two = DDP | {"trainer.devices": 2}
    path = experiment(
        configs=[],
        flags={"model": "exact_code.Linear", "data": "exact_code.Ordinary"},
        warmup_epochs=0,
        variants={"two": two, "one": {}, "own batch": two | {"data.batch_size": 16}},
        baseline="one",
    )
    app("compare", "--experiment", path)
    batches = {name: row["global_batch"] for name, row in by_name(path).items()}
    assert batches == {"two": 8, "one": 8, "own batch": 32}


@pytest.fixture
def idle(monkeypatch):
    """Make the machine look idle to a comparison that runs in this process."""
    monkeypatch.setattr("app.lab.runs.busy_seconds", own_seconds)


@SLOW
@pytest.mark.usefixtures("idle", "drawn")
def test_report_files(app, experiment):
    path = experiment(
        description="<script>alert(1)</script> Which?",
        variants={"=one": {}, "<img src=x> | mixed": BF16},
        published="On a V100: 576.94 s",
    )
    out = app("compare", "--experiment", path)
    folder = folder_of(path)
    pictures = {"throughput.png", "loss_epoch.png", "step.png"}
    written = {"experiment.json", "results.csv", "results.json", "report.md", "report.html", "runs"}
    assert {file.name for file in folder.iterdir()} == written | pictures
    for name in pictures:
        with Image.open(folder / name) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 20, f"{name} is empty"
    table = pd.read_csv(folder / "results.csv")
    assert list(table.columns) == COLUMNS
    assert table["variant"][0] == "'=one", "no formula"
    may_lack = ("memory_others", "not_finite", "efficiency")
    assert table[[name for name in COLUMNS if not name.startswith(may_lack)]].notna().all().all()
    text = (folder / "report.md").read_text()
    head = results_in(folder)
    machine = (head["hardware"]["cpu"], head["versions"]["torch"])
    command = "OMP_NUM_THREADS=1 python -m app fit --data Synthetic"
    for detail in ("576.94", "a V100", command, f"    {head['command']}\n", *machine):
        assert detail in text
    html = (folder / "report.html").read_text()
    assert html.count("<svg") == html.count("aria-label=") == len(pictures)
    assert not re.findall("<script>|<img", html)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', html), "it needs no other file"
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids)), "an id is that of one thing"
    verdict = head["verdict"]
    assert escape(verdict["said"]) in html.partition("<h1>")[2].partition("</h1>")[0]
    assert "was the fastest, in a single run of each" in verdict["said"]
    assert html.index("<svg") < html.index("<table") < html.index("<details>")
    assert by_name(path)[verdict["taken"]]["command"] in out.splitlines()
    assert str(folder) in out
    for row in head["variants"]:
        whole = sum(row[f"{phase}_ms"] for phase in PHASES)
        # not exactly equal, because the figures are rounded
        assert whole == pytest.approx(1000 * row["global_batch"] / row["samples_per_s"], rel=1e-4)
    for damaged in ("runs/repeat_1/=one/version_0/run.json", "experiment.json"):
        (folder / damaged).write_text("{")
        message = app.error("compare", "--experiment", path)
        assert f"{folder / damaged} cannot be read (" in message
        assert message.endswith("give --fresh true to begin a new report")


@SLOW
@pytest.mark.usefixtures("drawn")
def test_settings_are_compared_by_their_accuracy(app, tmp_path):
    """The repeats of a variant have different seeds."""
    grid = ["--grid=model.optimizer.lr=[0.01,0.001]", "--grid=data.flip=[true]"]
    words = [*grid, "--repeats=2", *tiny(400, max_epochs=1, accelerator="cpu")]
    app("compare", "--by=accuracy", *words)
    folder = tmp_path / "runs/compare/settings/version_0"
    head = results_in(folder)
    for row in head["variants"]:
        records = [record_of(Path(run)) for run in row["runs"]]
        assert [record["seed"] for record in records] == [42, 43]
        best = [record["epochs"][0]["val_acc"] for record in records]
        assert row["best_acc"] == pytest.approx(sum(best) / 2)
    assert "accura" in head["verdict"]["said"]
    assert (folder / "accuracy.png").exists()


def test_no_verdict_on_a_busy_machine(app, experiment, monkeypatch):
    """If other programs take all cores, the report states the load, and how to measure again."""
    cores = os.cpu_count() or 1
    monkeypatch.setattr(
        "app.lab.runs.busy_seconds", lambda: own_seconds() + cores * time.monotonic()
    )
    path = experiment(variants={"one": {}, "dp": DP})
    out = app("compare", "--root", path.parent / "my runs", "--experiment", path)
    message = f"The machine was busy: other programs took up to {cores:.1f} of its {cores} cores"
    folder = path.parent / "my runs/compare/tiny/version_0"
    head = results_in(folder)
    assert head["verdict"] == {"said": message, "taken": None}
    again = f"{head['command']} --fresh"
    assert f"'{path.parent}/my runs'" in again
    assert again in out.splitlines(), "it can be pasted"
    html = (folder / "report.html").read_text()
    for text in (out, (folder / "report.md").read_text(), html):
        assert message in text
        assert "Measure again when it is quiet" in text
        for claim in ("the fastest", "Take", "limits", "recommended"):
            assert claim not in text, claim
    assert f'<span class="caption">{message}</span>' in html


@SLOW
def test_killed_comparison_continues(experiment):
    """A comparison continues, or begins anew; its tracker gets every run."""
    path = experiment(variants={"one": {}, "dp": DP})
    runs = folder_of(path) / "runs/repeat_1"
    with comparing(path) as process:
        awaited((runs / "dp/version_0/run.json").exists, 100)
        # the kernel then kills the running `fit`, because its parent is dead
        process.get("SIGKILL", "group").end()
    record = runs / "one/version_0/run.json"
    first = record.stat().st_mtime

    assert "1 runs are done already" in compare(path)
    assert record.stat().st_mtime == first
    assert {name: row["n"] for name, row in by_name(path).items()} == {"one": 1, "dp": 1}
    out = compare(path, "--fresh", "--wandb")
    folder = folder_of(path).with_name("version_1")
    assert f"find {folder} -name 'offline-run-*' -exec wandb sync {{}} +" in out
    assert len(list(folder.glob("runs/repeat_1/*/version_0/wandb/offline-run-*"))) == 2
    config = (folder / "runs/repeat_1/one/version_0/config.yaml").read_text()
    assert yaml.safe_load(config)["run"]["group"] == "tiny/version_1"


@SLOW
def test_ctrl_c_leaves_a_report(experiment):
    path = experiment(variants={"one": {}, "hangs": {"model": "stuck_code.HangingModel"}})
    with comparing(path) as process:
        assert process.process.stdout is not None
        for line in process.process.stdout:
            if line.startswith("one: run 1"):
                break
        out = process.get("SIGINT", "main").end(60, code=130)
    assert "Not complete: hangs" in out
    statuses = {name: row["status"] for name, row in by_name(path).items()}
    assert statuses == {"one": "measured", "hangs": "waiting"}


NONE = "Training loss against epochs"
UNLEARNT = "No variant has learnt yet: the loss curves say nothing"
EQUAL = [2.0, 1.0]
CURVES = [
    ([EQUAL, [2.0, 1.0 + 3e-7]], 0, "2 of 2 loss curves coincide (largest difference 3e-7)"),
    ([EQUAL, EQUAL], 0, "2 of 2 loss curves coincide (to the last digit)"),
    ([EQUAL, [2, 1.1], [2, 1.0001]], 0, "2 of 3 loss curves coincide (largest difference 1e-4)"),
    ([EQUAL, [2.0, 1.1], [2.0, 1.1]], 0, NONE),  # the baseline's is apart
    ([EQUAL], 0, NONE),
    ([[2.0, 1.99], [2.0, 1.99]], 0, UNLEARNT),
    # with 10 classes, guessing has a loss of ln 10 = 2.303
    ([[2.31, 2.3], [2.31, 2.3]], 10, UNLEARNT),
    ([[2.2], [2.2]], 10, "2 of 2 loss curves coincide (to the last digit)"),
]


@pytest.mark.parametrize(("curves", "classes", "title"), CURVES)
def test_title_counts_curves_that_coincide_with_the_baseline(curves, classes, title):
    """The first variant is the baseline."""
    outcomes = []
    for name, losses in enumerate(curves):
        epochs = [Epoch(epoch, train_loss=loss) for epoch, loss in enumerate(losses)]
        record = Record(epochs=epochs, data=DataSet("x", classes))
        outcomes.append(Outcome(Variant(str(name), ["fit"], Namespace()), [record]))
    table = pd.DataFrame(columns=COLUMNS)
    assert pictures(table, outcomes, "0", Verdict("", []))["loss_epoch"].title == title


def test_nothing_can_run(app, experiment):
    path = experiment(flags={"data": "CIFAR10", "data.root": "/nowhere"}, variants={"one": {}})
    assert "no CIFAR10 in" in app.error("compare", "--experiment", path)


@SLOW
def test_quick_form_measures_this_machine(app, tmp_path):
    """this_machine.yaml measures two variants or more, in its quick form. No variant fails."""
    path = ROOT / "configs/compare/this_machine.yaml"
    app("compare", "--experiment", path, "--quick=true")
    folder = tmp_path / "runs/compare" / path.stem / "version_0"
    rows = results_in(folder)["variants"]
    rates = [row["samples_per_s"] for row in rows if row["status"] == "measured"]
    assert len(rates) >= 2, rows
    assert min(rates) > 0
    assert {row["status"] for row in rows} <= {"measured", "skipped"}
    assert "## Published" not in (folder / "report.md").read_text()
