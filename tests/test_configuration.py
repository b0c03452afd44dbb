"""The resolved configuration of a command line: strategy, devices and processes."""

import sys
from pathlib import Path

import pytest
from harness import QUIET, App, error_of, output_of
from jsonargparse import Namespace
from lightning.pytorch.accelerators import CUDAAccelerator

from app.command.configuration import build, resolve, split_flags
from app.command.parser import PlainParser
from app.command.resolved import Resolved
from app.command.run_options import default_name
from app.errors import UserError
from app.modules import FashionMLP


def trainer(**settings: object) -> Resolved:
    defaults = {"accelerator": "cpu", "devices": "auto", "strategy": "auto", "num_nodes": 1}
    return Resolved(Namespace(trainer=Namespace(defaults | settings)))


def test_the_arguments_are_those_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["app", "fit", "--trainer.max_epochs", "7"]
    monkeypatch.setattr(sys, "argv", typed)
    config = resolve(["test", "--data", "Synthetic", "--ckpt_path", "x"])
    assert (config.trainer.max_epochs, config.ckpt_path) == (50, "x")
    assert config.data.class_path == "app.data.Synthetic"
    model, data = build(
        ["fit", "--model", "FashionMLP", "--data", "Synthetic", "--data.like", "FashionMNIST"]
    )
    assert isinstance(model, FashionMLP)
    assert data.image_shape == (1, 28, 28)
    assert sys.argv is typed
    assert typed[1:] == ["fit", "--trainer.max_epochs", "7"]


@pytest.mark.parametrize(
    ("devices", "count"),
    [("auto", 1), ("-1", 1), (3, 3), ("3", 3), ("0,2", 2), ("1,", 1), ([0, 1, 5], 3)],
)
def test_devices_are_counted_as_lightning_does(devices: object, count: int) -> None:
    assert trainer(devices=devices, strategy="ddp").devices == count


def test_devices_are_several_only_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 4))
    counts = [
        trainer(accelerator="cuda", strategy=strategy, devices=devices, num_nodes=nodes).devices
        for strategy, devices, nodes in (
            ("auto", "auto", 1),
            ("auto", "auto", 2),
            ("auto", -1, 1),
            ("ddp", "auto", 1),
        )
    ]
    assert counts == [1, 4, 4, 4]


@pytest.mark.parametrize("devices", ["0", "-2", "abc", 0, "[]"])
def test_what_is_no_number_of_devices(devices: object) -> None:
    with pytest.raises(UserError, match=r"--trainer.devices .*: give a count from 1 on"):
        trainer(devices=devices).devices  # noqa: B018


@pytest.mark.parametrize(
    ("strategy", "nodes", "processes"),
    [
        ("auto", 1, 3),
        ("ddp", 2, 3),
        ("ddp_spawn", 1, 3),
        ("dp", 1, 1),
        ("ddp_dp", 2, 1),
        ("single_device", 1, 1),
    ],
)
def test_processes_and_replicas(strategy: str, nodes: int, processes: int) -> None:
    config = trainer(strategy=strategy, devices=3, num_nodes=nodes)
    assert (config.processes, config.replicas) == (processes, 3 * nodes)


def test_an_option_of_a_strategy_names_its_class() -> None:
    words = [
        "--trainer.strategy",
        "ddp_dp",
        "--trainer.strategy.bucket_cap_mb",
        "1",
        "--trainer.num_nodes",
        "2",
    ]
    config = resolve(["fit", "--data", "Synthetic", "--trainer.devices", "4", *words])
    config = Resolved(config)
    assert (config.processes, config.replicas) == (1, 8)


@pytest.mark.parametrize("section", ["run", "trainer", "cluster", "data"])
def test_a_section_that_is_null(section: str, app: App, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"{section}: null\n")
    message = error_of(*app("fit", "--config", tmp_path / "c.yaml"))
    assert (
        message
        == f"error: {section}: null in --config {tmp_path}/c.yaml: give its settings, or leave it out"
    )


def test_limits_are_of_our_own_classes(app: App) -> None:
    """Limits of our flags do not apply to the user's classes. A null default is valid even if its type forbids null."""
    classes = ["--model", "user_code.OddModel", "--data", "user_code.OddData"]
    config = resolve(["fit", *classes, "--data.seed", "abc", "--model.clip", ".inf"])
    assert (config.data.init_args.seed, config.data.init_args.data_seed) == ("abc", -1)
    assert config.model.init_args.hidden is None
    output_of(*app("fit", *classes, "--trainer.max_steps", "1", "--run.test", "false", *QUIET))
    with pytest.raises(UserError, match=r"--model.width null: give a value, or leave it out"):
        resolve(["fit", *classes, "--model.width", "null"])


@pytest.mark.parametrize(
    "flag", ["data.flip", "run.test", "trainer.deterministic", "trainer.fast_dev_run"]
)
def test_switches_stand_alone(flag: str) -> None:
    section, _, name = flag.partition(".")
    for words, value in (
        ([f"--{flag}"], True),
        ([f"--{flag}", "false"], False),
        ([f"--{flag}=true"], True),
    ):
        settings = resolve(["fit", "--data", "Synthetic", *words, "--data.cutout", "3"])[section]
        assert settings.get("init_args", settings)[name] is value
        *_, (typed, text) = split_flags([*words])[1]
        assert (typed, text) == (f"--{flag}", str(value).lower())


def test_the_number_of_synthetic_images_had_another_name(tmp_path: Path) -> None:
    """A config of an earlier version is read; the old flag, which is other data's size in pixels, is not."""
    old = tmp_path / "config.yaml"
    old.write_text("data: {class_path: app.data.Synthetic, init_args: {size: 64, like: CIFAR10}}\n")
    assert resolve(["fit", "--config", str(old)]).data.init_args.images == 64
    for words in (["--data", "Synthetic"], ["--config", str(old)]):
        with pytest.raises(
            UserError, match=r"--data.size 100: .*: for their number, give --data.images 100$"
        ):
            resolve(["fit", *words, "--data.size", "100"])


@pytest.mark.parametrize("command", ["compare", "verify"])
def test_quick_stands_alone(command: str, app: App) -> None:
    assert "--nope: there is no such flag" in error_of(
        *app(command, "--quick", "--data.flip", "--nope")
    )


def test_a_switch_takes_a_value_too() -> None:
    parser = PlainParser(prog="x")
    parser.add_argument("--dry_run", type=bool, default=False)
    command_lines = [
        ["--dry_run"],
        ["--dry_run", "true"],
        ["--dry_run=true"],
        ["--dry_run", "false"],
        [],
    ]
    assert [parser.parse_args(words).dry_run for words in command_lines] == [
        True,
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(UserError, match="--dry_run maybe: expected bool"):
        parser.parse_args(["--dry_run", "maybe"])


NAMES = [
    ([], "LeNet-CIFAR10"),
    (["--model.network", "resnet18_cifar", "--data", "Synthetic"], "resnet18_cifar-Synthetic"),
    (["--model", "FashionMLP", "--data", "FashionMNIST"], "FashionMLP-FashionMNIST"),
    (["--model", "user_code.TheirModel", "--data", "user_code.TheirData"], "TheirModel-TheirData"),
]


@pytest.mark.parametrize(("flags", "name"), NAMES)
def test_a_run_is_named_by_its_network_and_data(flags: list[str], name: str) -> None:
    assert default_name(resolve(["fit", *flags])) == name
