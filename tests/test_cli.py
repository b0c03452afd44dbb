"""Valid command lines, and wrong ones: one error line, exit code 2, no traceback."""

import re
import shlex
import subprocess
import sys

import pytest
import yaml
from forked import fork_fit
from harness import QUIET, ROOT, SLOW, options, start_app, tiny
from lightning.pytorch import callbacks

from app import __version__
from app.command.configuration import build

SMALL = tiny()
NESTED = "{class_path: CIFARCNN, init_args: {optimizer: {class_path: SGD, init_args: {lr: 1e-3x}}}}"


def test_help_lists_every_command_without_torch():
    code = "import sys, app.cli as c; c.main([]); print('|'); c.main(['--help'])"
    code += "; assert 'torch' not in sys.modules"
    bare, out = subprocess.check_output(
        [sys.executable, "-c", code], timeout=60, cwd=ROOT, text=True
    ).split("|\n")
    assert bare == out
    for command in ("fit", "validate", "test", "predict"):
        assert re.search(rf"^  {command} +\w+", out, re.MULTILINE)


def test_version(app):
    assert (
        app.run("--version")
        == app.run("fit", "--version")
        == (0, f"data-parallel-lab {__version__}\n")
    )


@SLOW
def test_idle_threads_spin_briefly():
    """OpenMP reads our spin count; its own 300,000 turns take longer than a time slice."""
    out = start_app("fit", "--print_config", env={"OMP_DISPLAY_ENV": "verbose"})
    assert "GOMP_SPINCOUNT = '20000'" in out


def test_help_of_fit_shows_settings_of_model_and_data(app):
    out = app("fit", "--help")
    assert out.startswith("usage: python -m app fit [--config FILE]")
    assert re.search(r"--model.optimizer.lr LR +Learning rate \(default: 0.001\)", out)
    assert (
        out.index("--model.network")
        < out.index("--data.batch_size")
        < out.index("--trainer.strategy")
    )
    assert len(out.splitlines()) < 80
    flags = ["--model", "FashionMLP", "--data", "Synthetic"]
    out = app("fit", *flags, "--help_all")
    for flag in ("--model.repeats", "--data.like", "--run.tags", "--trainer.deterministic"):
        assert flag in out


PAGES = [
    (["--model.optimizer.help", "AdamW"], "weight_decay"),
    (["--trainer.strategy.help", "app.training.DDP"], "bucket_cap_mb"),
]


@pytest.mark.parametrize(("page", "flag"), PAGES)
def test_help_pages_of_settings(page, flag, app):
    """`fit --help` names each page, and each page lists its flags."""
    assert " ".join(page) in app.run("fit", "--help")[1]
    assert flag in app("fit", *page)


def test_order_of_flags_does_not_matter(app, tmp_path):
    """Configs and classes are read first, wherever they are in the command line."""
    (tmp_path / "c.yaml").write_text("model: {class_path: FashionMLP, init_args: {repeats: 2}}\n")
    late = "--data.like FashionMNIST --data.images=64 --model.optimizer.lr 0.5 --model.repeats=1"
    late += " --trainer.strategy.bucket_cap_mb 5 --trainer.strategy ddp --model.optimizer SGD"
    late += f" --config {tmp_path}/c.yaml --data Synthetic"
    config = yaml.safe_load(app("fit", *late.split(), "--print_config"))
    model = config["model"]["init_args"]
    data = config["data"]["init_args"]
    assert (model["repeats"], data["images"], data["like"]) == (1, 64, "FashionMNIST")
    assert model["optimizer"]["class_path"] == "torch.optim.SGD"
    assert model["optimizer"]["init_args"]["lr"] == 0.5
    assert config["trainer"]["strategy"]["init_args"]["bucket_cap_mb"] == 5


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [("train", "fit"), ("tset", "test"), ("nope", None), ("--trainer.max_epochs", None)],
)
def test_unknown_command_suggests_nearest(typed, suggestion, app):
    hint = f": did you mean {suggestion}?" if suggestion else ""
    commands = "(fit, validate, test, predict, join, export, compare, verify, replay, runs, doctor)"
    assert app.error(typed) == f"error: {typed}: there is no such command{hint} {commands}"


WRONG = [
    (
        "--trainer.max_epoch 3",
        "--trainer.max_epoch: there is no such flag: did you mean --trainer.max_epochs?",
    ),
    (
        "--model.netwrk x",
        "--model.netwrk: the chosen class has no such setting: did you mean --model.network?",
    ),
    ("--lr 0.1", "--lr: there is no such flag: did you mean --model.optimizer.lr?"),
    (
        "--model.network lent",
        "lent: expected one of lenet, resnet18, resnet18_cifar, whitened: did",
    ),
    ("--trainer.precision bf16-mixd", "did you mean bf16-mixed?"),
    ("--trainer.strategy dpp", "--trainer.strategy dpp: unknown: did you mean dp?"),
    ("--model FashionMPL", "--model FashionMPL: there is no such class: did you mean FashionMLP?"),
    ("--data cifar10", "--data cifar10: there is no such class: did you mean CIFAR10?"),
    ("--trainer.callbacks+=EarlyStoping", "there is no such class: did you mean EarlyStopping?"),
    ("--model nowhere.Model", "No module named 'nowhere'"),
    ("--model.optimizer.lr -1", "Invalid learning rate"),
    ("--model.scheduler OneCycleLR --model.scheduler.max_lr 0.1", "total_steps"),
    ("--model.scheduler OneCycleLR", "--model.scheduler: its max_lr is required"),
    ("--data.val_size 64", "--data.val_size 64 leaves nothing of 64 training images"),
    (
        "--model CIFARCNN --data ImageFolder --data.mean '[0.5, 0.5]'",
        "--data.mean [0.5, 0.5]: give one value for each",
    ),
    ("--model.num_classes 7", "--model.num_classes comes from the data"),
    ("--model.scheduler ReduceLROnPlateau", "lightning.pytorch.cli.ReduceLROnPlateau"),
    ("--best_checkpoint.monitor val_los", "val_los"),
    ("--data.batch_size 65 --data.drop_last true", "--data.drop_last leaves nothing of 58"),
    ("--model FashionMLP", "MLP takes images of 1×28×28, for example, not of 3×32×32 ("),
    (
        "--model alexnet",
        "alexnet takes images of 3×64×64, for example, not of 3×32×32 (Given input",
    ),
    (
        "--model timm/vit_tiny_patch16_224",
        "takes images of 3×224×224, for example, not of 3×32×32 (Input height",
    ),
    ("--ckpt_path no.ckpt", "--ckpt_path no.ckpt: there is no such file"),
    ("--ckpt_path last", "--ckpt_path last: no last.ckpt under"),
    ("--config nope.yaml", "--config nope.yaml: there is no such file"),
    ("--config", "expected one argument"),
    ("--data.cache --data.flip", "--data.cache needs a value"),
    ("--model.optimizer.lr 1e-3x", "--model.optimizer.lr 1e-3x: expected a number"),
    ("--model.optimizer.lr 1e400", "--model.optimizer.lr inf: give a finite number"),
    (f"--model '{NESTED}'", "--model.optimizer.lr 1e-3x: expected a number"),
    ("--model Small", "--model Small: there is no such class: did you mean mine.Small?"),
    (
        "--model Zzzzz",
        "--model Zzzzz: there is no such class: give its import path, package.module.Class",
    ),
    ("--gpus 2", "--gpus: there is no such flag: did you mean --trainer.devices?"),
    ("c.yaml", "c.yaml: a value without a flag: did you mean --config c.yaml?"),
    (
        "--trainer.accelerator mps",
        "--trainer.accelerator mps: there is none on this machine: leave it out, or use cpu",
    ),
    ("--run.tags a,b", "--run.tags a,b: expected list: give [a,b]"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_wrong_flags(flags, message, app, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Small:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images/train/cat").mkdir(parents=True)
    words = shlex.split(flags)
    root = ["--data.root", tmp_path / "images"] if "ImageFolder" in words else []
    assert message in app.error("fit", *(QUIET if "--data" in words else SMALL), *words, *root)
    assert not list((tmp_path / "runs").glob("*/*/checkpoints")), "nothing was kept"


def test_verbose_shows_the_traceback(app, monkeypatch):
    assert "Traceback" in app.run("fit", *SMALL, "--ckpt_path", "no.ckpt", "--verbose")[1]
    monkeypatch.setenv("APP_DEBUG", "1")
    assert "Traceback" in app.run("fit", *SMALL, "--ckpt_path", "no.ckpt")[1]


def test_evaluation_needs_weights(app, tmp_path):
    missing = "error: test needs weights: give --ckpt_path last, best or a file"
    assert app.error("test", *SMALL, "--run.name", "nope").startswith(missing)
    assert not (tmp_path / "runs/nope").exists()


@pytest.mark.parametrize("root", ["file", "dangling"])
def test_run_folder_that_cannot_be_created(root, app, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere/deep")
    message = app.error("fit", *SMALL, "--run.root", tmp_path / root)
    assert message.startswith(
        f"error: {tmp_path / root}/LeNet-Synthetic/version_0 cannot be created ("
    )
    assert message.endswith("): give another --run.root")
    message = app.error("compare", *SMALL[2:], "--root", tmp_path / root)
    assert message.startswith(f"error: {tmp_path / root}")


REQUIRED = {  # settings without defaults, or that others need
    "EarlyStopping": {"monitor": "val_loss"},
    "GradientAccumulationScheduler": {"scheduling": "{4: 2}"},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": "0.5"},
    "OnExceptionCheckpoint": {"dirpath": "x"},
    "StochasticWeightAveraging": {"swa_lrs": "0.1"},
    "Timer": {"duration": "00:00:10:00"},
}


def chosen(*names):
    """Return flags that add callbacks with their required settings."""
    words = []
    for name in names:
        words.append(f"--trainer.callbacks+={name}")
        for setting, value in REQUIRED.get(name, {}).items():
            words.append(f"--trainer.callbacks.{setting}={value}")
    return words


def test_every_callback_of_lightning_can_be_chosen(app, tmp_path):
    """All except base classes, and one that needs a function, are chosen, saved and read again."""
    others = {"Callback", "Checkpoint", "ProgressBar", "ThroughputMonitor", "BaseFinetuning"}
    words = chosen(*sorted({*callbacks.__all__} - others))
    file = tmp_path / "c.yaml"
    file.write_text(app("fit", *SMALL, *words, "--print_config"))
    assert "Unable to serialize" not in file.read_text()
    assert app("fit", "--config", file, "--print_config") == file.read_text()
    build(["fit", f"--config={file}"])  # creates the callbacks, too


def test_config_saved_with_callbacks_runs_again(tmp_path):
    """Settings are an enumeration, a name or a function, and a device."""
    words = chosen("Timer", "ModelPruning", "StochasticWeightAveraging")
    words += ["--model=user_code.TheirModel", "--data=user_code.TheirData"]
    run = fork_fit(tmp_path, *words, *options(max_epochs=1, accelerator="cpu"))
    fork_fit(tmp_path / "again", "--config", run / "config.yaml")


def test_config_that_replaces_callbacks_says_so(app, tmp_path):
    first = tmp_path / "a.yaml"
    second = tmp_path / "b.yaml"
    first.write_text("trainer: {callbacks: [{class_path: Timer}]}")
    line = f"--config {second} replaces the callbacks of --config {first}: write `callbacks+:` in"
    flags = ["--config", first, "--config", second, *SMALL, *options(max_epochs=1, test=False)]
    for key, said, classes in (("callbacks", 1, ["DeviceStatsMonitor"]), ("callbacks+", 0, None)):
        second.write_text(f"trainer: {{{key}: [{{class_path: DeviceStatsMonitor}}]}}")
        out = app("fit", *flags, "--run.name", key)
        assert out.count(line) == said
        config = (tmp_path / "runs" / key / "version_0/config.yaml").read_text()
        saved = [each["class_path"] for each in yaml.safe_load(config)["trainer"]["callbacks"]]
        names = [path.rpartition(".")[2] for path in saved]
        assert names == (classes or ["Timer", "DeviceStatsMonitor"])
