"""Fork server for pytest's workers: imports everything once, and runs commands in forks."""

import gc
import importlib
import json
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
# PYTHONPATH, for the tests' own models and data, and for the notebooks' callback
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "notebooks")])
ADDRESS = "APP_TEST_SERVER"  # environment variable with the path of the server's socket


def start_server():
    """Start the server, and return a function that ends it.

    The server imports nothing before its first connection.
    """
    folder = tempfile.mkdtemp()
    os.environ["PYTHONPATH"] = PATHS  # also for fixtures of modules
    os.environ[ADDRESS] = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen(99)
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, "-c", f"import fork_server; fork_server.serve({number})"],
            pass_fds=[number], cwd=ROOT,
            stdin=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def end():
        with suppress(subprocess.TimeoutExpired):
            server.communicate(timeout=5)
        server.kill()
        shutil.rmtree(folder)

    return end


def serve(number):
    """Fork a process per connection, until stdin closes. A connection's jobs run one at a time."""
    listener = socket.socket(fileno=number)
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        prepare()
        if not os.fork():
            run_jobs(connection)
        connection.close()
    with suppress(ChildProcessError):
        while True:
            os.wait()


def prepare():
    """Import everything, and read the signatures of the classes that most commands use."""
    gc.disable()
    from app.command.configuration import resolve
    from app.system.program import set_up

    set_up()
    for name in ("command.run", "lab.compare.command", "lab.doctor", "monitor.report"):
        importlib.import_module(f"app.{name}")
    for name in ("agg", "svg"):
        importlib.import_module(f"matplotlib.backends.backend_{name}")
    resolve(["fit", "--data", "Synthetic"])
    gc.freeze()
    gc.enable()


def run_jobs(connection):
    """Run each command in a fork; send its process id at once, and its exit code at the end."""
    with connection.makefile("rw") as stream:
        for line in stream:
            pid = os.fork()
            if not pid:
                run(json.loads(line))
            print(pid, file=stream, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=stream, flush=True)
    os._exit(0)


def run(job):
    """Run a command as if in a new process, and exit."""
    import pytest
    from harness import leave_undrawn

    from app.cli import main

    os.setsid()
    out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    if "APP_TEST_UNDRAWN" in os.environ:
        leave_undrawn(pytest.MonkeyPatch().setattr)
    if job["limit"]:
        resource.setrlimit(resource.RLIMIT_DATA, (job["limit"], job["limit"]))
    code = 1
    try:
        code = main(job["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)
