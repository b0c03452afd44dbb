"""Experiment files: variants, grids and their commands, and errors of wrong files."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import SHIPPED, App, error_of, output_of

from app.lab.compare.results import COLUMNS

Write = Callable[..., Path]  # type of the fixture `experiment`


def commands(out: str) -> list[str]:
    return [line for line in out.splitlines() if "python -m app fit" in line]


def test_a_grid_is_every_combination_but_the_excluded(
    app: App, experiment: Write, tmp_path: Path
) -> None:
    path = experiment(
        grid={
            "trainer.strategy": ["dp", "ddp"],
            "trainer.devices": [1, 2],
            "data.num_workers": [0],
        },
        exclude=[{"trainer.strategy": "dp", "trainer.devices": 1}],
    )
    out = output_of(*app("compare", "--experiment", path, "--dry_run"))
    pairs = [
        re.findall(r"--trainer.strategy (\w+) .*--trainer.devices (\d)", line)[0]
        for line in commands(out)
    ]
    assert pairs == [("dp", "2"), ("ddp", "1"), ("ddp", "2")]
    assert "strategy=ddp devices=2 num_workers=0" in out
    assert "3 runs to do: at most 3:00" in out
    assert not (tmp_path / "runs" / "compare").exists(), "nothing is kept"


def test_the_global_batch_is_fixed_or_grows_with_the_replicas(app: App, experiment: Write) -> None:
    path = experiment(
        variants={"one": {}, "two": {"trainer.strategy": "ddp", "trainer.devices": 2}}
    )
    _, out = app("compare", "--experiment", path, "--dry_run")
    assert all("--data.batch_size 24" in line and "lr" not in line for line in commands(out))
    _, out = app("compare", "--experiment", path, "--dry_run", "--scale_batch", "true")
    one, two = commands(out)
    assert "--data.batch_size 24" in one
    assert "--model.optimizer.lr 0.001" in one
    assert "--data.batch_size 48" in two
    assert "--model.optimizer.lr 0.002 --model.warmup 1ep" in two
    assert "warmup 1ep" not in one


def test_settings_and_flags_of_fit_on_the_command_line(app: App, experiment: Write) -> None:
    path = experiment(variants={"one": {}, "other": {"trainer.precision": "bf16-mixed"}})
    words = ["--repeats=4", "--max_epochs", "7", "--data.flip=true", "--seed_everything", "3"]
    _, out = app("compare", "--experiment", path, "--dry_run", *words)
    assert "8 runs to do" in out
    assert all(
        "--trainer.max_epochs 7" in line and "--data.flip true" in line for line in commands(out)
    )
    assert all("--seed_everything 3" in line for line in commands(out))


def test_another_class_leaves_the_experiments_settings_of_its_section(
    app: App, experiment: Write, image_root: Path
) -> None:
    flags = {
        "data": "Synthetic",
        "data.images": 240,
        "model.optimizer": "SGD",
        "model.optimizer.lr": 0.01,
    }
    path = experiment(variants={"one": {}}, flags=flags)
    images = ["--data", "ImageFolder", "--data.root", image_root]
    config = image_root / "own.yaml"
    config.write_text(
        yaml.safe_dump(
            {"data": {"class_path": "ImageFolder", "init_args": {"root": str(image_root)}}}
        )
    )
    for words in (images, ["--config", config]):
        _, out = app("compare", "--experiment", path, "--dry_run", *words)
        assert commands(out)
        assert all(
            "--data.images" not in line and "--model.optimizer.lr 0.01" in line
            for line in commands(out)
        )


def test_two_nodes_are_two_processes_that_know_their_places(app: App, experiment: Write) -> None:
    path = experiment(variants={"nodes": {"trainer.strategy": "ddp", "trainer.num_nodes": 2}})
    _, out = app("compare", "--experiment", path, "--dry_run")
    first, second = commands(out)
    assert first.startswith("OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo python -m app fit")
    assert re.search(
        r" --cluster.init_method tcp://127.0.0.1:29500 --cluster.node_rank 0 &$", first
    )
    assert second == first.replace("node_rank 0 &", "node_rank 1")


WRONG = [
    ({}, "neither variants nor a grid"),
    (
        {"variants": {"a": {"trainer.strategi": "dp"}}},
        "'a': --trainer.strategi: there is no such flag: did you",
    ),
    (
        {"variants": {"a": {}}, "repeates": 2},
        "repeates: there is no such setting: did you mean repeats?",
    ),
    ({"variants": {"a": {}}, "repeats": "many"}, "repeats"),
    ({"variants": {"a": {}}, "baseline": "b"}, "--baseline b: no such variant"),
    ({"variants": {"a": {"run.name": "b"}}}, "run.name is set by compare itself"),
    ({"variants": {"a": {}}, "max_epochs": 1}, "leaves nothing to measure after --warmup_epochs 1"),
    (
        {"variants": {"a": {"trainer.max_epochs": 1}}, "max_epochs": None},
        "'a': --trainer.max_epochs 1 leaves",
    ),
    ({"variants": {5: {}}}, "5 is not a name of a variant or flag"),
    ({"variants": {"a": None}}, "--variants None: expected dict"),
    ({"variants": None}, "variants: null: give its settings"),
    ({"variants": {"a": {}}, "time_limit": float("nan")}, "--time_limit nan: give 1 or more"),
    (
        {"variants": {"a": {}}, "repeats": 10**9},
        "1,000,000,000 repeats: give 1,000 of each at most",
    ),
    (
        {"grid": {f"data.x{key}": list(range(10)) for key in range(10)}},
        "a grid of 10,000,000,000 combinations",
    ),
    (
        {"variants": {"a": {"model": "os.system"}}},
        "'a': --model os.system: its code is not trusted",
    ),
    ({"variants": {"a b": {}, "a_b": {}}}, "two variants have the folder a_b"),
    (
        {"grid": {"trainer.devices": [1]}, "exclude": [{"trainer.device": 1}]},
        "trainer.device is not in the grid",
    ),
    ({"variants": {"a": {}}, "published": {"hardware": "x"}}, "rows"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_an_experiment_that_cannot_be(
    app: App, experiment: Write, settings: dict[str, Any], message: str
) -> None:
    assert message in error_of(*app("compare", "--experiment", experiment(**settings)))


REFUSED = [
    (
        "--trainer.max_epochs=7",
        "the experiment sets max_epochs for all variants: give only --max_epochs",
    ),
    ("--trainer.precision=64-true", "--trainer.precision is a flag of the variants"),
    ("--cluster.node_rank=1", "cluster.node_rank is set by compare itself"),
]


@pytest.mark.parametrize(("word", "message"), REFUSED)
def test_nothing_typed_is_dropped(app: App, experiment: Write, word: str, message: str) -> None:
    path = experiment(variants={"a": {}, "b": {"trainer.precision": "bf16-mixed"}})
    assert message in error_of(*app("compare", "--experiment", path, word))


def test_an_experiment_that_is_not_there(app: App, tmp_path: Path) -> None:
    assert "there is no such file" in error_of(
        *app("compare", "--experiment", tmp_path / "none.yaml")
    )
    assert "--experiment needs a value" in error_of(*app("compare", "--experiment"))


def test_the_small_form_and_what_is_typed(app: App, experiment: Write) -> None:
    path = experiment(
        variants={"a": {}},
        quick_form={"repeats": 3, "max_epochs": 4, "flags": {"data.images": 120}},
    )
    out = output_of(
        *app("compare", "--repeats", "5", "--dry_run", "--experiment", path, "--quick", "true")
    )
    (command,) = commands(out)
    assert "5 runs to do" in out, "what is typed wins, wherever it stands"
    for flag in ("--data.images 120", "--data.batch_size 24", "--trainer.max_epochs 4"):
        assert flag in command
    message = "has no quick_form: remove --quick"
    assert message in error_of(
        *app("compare", "--experiment", experiment(variants={"a": {}}), "--quick", "true")
    )


@pytest.mark.parametrize("quick", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_can_be_read(app: App, path: Path, quick: bool) -> None:
    output_of(*app("compare", "--experiment", path, "--dry_run", "--quick", str(quick).lower()))
    content = yaml.safe_load(path.read_text())
    for row in content.get("published", {}).get("rows", []):
        assert row.get("variant", "") in {*content["variants"], ""}
        assert row["figures"].keys() <= COLUMNS.keys()
