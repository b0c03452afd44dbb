"""Inputs that once caused a traceback or ran foreign code.

Each must cause one error line and exit code 2, and run no code.
"""

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest
from harness import SLOW, refusals, start_app, tiny

from app.cli import main
from app.errors import ExitStatus, printable
from app.system.files import open_file

TINY = tiny(64, 64, max_epochs=1, test=False)
RUNS = '{"class_path": "os.system", "init_args": {"command": "touch ran"}}'
REFUSED = "its code is not trusted"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Create a current folder with broken modules. Check that no foreign code has run in it."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "broken_module.py").write_text("def (:\n")
    (place / "ending_module.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    yield
    assert not (place / "ran").exists()


FLAGS = {
    f"--model.optimizer '{RUNS}'": f"--model.optimizer os.system: {REFUSED}: give --trust os",
    "--trainer.callbacks+=subprocess.Popen": f"--trainer.callbacks subprocess.Popen: {REFUSED}",
    "--trust yaml --model yaml.Loader": "--model yaml.Loader: expected a subclass of LightningMod",
    "--trust 'x y'": "--trust x y: give the name of a module",
    "--run.name a\x1b[31mb": r"--run.name a\x1b[31mb: contains a control character",
    "--run.name 'a\nb'": "--run.name a b: contains a control character: leave it out",
    "--model.optimizer torch.hub.load": (
        "--model.optimizer torch.hub.load: expected a subclass of Optimizer"
    ),
    "--model.scheduler torch.optim.Adam": (
        "--model.scheduler torch.optim.Adam: expected a subclass of LRSch"
    ),
    "--model broken_module.Model": (
        "--model broken_module.Model: invalid syntax (broken_module.py, line 1)"
    ),
    "--model ending_module.Model": (
        "that the arguments name ends the process when it is imported (3)"
    ),
    "--trainer.accumulate_grad_batches 0": "accumulate_grad_batches 0: give more than 0",
    "--trainer.num_nodes 0": "--trainer.num_nodes 0: give more than 0",
    "--trainer.max_epochs -3": "--trainer.max_epochs -3: `max_epochs` must be a non-negative",
    "--seed_everything 4294967296": "--seed_everything 4294967296: give 0 to 4294967295",
    "--data.seed -5": "--data.seed -5: give 0 or more",
    "--cluster.node_rank -1": "--cluster.node_rank -1: give 0 or more",
    "--data.images 1000000000000": "GiB of free memory: give less than --data.images",
    "--last_checkpoint.dirpath /proc/x": "/proc/x/last.ckpt: the checkpoint cannot be written",
    "--trainer.precision transformer-engine": "Requirement 'transformer_engine>=0.11.0' not met",
    "--model.scheduler StepLR --model.scheduler.step_size 0": (
        "--model.scheduler StepLR: integer modulo by zero"
    ),
    "--model.optimizer SparseAdam": (
        "SparseAdam: SparseAdam does not support dense gradients, please con"
    ),
    "--trainer.limit_train_batches -1": (
        "--trainer.limit_train_batches -1: You have passed invalid value -1"
    ),
    "--last_checkpoint.save_top_k -2": (
        "--last_checkpoint.save_top_k -2: Invalid value for save_top_k=-2"
    ),
    "--trainer.max_time abc": "is not a valid duration",
    "--best_checkpoint.mode x": "--best_checkpoint.mode x: `mode` can be min, max but got x",
    "--cluster nope": "--cluster nope: neither a file nor settings",
    f"--run.root {'x' * 5000}": "cannot be used (File name too long)",
}


test_odd_flags_are_rejected = refusals(FLAGS, *TINY)


LEVELS = [f"&{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghi")]
CONFIGS = [
    (f"a: [&a 1, {', '.join(LEVELS)}]", "its aliases (*) stand for more than 100,000 values"),
    ("model: pipe", "pipe: not a file"),
    ("trainer: {max_epochs: 1}".encode("utf-16"), "can't decode byte"),
    ("run: 7", "run: 7 in --config"),
    (r'trainer: "a\0b"', "--trainer: contains a null character: leave it out"),
    (r'model: {class_path: CIFARCNN, init_args: {optimizer: "\0"}}', "--model.optimizer: contains"),
    ("model: twice.yaml", "class_path is given twice"),
    ("trainer: {strategy: null}", "--trainer.strategy null: give a value"),
    (
        f"model: {{class_path: CIFARCNN, init_args: {{optimizer: {RUNS}}}}}",
        f"optimizer os.system: {REFUSED}",
    ),
    (b"a: [b", "cannot be read"),
    (b"", "not a config"),
    (
        b"trainer: {max_epoch: 3}",
        "--trainer.max_epoch: there is no such flag: did you mean --trainer.max_epochs?",
    ),
    (
        b"data: {class_path: Synthetic, init_args: {images: x}}",
        "--data.images x: expected a number",
    ),
    (b"trainer: {max_epochs: 1}\ntrainer: {max_steps: 3}", "trainer is given twice"),
    (b"data: {class_path: Synthetc}", "did you mean Synthetic?"),
    (
        b"model: {class_path: FashionMLP, init_args: {hidden: [8, 0]}}",
        "--model.hidden 0: give more than 0",
    ),
    (b"model: {class_path: CIFARCNN, init_args: {netwrk: 3}}", "did you mean --model.network?"),
]


@pytest.mark.parametrize(("content", "message"), CONFIGS)
def test_odd_configs_are_rejected(content, message, app):
    os.mkfifo("pipe")
    Path("twice.yaml").write_text("class_path: CIFARCNN\nclass_path: FashionMLP\n")
    Path("x.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    assert message in app.error("fit", "--config", "x.yaml")


PIPES = [
    (["fit", "--config", "pipe"], "--config pipe: not a file"),
    (["test", "--ckpt_path", "pipe"], "--ckpt_path pipe: it cannot be read (not a file)"),
    (["fit", "--ckpt_path", "last"], "last.ckpt: it cannot be read (not a file)"),
    (
        ["replay", "--config", "runs/x/version_0/config.yaml"],
        "run.json cannot be read (not a file): name the config.yaml of a run",
    ),
]


@pytest.mark.parametrize(("argv", "message"), PIPES)
def test_pipes_are_not_read(argv, message, app):
    """A pipe is refused, because reading it would block."""
    run = Path("runs/x/version_0")
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("seed_everything: 1")
    for name in ("pipe", run / "run.json", run / "checkpoints/last.ckpt"):
        os.mkfifo(name)
    if argv[0] != "replay":
        argv = [*argv, *TINY[:4], "--run.root", "runs", "--run.name", "x"]
    assert message in app.error(*argv)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pipe", "not a file"),
        ("/dev/zero", "not a file"),
        (".", "not a file"),
        ("a\0b", "its name has a NUL character"),
    ],
)
def test_only_regular_files_are_opened(name, reason):
    os.mkfifo("pipe")
    with pytest.raises(OSError, match=reason):
        open_file(name)


@SLOW
def test_output_on_an_ascii_terminal():
    """Lightning's Timer, whose default is an enum, can be added by a flag."""
    timer = ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:00:10:00"]
    out = start_app(
        "fit", *TINY[:-4], *timer, "--run.root", Path.cwd(), env={"PYTHONIOENCODING": "ascii"}
    )
    assert r"3 \xd7 32 \xd7 32" in out


def test_deleted_folder_is_reported(app, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert (
        app.error("fit", *TINY)
        == "error: the current folder has been deleted: change to another one (cd)"
    )


SHORTAGES = [
    (OSError(errno.EMFILE, "Too many open files", "report.py"), "too many open files"),
    (RuntimeError("received 0 items of ancdata"), "too many open files"),
    (
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. "),
        "/dev/shm is too small",
    ),
    (
        RuntimeError("unable to write to file </torch_7_8_9>: No space left on device (28)"),
        "/dev/shm is too small",
    ),
]


@pytest.mark.parametrize(("error", "message"), SHORTAGES)
def test_shortages_name_a_remedy(error, message):
    assert str(ExitStatus.of(error).reason).startswith(message)


def test_the_soft_limit_of_files_is_named(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (7, 9))
    assert "limit of 7:" in ExitStatus.of(OSError(errno.EMFILE, "")).reason


ENDS = [
    (SystemExit(0), None, (0, "completed", None)),
    (SystemExit(4), None, (4, "failed", "exit code 4")),
    (SystemExit("a text"), None, (1, "failed", "exit code 1")),
    (SystemExit(143), None, (143, "interrupted", "by SIGTERM")),
    (SystemExit(1), KeyboardInterrupt(), (130, "interrupted", "by Ctrl-C")),
    (KeyboardInterrupt(), None, (130, "interrupted", "by Ctrl-C")),
    (ValueError("a\nb"), None, (1, "failed", "ValueError: a b")),
]


@pytest.mark.parametrize(("error", "context", "status"), ENDS)
def test_status_of_an_error(error, context, status):
    error.__context__ = context
    assert ExitStatus.of(error) == ExitStatus(*status)


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\té\n") == "a\\x1b[31m\té\n"


def test_foreign_modules_need_trust(app, monkeypatch):
    """Modules in the current folder are trusted, modules elsewhere only with `--trust`."""
    Path("mine.py").write_text(
        "from app.modules import CIFARCNN\n\nclass Mine(CIFARCNN):\n    pass\n"
    )
    app("fit", *TINY, "--model", "mine.Mine")
    elsewhere = Path("../elsewhere")
    elsewhere.mkdir()
    (elsewhere / "theirs.py").write_text(Path("mine.py").read_text().replace("Mine", "Theirs"))
    monkeypatch.syspath_prepend(elsewhere.resolve())
    message = app.error("fit", *TINY, "--model", "theirs.Theirs")
    assert f"--model theirs.Theirs: {REFUSED}: give --trust theirs" in message
    out = app("fit", *TINY, "--trust", "theirs", "--model", "theirs.Theirs")
    assert "python -m app test --trust theirs --config " in out, (
        "the commands that are printed can be followed"
    )
    assert main(["--trust", "theirs"]) == 0, "of no command there is the help"
