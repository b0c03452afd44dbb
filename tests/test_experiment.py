"""Experiment files: variants, grids and their commands, and errors of wrong files."""

import re

import pytest
import yaml
from harness import SHIPPED, slow

BF16 = {"trainer.precision": "bf16-mixed"}


def dry(app, path, *words):
    """Return the output of a dry run, and the commands in it."""
    out = app("compare", "--experiment", path, "--dry_run", *words)
    return out, [line for line in out.splitlines() if "python -m app fit" in line]


def test_grid_expands_to_every_combination_that_is_not_excluded(app, experiment, tmp_path):
    grid = {"trainer.strategy": ["dp", "ddp"], "trainer.devices": [1, 2], "data.num_workers": [0]}
    exclude = [{"trainer.strategy": "dp", "trainer.devices": 1}]
    out, commands = dry(app, experiment(grid=grid, exclude=exclude))
    pattern = r"--trainer.strategy (\w+) .*--trainer.devices (\d)"
    pairs = [re.findall(pattern, line)[0] for line in commands]
    assert pairs == [("dp", "2"), ("ddp", "1"), ("ddp", "2")]
    assert "strategy=ddp devices=2 num_workers=0" in out
    assert "3 runs to do: at most 3:00" in out
    assert not (tmp_path / "runs/compare").exists(), "a dry run writes nothing"


def test_global_batch_is_fixed_or_grows_with_the_replicas(app, experiment):
    ddp = {"trainer.strategy": "ddp", "trainer.devices": 2}
    path = experiment(variants={"one": {}, "two": ddp})
    for line in dry(app, path)[1]:
        assert "--data.batch_size 24" in line
        assert "lr" not in line
    one, two = dry(app, path, "--scale_batch=true")[1]
    assert "--data.batch_size 24" in one
    assert "--model.optimizer.lr 0.001" in one
    assert "--data.batch_size 48" in two
    assert "--model.optimizer.lr 0.002 --model.warmup 1ep" in two
    assert "warmup 1ep" not in one


def test_settings_and_flags_of_fit_on_the_command_line(app, experiment):
    path = experiment(variants={"one": {}, "other": BF16})
    words = ["--repeats=4", "--max_epochs=7", "--data.flip=true", "--seed_everything=3"]
    out, commands = dry(app, path, *words)
    assert "8 runs to do" in out
    for line in commands:
        for flag in ("--trainer.max_epochs 7", "--data.flip true", "--seed_everything 3"):
            assert flag in line


def test_another_data_class_drops_flags_of_the_experiments_class(app, experiment, image_root):
    flags = {"data": "Synthetic", "data.images": 240, "model.optimizer": "SGD"}
    path = experiment(variants={"one": {}}, flags=flags | {"model.optimizer.lr": 0.01})
    config = image_root / "own.yaml"
    data = {"class_path": "ImageFolder", "init_args": {"root": str(image_root)}}
    config.write_text(yaml.safe_dump({"data": data}))
    images = ["--data=ImageFolder", "--data.root", image_root]
    for words in (images, ["--config", config]):
        (command,) = dry(app, path, *words)[1]
        assert "--data.images" not in command
        assert "--model.optimizer.lr 0.01" in command


def test_two_nodes_are_two_commands_with_ranks(app, experiment):
    path = experiment(variants={"nodes": {"trainer.strategy": "ddp", "trainer.num_nodes": 2}})
    first, second = dry(app, path)[1]
    assert first.startswith("OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo python -m app fit")
    rendezvous = " --cluster.init_method tcp://127.0.0.1:29500 --cluster.node_rank 0 &"
    assert first.endswith(rendezvous)
    assert second == first.replace("node_rank 0 &", "node_rank 1")


ONE = {"variants": {"a": {}}}
WRONG = [
    ({}, "neither variants nor a grid"),
    ({"variants": {"a": {"trainer.strategi": "dp"}}}, "'a': --trainer.strategi: there is no such"),
    (ONE | {"repeates": 2}, "repeates: there is no such setting: did you mean repeats?"),
    (ONE | {"repeats": "many"}, "repeats"),
    (ONE | {"baseline": "b"}, "--baseline b: no such variant"),
    ({"variants": {"a": {"run.name": "b"}}}, "run.name is set by compare itself"),
    (ONE | {"max_epochs": 1}, "leaves nothing to measure after --warmup_epochs 1"),
    ({"variants": {5: None}}, "--variants None: expected dict"),
    ({"variants": None}, "variants: null: give its settings"),
    ({"variants": {"a": {"trainer.max_epochs": 3}}}, "--trainer.max_epochs is a flag of the vari"),
    (ONE | {"max_epochs": 3, "flags": {"trainer.max_epochs": 5}}, "has max_epochs, too: leave one"),
    (ONE | {"time_limit": float("nan")}, "--time_limit nan: give 1 or more"),
    ({"variants": {"a": {"model": "os.system"}}}, "'a': --model os.system: its code is not trust"),
    ({"variants": {"a b": {}, "a_b": {}}}, "two variants have the folder a_b"),
    (
        {"grid": {"trainer.devices": [1]}, "exclude": [{"trainer.device": 1}]},
        "trainer.device is not in the grid",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_experiment_is_rejected(app, experiment, settings, message):
    assert message in app.error("compare", "--experiment", experiment(**settings))


REFUSED = [
    ("--trainer.precision=64-true", "--trainer.precision is a flag of the variants"),
    ("--cluster.node_rank=1", "cluster.node_rank is set by compare itself"),
    ("--quick=true", "has no quick_form: remove --quick"),
    ("--experiment", "--experiment needs a value"),
    ("--grid=data.flip=true", "expected list"),
    ("--experiment=none.yaml", "there is no such file"),
]


@pytest.mark.parametrize(("word", "message"), REFUSED)
def test_flag_that_cannot_take_effect_is_rejected(app, experiment, word, message):
    path = experiment(variants={"a": {}, "b": BF16})
    assert message in app.error("compare", "--experiment", path, word)


def test_small_form_keeps_flags_and_yields_to_the_command_line(app, experiment):
    form = {"repeats": 3, "max_epochs": 4, "flags": {"data.images": 120}}
    path = experiment(**ONE, quick_form=form)
    out, (command,) = dry(app, path, "--quick=true", "--repeats=5")
    assert "5 runs to do" in out
    for flag in ("--data.images 120", "--data.batch_size 24", "--trainer.max_epochs 4"):
        assert flag in command


@pytest.mark.parametrize("quick", ["false", slow("true")])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_can_be_read(app, path, quick):
    dry(app, path, "--quick", quick)
