"""`compare`: from an experiment file to the report, by the real command."""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from cluster.hosts import awaited
from harness import ROOT, App, Running, error_of, output_of, record_of, running, seen_colours
from jsonargparse import Namespace
from PIL import Image

from app.lab.compare.figures import pictures
from app.lab.compare.results import COLUMNS
from app.lab.compare.runner import Outcome
from app.lab.variant import Variant
from app.record import PHASES, DataSet, Epoch, Record
from app.system.machine import own_seconds


def comparing(
    path: Path, *words: str, env: dict[str, str] | None = None
) -> AbstractContextManager[Running]:
    return running("compare", "--experiment", path, "--root", path.parent, *words, env=env)


def compare(path: Path, *words: str, env: dict[str, str] | None = None) -> str:
    with comparing(path, *words, env=env) as process:
        return process.end(400, code=0)


def results(path: Path) -> dict[str, Any]:
    return json.loads((path.parent / "compare" / "tiny" / "version_0" / "results.json").read_text())


def by_name(path: Path) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in results(path)["variants"]}


@pytest.mark.slow
def test_a_comparison_with_what_cannot_run_what_fails_and_what_hangs(
    app: App, experiment: Callable[..., Path]
) -> None:
    ddp, stuck = {"trainer.strategy": "ddp"}, {"model": "stuck_code.FailsWhileRankZeroIsStuck"}
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "one": ("measured", {}),
        "no GPU": ("skipped", ddp | {"trainer.accelerator": "gpu", "trainer.devices": 4096}),
        "too many": ("skipped", ddp | {"trainer.devices": 4096}),
        "odd batch": ("failed", ddp | {"data.batch_size": 25, "trainer.devices": 2}),
        "fails": ("failed", {"model": "user_code.FailingModel"}),
        "hangs": ("hanging", ddp | {"model": "stuck_code.HangingModel", "trainer.devices": 2}),
        "starts": ("starting", {"model": "stuck_code.NeverReady"}),
        "slow": ("slow", {"trainer.callbacks+": "stuck_code.TakesItsTime"}),
        "a node fails": ("failed", ddp | stuck | {"trainer.num_nodes": 2}),
        "dp": ("measured", {"trainer.strategy": "dp", "trainer.devices": 2}),
    }
    path = experiment(variants={name: flags for name, (_, flags) in variants.items()}, repeats=2)
    output_of(*app("compare", "--root", path.parent, "--experiment", path, "--time_limit", "40"), 1)
    rows = by_name(path)
    assert {name: row["status"] for name, row in rows.items()} == {
        name: state for name, (state, _) in variants.items()
    }
    assert "GPU" in rows["no GPU"]["reason"]
    assert "needs 4096 CPU cores" in rows["too many"]["reason"]
    assert "cannot be shared equally by 2 ranks" in rows["odd batch"]["reason"]
    assert "this model fails" in rows["fails"]["reason"]
    assert any("this model fails" in line for line in rows["fails"]["tail"])
    assert "only here" in rows["a node fails"]["reason"]
    assert "no progress after 40 s" in rows["hangs"]["reason"]
    assert rows["starts"]["reason"] == "still setting up after 40 s: see --time_limit"
    slow = rows["slow"]
    assert re.fullmatch(r"step \d after 40 s, warm-up included", slow["reason"])
    assert slow["n"] == 1, "it is not tried again"
    assert 0 < slow["samples_per_s"] < 24 / 5
    assert slow["loss_last"] is None
    one, dp = rows["one"], rows["dp"]
    assert one["loss_last"] == pytest.approx(dp["loss_last"], abs=1e-5)
    assert (one["n"], one["speed_up"], one["efficiency"]) == (2, 1.0, 1.0)
    assert dp["speed_up"] == pytest.approx(dp["samples_per_s"] / one["samples_per_s"])
    assert dp["efficiency"] == pytest.approx(dp["speed_up"] / 2)
    assert (one["global_batch"], dp["global_batch"], dp["replica_batch"]) == (24, 24, 12)
    began = [
        Path(run, "metrics.csv").stat().st_mtime
        for i in (0, 1)
        for run in (one["runs"][i], dp["runs"][i])
    ]
    assert began == sorted(began), "repeats are in turn"
    assert record_of(Path(one["runs"][0]))["throughput"]["n"] == 4, (
        "of 2 epochs of 9 steps, the first is warm-up"
    )


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the machine look idle to a comparison that runs in this process."""
    monkeypatch.setattr("app.lab.runs.busy_seconds", own_seconds)


@pytest.mark.usefixtures("idle", "drawn")
def test_the_report(app: App, experiment: Callable[..., Path]) -> None:
    path = experiment(
        description="<script>alert(1)</script> Which?",
        variants={"=one": {}, "bf16 | mixed": {"trainer.precision": "bf16-mixed"}},
        published={
            "hardware": "a V100",
            "rows": [{"what": "x", "variant": "=one", "figures": {"train_s": 576.94}}],
        },
    )
    out = output_of(*app("compare", "--root", path.parent, "--experiment", path))
    folder = path.parent / "compare" / "tiny" / "version_0"
    drawn = {"throughput", "loss_epoch", "step"}
    written = {"experiment.json", "results.csv", "results.json", "report.md", "report.html", "runs"}
    assert {file.name for file in folder.iterdir()} == written | {f"{name}.png" for name in drawn}
    for name in drawn:
        with Image.open(folder / f"{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 20, f"{name} is empty"
    table = pd.read_csv(folder / "results.csv")
    assert list(table.columns) == list(COLUMNS)
    assert table["variant"][0] == "'=one", "no formula"
    may_lack = ("memory_others", "not_finite", "efficiency", "slow_rank")
    assert table[[name for name in COLUMNS if not name.startswith(may_lack)]].notna().all().all()
    text = (folder / "report.md").read_text()
    head = results(path)
    assert "Published, and here" in text
    assert f"    {head['command']}\n" in text
    for detail in (
        "576.94",
        "a V100",
        "python -m app fit",
        head["hardware"]["cpu"],
        head["versions"]["torch"],
    ):
        assert detail in text
    html = (folder / "report.html").read_text()
    assert html.count("<svg") == len(drawn)
    assert html.count("aria-label=") == len(drawn)
    assert "<script>" not in html
    assert not re.findall(r'(?:src|href)="(?!data:|#)', html), "it needs no other file"
    assert len(ids := re.findall(r' id="([^"]+)"', html)) == len(set(ids)), (
        "an id is that of one thing"
    )
    assert head["verdict"]["said"] in html.partition("<h1>")[2].partition("</h1>")[0]
    assert "was the fastest, in a single run of each" in head["verdict"]["said"]
    assert html.index("<svg") < html.index("<table") < html.index("<details>")
    assert "OMP_NUM_THREADS=1 python -m app fit --data Synthetic" in text
    typed = [
        line for line in out.splitlines() if line.startswith("OMP_NUM_THREADS=1 python -m app fit")
    ]
    assert typed[-1] == next(
        row["command"] for row in head["variants"] if row["variant"] == head["verdict"]["taken"]
    )
    assert str(folder) in out
    for row in head["variants"]:
        whole = sum(row[f"{phase}_ms"] for phase in PHASES)
        # not exactly equal, because the figures are rounded
        assert whole == pytest.approx(1000 * row["global_batch"] / row["samples_per_s"], rel=1e-4)
    for damaged in ("runs/repeat_1/=one/version_0/run.json", "experiment.json"):
        (folder / damaged).write_text("{")
        message = error_of(*app("compare", "--root", path.parent, "--experiment", path))
        assert f"{folder / damaged} cannot be read (" in message
        assert message.endswith("give --fresh true to begin a new report")


def test_no_verdict_on_a_busy_machine(
    app: App, experiment: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If other programs take all cores, the report gives no verdict. It states the load, and how to measure again."""
    cores = os.cpu_count() or 1
    monkeypatch.setattr(
        "app.lab.runs.busy_seconds", lambda: own_seconds() + cores * time.monotonic()
    )
    path = experiment(variants={"one": {}, "dp": {"trainer.strategy": "dp", "trainer.devices": 2}})
    out = output_of(*app("compare", "--root", path.parent / "my runs", "--experiment", path))
    message = f"The machine was busy: other programs took up to {cores:.1f} of its {cores} cores"
    folder = path.parent / "my runs" / "compare" / "tiny" / "version_0"
    head = json.loads((folder / "results.json").read_text())
    assert head["verdict"] == {"said": message, "taken": None}
    again = f"{head['command']} --fresh"
    assert f"'{path.parent}/my runs'" in again
    assert again in out.splitlines(), "it can be pasted"
    html = (folder / "report.html").read_text()
    for text in (out, (folder / "report.md").read_text(), html):
        assert message in text
        assert "Measure again when it is quiet" in text
        for claim in (
            "the fastest:",
            "was the fastest",
            "Take",
            "of the ideal",
            "× one",
            "limits",
            "recommended",
        ):
            assert claim not in text, claim
    assert f'<span class="caption">{message}</span>' in html


@pytest.mark.browser
@pytest.mark.usefixtures("idle", "drawn")
def test_the_report_in_a_browser(app: App, experiment: Callable[..., Path]) -> None:
    path = experiment(
        variants={"one": {}, "<img src=x onerror=alert(1)>": {"trainer.precision": "bf16-mixed"}}
    )
    assert app("compare", "--root", path.parent, "--experiment", path)[0] == 0
    report = path.parent / "elsewhere" / "report.html"
    report.parent.mkdir()
    shutil.copy(path.parent / "compare" / "tiny" / "version_0" / "report.html", report)
    colours = seen_colours(report, "--window-size=1200,5000")
    for drawn in (
        (0x2F, 0x62, 0xC9),
        (0xA9, 0xC1, 0xF0),
    ):  # colours of the recommended variant and of the other
        assert colours.get(drawn, 0) > 1000


@pytest.mark.slow
def test_a_broken_off_comparison_goes_on(experiment: Callable[..., Path]) -> None:
    path = experiment(variants={"one": {}, "dp": {"trainer.strategy": "dp", "trainer.devices": 2}})
    runs = path.parent / "compare" / "tiny" / "version_0" / "runs" / "repeat_1"
    with comparing(path) as process:
        awaited((runs / "dp" / "version_0" / "run.json").exists, 100)
        process.get(
            "SIGKILL", "group"
        ).end()  # the kernel then kills the running `fit`, because its parent is dead
    first = (runs / "one" / "version_0" / "run.json").stat().st_mtime

    assert "1 runs are done already" in compare(path)
    assert (runs / "one" / "version_0" / "run.json").stat().st_mtime == first
    assert {name: row["n"] for name, row in by_name(path).items()} == {"one": 1, "dp": 1}
    compare(path, "--fresh")
    assert (path.parent / "compare" / "tiny" / "version_1" / "runs").is_dir()


@pytest.mark.slow
def test_ctrl_c_leaves_a_report(experiment: Callable[..., Path]) -> None:
    path = experiment(variants={"one": {}, "hangs": {"model": "stuck_code.HangingModel"}})
    with comparing(path) as process:
        assert process.process.stdout is not None
        for line in process.process.stdout:
            if line.startswith("one: run 1"):
                break
        out = process.get("SIGINT", "main").end(60, code=130)
    assert "Not complete: hangs" in out
    assert {name: row["status"] for name, row in by_name(path).items()} == {
        "one": "measured",
        "hangs": "waiting",
    }


def test_curves_that_coincide_are_one_line() -> None:
    """The title counts the curves that coincide with the baseline's. If none does, the title describes the plot."""

    def coinciding(*losses: list[float], data: DataSet | None = None) -> str:
        table = pd.DataFrame(
            {"variant": [str(i) for i in range(len(losses))], "samples_per_s": 1.0, "replicas": 1}
        )
        table = table.reindex(columns=list(COLUMNS)).assign(samples_per_s=math.nan)
        outcomes = []
        for name, curve in zip(table["variant"], losses, strict=True):
            epochs = [
                Epoch(epoch, train_loss=loss, seconds=1.0) for epoch, loss in enumerate(curve)
            ]
            outcomes.append(
                Outcome(Variant(name, ["fit"], Namespace()), {1: Record(epochs=epochs, data=data)})
            )
        return pictures(table, outcomes, "0", None)["loss_epoch"].title

    assert coinciding([2.0, 1.0], [2.0, 1.0 + 3e-7], [2.0, 1.0]) == (
        "All 3 loss curves coincide (largest difference 3e-7)"
    )
    assert coinciding([2.0, 1.0], [2.0, 1.0]) == "Both loss curves coincide (to the last digit)"
    assert coinciding([2.0, 1.0], [2.0, 1.1], [2.0, 1.0001]).startswith(
        "2 of 3 loss curves coincide ("
    )
    assert coinciding([2.0, 1.0], [2.0, 1.1], [2.0, 1.1]) == "Training loss against epochs", (
        "the baseline's is apart"
    )
    assert (
        coinciding([2.0, 1.0])
        == coinciding([2.0, 1.0], [2.0, 1.1])
        == "Training loss against epochs"
    )
    unlearnt, ten = "No variant has learnt yet: the loss curves say nothing", DataSet("x", 10)
    assert coinciding([2.0, 1.99], [2.0, 1.99]) == unlearnt
    assert coinciding([2.31, 2.3], [2.31, 2.3], data=ten) == unlearnt, (
        "guessing has a loss of ln 10 = 2.303"
    )
    assert coinciding([2.2], [2.2], data=ten) == "Both loss curves coincide (to the last digit)"


def test_nothing_can_run(app: App, experiment: Callable[..., Path]) -> None:
    path = experiment(flags={"data": "CIFAR10", "data.root": "/nowhere"}, variants={"one": {}})
    assert "no CIFAR10 in" in error_of(*app("compare", "--experiment", path))


@pytest.mark.slow
def test_the_tracker_gets_every_run_and_a_summary(experiment: Callable[..., Path]) -> None:
    path = experiment(variants={"one": {}, "two": {"trainer.precision": "bf16-mixed"}})
    compare(path, "--wandb", env={"WANDB_MODE": "offline"})
    folder = path.parent / "compare" / "tiny" / "version_0"
    assert len(list(folder.glob("runs/repeat_1/*/version_0/wandb/offline-run-*"))) == 2
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1
    assert len(list(folder.glob("wandb/offline-run-*/files/media/images/*.png"))) == len(
        list(folder.glob("*.png"))
    )
    config = yaml.safe_load(
        (folder / "runs" / "repeat_1" / "one" / "version_0" / "config.yaml").read_text()
    )
    assert config["run"]["group"] == "tiny/version_0"


@pytest.mark.slow
def test_every_way_of_running_on_this_machine(app: App, tmp_path: Path) -> None:
    """this_machine.yaml measures two variants or more, in its quick form. No variant fails."""
    path = ROOT / "configs" / "compare" / "this_machine.yaml"
    output_of(*app("compare", "--experiment", path, "--quick", "true", "--root", tmp_path))
    folder = tmp_path / "compare" / path.stem / "version_0"
    rows = json.loads((folder / "results.json").read_text())["variants"]
    measured = [row for row in rows if row["status"] == "measured"]
    assert len(measured) >= 2, rows
    assert all(row["samples_per_s"] > 0 for row in measured)
    assert not [row for row in rows if row["status"] not in ("measured", "skipped")]
    assert "Published, and here" not in (folder / "report.md").read_text()
