"""The resolved configuration of a command line: strategy, devices and processes."""

import functools
import sys

import pytest
from harness import QUIET
from jsonargparse import Namespace
from lightning.pytorch.accelerators import CUDAAccelerator

from app.command.configuration import build, resolve, split_flags
from app.command.parser import PlainParser
from app.command.resolved import Resolved
from app.command.run_options import default_name
from app.errors import UserError
from app.modules import FashionMLP
from app.training import register_strategies


def trainer(**settings):
    register_strategies()
    defaults = {"accelerator": "cpu", "devices": "auto", "strategy": "auto", "num_nodes": 1}
    return Resolved(Namespace(trainer=Namespace(defaults | settings)))


def test_resolve_ignores_arguments_of_the_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["app", "fit", "--trainer.max_epochs", "7"])
    config = resolve(["test", "--data", "Synthetic", "--ckpt_path", "x"])
    assert (config.trainer.max_epochs, config.ckpt_path) == (50, "x")
    assert config.data.class_path == "app.data.Synthetic"
    model, data = build(
        ["fit", "--model", "FashionMLP", "--data", "Synthetic", "--data.like", "FashionMNIST"]
    )
    assert isinstance(model, FashionMLP)
    assert data.image_shape == (1, 28, 28)
    assert sys.argv == ["app", "fit", "--trainer.max_epochs", "7"]


@pytest.mark.parametrize(
    ("devices", "count"), [("auto", 1), ("-1", 1), (3, 3), ("3", 3), ("0,2", 2), ([0, 1, 5], 3)]
)
def test_devices_are_counted_as_lightning_does(devices, count):
    assert trainer(devices=devices, strategy="ddp").devices == count


def test_auto_devices_are_one_for_strategy_auto(monkeypatch):
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 4))
    gpus = functools.partial(trainer, accelerator="cuda")
    counts = [
        gpus().devices,
        gpus(num_nodes=2).devices,
        gpus(devices=-1).devices,
        gpus(strategy="ddp").devices,
    ]
    assert counts == [1, 4, 4, 4]


@pytest.mark.parametrize("devices", ["-2", "abc", 0, "[]"])
def test_invalid_devices(devices):
    with pytest.raises(UserError, match=r"--trainer.devices .*: give a count from 1 on"):
        trainer(devices=devices).devices  # noqa: B018


@pytest.mark.parametrize(
    ("strategy", "nodes", "processes"),
    [("auto", 1, 3), ("ddp", 2, 3), ("ddp_spawn", 1, 3), ("dp", 1, 1), ("single_device", 1, 1)],
)
def test_processes_and_replicas(strategy, nodes, processes):
    config = trainer(strategy=strategy, devices=3, num_nodes=nodes)
    assert (config.processes, config.replicas) == (processes, 3 * nodes)


def test_limits_are_of_our_own_classes(fit):
    """Limits of our flags do not apply to the user's classes; a default may be null."""
    classes = ["--model", "user_code.OddModel", "--data", "user_code.OddData"]
    config = resolve(["fit", *classes, "--data.seed", "abc", "--model.clip", ".inf"])
    assert (config.data.init_args.seed, config.data.init_args.data_seed) == ("abc", -1)
    assert config.model.init_args.hidden is None
    fit(*classes, "--trainer.max_steps", "1", "--run.test", "false", *QUIET)
    with pytest.raises(UserError, match=r"--model.width null: give a value, or leave it out"):
        resolve(["fit", *classes, "--model.width", "null"])


@pytest.mark.parametrize("flag", ["data.flip", "run.test", "trainer.deterministic"])
@pytest.mark.parametrize(("end", "value"), [("", True), (" false", False), ("=true", True)])
def test_switch_needs_no_value(flag, end, value):
    section, _, name = flag.partition(".")
    words = f"--{flag}{end}".split()
    settings = resolve(["fit", "--data", "Synthetic", *words, "--data.cutout", "3"])[section]
    assert settings.get("init_args", settings)[name] is value
    assert split_flags(words) == ([], [(f"--{flag}", str(value).lower())])


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], False),
        (["--dry_run"], True),
        (["--dry_run=true"], True),
        (["--dry_run", "false"], False),
    ],
)
def test_switch_of_another_command(words, value):
    parser = PlainParser(prog="x")
    parser.add_argument("--dry_run", type=bool, default=False)
    assert parser.parse_args(words).dry_run is value
    with pytest.raises(UserError, match="--dry_run maybe: expected bool"):
        parser.parse_args(["--dry_run", "maybe"])


NAMES = [
    ([], "LeNet-CIFAR10"),
    (["--model.network", "resnet18_cifar", "--data", "Synthetic"], "resnet18_cifar-Synthetic"),
    (["--model", "user_code.TheirModel", "--data", "user_code.TheirData"], "TheirModel-TheirData"),
]


@pytest.mark.parametrize(("flags", "name"), NAMES)
def test_a_run_is_named_by_its_network_and_data(flags, name):
    assert default_name(resolve(["fit", *flags])) == name
