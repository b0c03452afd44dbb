"""Code that flags and configs may run: classes of a flag's type, and the user's own modules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from harness import SLOW, tiny

from app.errors import UserError
from app.modules.networks import make_network
from app.system.trust import trusted_modules

TINY = tiny(64, 64, max_epochs=1, test=False, accelerator="cpu")
RUNS = {"class_path": "torch.utils.collect_env.run", "init_args": {"command": "touch ran"}}
MINE = """
from collections.abc import Callable
from typing import Any
from torch import nn
from torch.hub import load
from torch.nn.functional import relu
from app.modules import CIFARCNN

class Mine(CIFARCNN):
    def __init__(self, anything: Any = None, call: Callable = relu, untyped=None, **kwargs: Any):
        super().__init__(**kwargs)
        print("made of", anything, call)

def act(images): return images
def network(classes): return nn.Sequential(nn.Flatten(), nn.Linear(3072, classes))
def optimizer(parameters): return load(parameters)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Make a current folder with a module of the user's. Check that no foreign code runs in it."""
    Path(tmp_path, "mine.py").write_text(MINE)
    Path(tmp_path, "7a__mypyc.py").touch()  # no config can name it
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield
    assert not (tmp_path / "ran").exists()


@SLOW
def test_no_flag_accepts_functions_or_foreign_classes_of_the_libraries():
    script = Path(__file__).with_name("library_code.py")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, check=True
    )
    *accepted, count = [
        line for line in done.stdout.splitlines() if line[0].isdigit() or " accepts " in line
    ]
    assert int(count) > 5_000
    assert not accepted


SYSTEM = {"class_path": "torch.os.system", "init_args": {"command": "touch ran"}}
PLACES = [
    ({"trainer": {"callbacks": SYSTEM}}, "posix.system: its code is not trusted"),
    ({"model": {"class_path": "mine.optimizer"}}, "mine.optimizer: expected a subclass of"),
    (
        {"model": RUNS},
        "--model torch.utils.collect_env.run: expected a subclass of LightningModule",
    ),
    (
        {"data": RUNS},
        "--data torch.utils.collect_env.run: expected a subclass of LightningDataModule",
    ),
    (
        {"model": {"class_path": "CIFARCNN", "init_args": {"optimizer": RUNS}}},
        "expected a subclass of Optimizer",
    ),
    (
        {"model": {"class_path": "CIFARCNN", "init_args": {"scheduler": RUNS}}},
        "expected a subclass of LRScheduler",
    ),
    (
        {"trainer": {"logger": [RUNS]}},
        "--trainer.logger torch.utils.collect_env.run: expected a subclass of Logger",
    ),
    ({"trainer": {"plugins": RUNS}}, "expected a subclass of Precision"),
    (
        {"trainer": {"strategy": RUNS}},
        "--trainer.strategy torch.utils.collect_env.run: expected a subclass of Strateg",
    ),
    ({"trainer": {"profiler": RUNS}}, "--trainer.profiler"),
]


@pytest.mark.parametrize(("config", "message"), PLACES)
def test_function_in_config_is_rejected(config, message, app):
    Path("x.yaml").write_text(yaml.safe_dump(config))
    assert message in app.error("fit", *TINY, "--config=x.yaml")


GIVEN = json.dumps(RUNS)
OPEN = [
    ("anything", GIVEN, "torch.utils.collect_env.run: a library's code runs only"),
    ("anything", f'[{{"a": {GIVEN}}}]', "torch.utils.collect_env.run: a library's code runs only"),
    ("untyped", GIVEN, "torch.utils.collect_env.run: a library's code runs only"),
    ("call", "torch.hub.load", "--model.call torch.hub.load: a library's code runs only"),
    ("call", "mine.load", "--model.call mine.load: a library's code runs only"),
    ("call", "torch.os._exit", "--model.call"),
]


@pytest.mark.parametrize(("name", "value", "message"), OPEN)
def test_library_code_for_untyped_parameter_is_rejected(name, value, message, app):
    assert message in app.error("fit", *TINY, "--model=mine.Mine", f"--model.{name}", value)


@SLOW
def test_users_functions_and_library_networks_run(app):
    """The default of a user's parameter may be a library's function."""
    layer = yaml.safe_dump(
        {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}
    )
    flags = ["--model=mine.Mine", "--model.anything", layer]
    out = app("fit", *TINY, "--run.name=x", "--run.root", ".", *flags)
    assert "made of Linear(in_features=1, out_features=1, bias=True) <function relu" in out
    out = app("fit", *TINY, "--config=x/version_0/config.yaml", "--model.call=mine.act")
    assert "bias=True) <function act" in out


def test_other_commands_reject_code_in_configs(app):
    """The config of somebody's run, and an experiment file, run no code either."""
    run = Path("theirs/version_0")
    (run / "checkpoints").mkdir(parents=True)
    checkpoint = run / "checkpoints/best.ckpt"
    checkpoint.touch()
    model = {"class_path": "CIFARCNN", "init_args": {"optimizer": RUNS}}
    config = run / "config.yaml"
    config.write_text(yaml.safe_dump({"model": model}))
    Path("experiment.yaml").write_text(
        yaml.safe_dump({"variants": {"a": {"model.optimizer": RUNS}}})
    )
    commands = [[name, f"--ckpt_path={checkpoint}"] for name in ("predict", "test", "validate")]
    commands += [["verify", f"--config={config}"], ["compare", "--experiment=experiment.yaml"]]
    for command in commands:
        assert "torch.utils.collect_env.run: expected a subclass of Optimizer" in app.error(
            *command
        )


NETWORKS = [
    "torchvision.models.resnet18",
    "app.modules.networks.resnet18_cifar",
    "mine.network",
    "LeNet",
    "whitenedcnn",
]


@pytest.mark.parametrize("name", NETWORKS)
def test_network_by_name(name):
    trusted_modules()
    assert make_network(name, 7).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


FOREIGN = [
    ("os._exit", "is not trusted: give --trust os to run it"),
    ("mine", "there is no such network"),
    ("evil.net.Net", "is not trusted: give --trust evil to run it"),
    ("yaml.unsafe_load", "is not trusted: give --trust yaml to run it"),
    ("torch.os._exit", "give a subclass of torch.nn.Module"),
    ("torch.hub.load", "give a subclass of torch.nn.Module"),
    ("mine.load", "give a subclass of torch.nn.Module"),
    ("torch.nn", "give a subclass of torch.nn.Module"),
    ("app.modules.networks.pkgutil.resolve_name", "give a subclass of torch.nn.Module"),
    ("torch.ops.aten.add", "give a subclass of torch.nn.Module"),
]


@pytest.mark.parametrize(("name", "message"), FOREIGN)
def test_untrusted_network_is_rejected(name, message):
    """A folder without `__init__.py`, such as a downloaded run, is no module."""
    for path in ("evil/net.py", "yaml/x.py", "yaml/__init__.py"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("raise SystemExit('imported')")
    with pytest.raises(UserError, match=message):
        make_network(name, 7)
