"""Train image classifiers with data parallelism, from one device to many nodes, by changing flags.

usage: python -m app COMMAND [--config FILE] [--FLAG VALUE ...]

commands:
  fit        train a model, validate it each epoch, and test the best checkpoint at the end
  validate   measure a checkpoint on the validation split
  test       measure a checkpoint on the test split
  predict    classify the test split, or new images: --data.predict_dir FOLDER
  join       add this machine to a live run: fit --cluster.live true
  export     write a trained model as one file, for ONNX Runtime or torch
  compare    measure which strategy and settings train fastest here, with report and advice
  verify     prove that all strategies give the same training, on your model and data
  replay     repeat one step of a run, and print its samples by loss
  runs       list the runs with their accuracy, draw their curves, and compare their settings
  doctor     print this machine's hardware, and test which features work on it

  python -m app fit --config configs/quickstart.yaml     try it: no download, no account, no GPU
  python -m app COMMAND --help                           all flags of a command
  python -m app fit --print_config                       all settings and their defaults

--verbose (or APP_DEBUG=1) shows the traceback of an error. --trust MODULE allows a config to use
the classes of MODULE, whose code then runs. This application, torch, torchvision, lightning,
torchmetrics and the current folder are trusted already.
"""

import argparse
import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import app
from app.errors import ExitStatus, RankError, UserError, nearest, printable, shortage, unusable
from app.launch.process import AGENT, BEGAN, begin, check_environment, is_task_of_srun, is_worker
from app.system.program import set_up
from app.system.tracebacks import users_part
from app.system.trust import TRUST, chosen_modules

# `--help` prints this module's docstring. Heavy imports stay inside functions, so that the help
# appears at once.

SYNONYMS = {"train": "fit"}
MODULES = {  # modules of the commands other than fit, validate, test and predict
    "join": "app.command.join",
    "export": "app.use.export",
    "compare": "app.lab.compare.command",
    "verify": "app.lab.verify.command",
    "replay": "app.lab.replay",
    "runs": "app.lab.overview",
    "doctor": "app.lab.doctor",
}
COMMANDS = ("fit", "validate", "test", "predict", *MODULES)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        args: The arguments; by default those of the process.

    Returns:
        Exit code: 0 for success, 1 for a failure, 2 for a user's error, 130 for Ctrl-C, 143 for
        SIGTERM, 129 for SIGHUP.
    """
    set_up()
    argv = list(sys.argv[1:] if args is None else args)
    if "--verbose" in argv:
        argv.remove("--verbose")
        os.environ["APP_DEBUG"] = "1"  # the ranks inherit it
    if "APP_DEBUG" not in os.environ:
        # hide c10d's warnings; torch reads the level when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Let OpenMP's idle threads sleep after 1.5 ms instead of 20. On a machine that other programs
    # keep busy, they spend that time on a core that the awaited thread needs. If they slept during
    # the Python code between two operations, though, waking them would take longer than that code.
    # libgomp reads the number when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        check_environment()
        if AGENT not in os.environ or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            os.environ[BEGAN] = str(time.monotonic())  # the ranks inherit it
        begin()
        argv = _without_trust(argv)
        if not argv or argv[0] in ("-h", "--help"):
            print(__doc__, end="")
            return 0
        if "--version" in argv:
            print(f"data-parallel-lab {app.__version__}")
            return 0
        return _route(argv)
    except (Exception, KeyboardInterrupt) as error:
        return _report(error)


def _report(error: BaseException) -> int:
    """Print why a command failed, and return the exit code.

    A user's error and a failed rank are one line, an error in the user's code is its traceback, and
    anything else is an error of ours with the whole traceback.
    """
    trace = "".join(traceback.format_exception(error))
    excerpt = users_part(trace)
    is_known = isinstance(error, UserError | RankError | KeyboardInterrupt) or shortage(error)
    message = unusable(error)
    if message and not is_known and not excerpt:
        error = UserError(message)
        is_known = True
    if "APP_DEBUG" in os.environ and not isinstance(error, KeyboardInterrupt):
        print(trace, end="", file=sys.stderr)
    elif not is_known:
        print(excerpt or trace, end="", file=sys.stderr)
    status = ExitStatus.of(error)
    # our agent reports its ranks' errors
    if is_known and status.status == "failed" and AGENT not in os.environ:
        rank = "0"
        if is_task_of_srun():
            rank = os.environ["SLURM_PROCID"]
        elif is_worker():
            rank = os.environ["RANK"]
        place = ""
        if rank != "0":
            place = f"rank {rank}: "
        print(f"{place}error: {printable(str(status.reason))}", file=sys.stderr)
    return status.code


def _without_trust(argv: list[str]) -> list[str]:
    """Move `--trust MODULE` into the environment, which ranks inherit, and return the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trust", action="append", nargs="?", const="", default=[])
    known, rest = parser.parse_known_args(argv)
    for module in known.trust:
        if not all(name.isidentifier() for name in module.split(".")):
            raise UserError(f"--trust {module}: give the name of a module")
        os.environ[TRUST] = ",".join([*chosen_modules(), module])
    return rest


def _route(argv: list[str]) -> int:
    command = argv[0]
    if command not in COMMANDS:
        near = nearest(command, COMMANDS)
        if command in SYNONYMS:
            near = f": did you mean {SYNONYMS[command]}?"
        raise UserError(f"{command}: there is no such command{near} ({', '.join(COMMANDS)})")
    if command in MODULES:
        return _import(MODULES[command]).run(argv[1:])
    return _import("app.command.run").run(argv)


def _import(module: str) -> Any:
    """Import a command's module, with a line in the terminal while torch is loading."""
    if "torch" in sys.modules:
        return importlib.import_module(module)
    if sys.stderr.isatty():
        print("loading torch and Lightning …", end="", file=sys.stderr, flush=True)
    gc.disable()  # imports leave no garbage, and collections would take a sixth of their time
    imported = importlib.import_module(module)
    if "triton" not in sys.modules:  # its nanobind would report frozen objects as leaks at exit
        gc.freeze()
    gc.enable()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return imported
