"""Commands in forked processes: the client of `fork_server.py`, which imports torch once."""

import atexit
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from fork_server import ADDRESS, ROOT
from harness import App, newest_run

from app.launch.process import STARTER


class Forked:
    """Command in a fork, with the part of `Popen`'s interface that `run_fit` uses."""

    def __init__(self, stream, job):
        print(json.dumps(job), file=stream, flush=True)
        self.pid = int(stream.readline())
        self.code = ThreadPoolExecutor(1).submit(stream.readline)

    def poll(self):
        return int(self.code.result()) if self.code.done() else None

    def wait(self, timeout=None):
        try:
            return int(self.code.result(timeout))
        except TimeoutError as error:
            raise subprocess.TimeoutExpired("app", timeout) from error

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Connection to the fork server, which runs a connection's commands one at a time.

    Args:
        folder: Folder of the output file, which each command overwrites.
        cwd: Current folder of the commands; by default `folder`.
        limit: Maximum memory of each command in bytes.
    """

    def __init__(self, folder, cwd=None, limit=4 * 2**30):
        self.cwd = cwd or folder
        self.out = folder / "output.txt"
        self.limit = limit
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(os.environ[ADDRESS])
        self.stream = self.connection.makefile("rw")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.shutdown(socket.SHUT_RDWR)

    def start(self, argv, env, out, cwd):
        """Start a command, and write its output into a file."""
        return Forked(
            self.stream,
            {"argv": argv, "env": env, "out": str(out), "cwd": str(cwd), "limit": self.limit},
        )

    def run(self, *args, seconds=60, signal_after=None, env=None):
        """Run a command, and return its exit code, negative after a signal, and its output.

        Args:
            args: Arguments of the command.
            seconds: Time limit.
            signal_after: Signal to send to the command, and the seconds to wait before.
            env: Changes of the environment.

        Raises:
            TimeoutError: When the command does not end in time.
        """
        environment = {**os.environ, **(env or {})}
        variables = {key: value for key, value in environment.items() if value is not None}
        forked = self.start([*map(str, args)], variables, self.out, self.cwd)
        timers = [threading.Timer(seconds, forked.kill)]
        if signal_after:
            timers.append(threading.Timer(signal_after[1], os.kill, (forked.pid, signal_after[0])))
        for timer in timers:
            timer.start()
        code = forked.wait()
        for timer in timers:
            timer.cancel()
        out = self.out.read_text(errors="replace")
        if code == -signal.SIGKILL and (not signal_after or signal_after[0] != signal.SIGKILL):
            raise TimeoutError(
                f"{args} did not end in {seconds} s, or took too much memory: {out[-2000:]}"
            )
        return code, out


@cache
def _server():
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    server = ForkServer(Path(folder.name), ROOT, limit=None)
    atexit.register(server.__exit__)
    return server


@App
def fork_app(*args, timeout=240, env=None):
    """Run a command line as `start_app` does, but 5 s faster: in a fork with everything imported.

    Tests use it unless they test the start of processes. Under `ddp_fork`, the ranks are forks,
    too.
    """
    return _server().run(
        *args,
        seconds=timeout,
        env={"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **(env or {})},
    )


def fork_fit(root, *flags):
    """Run `fit` as `fork_app` does, with runs below a folder; return the run's directory."""
    fork_app("fit", "--run.root", root, *flags)
    return newest_run(root)


def fork_run(command, *, stdout, env, **more):
    """Replace `Popen` in `app.lab.runs`: start a fork, or a process for one of several nodes."""
    if "--cluster.node_rank" in command:
        return subprocess.Popen(command, stdout=stdout, env=env, **more)
    variables = {name: value for name, value in env.items() if name != STARTER}
    return _server().start(
        command[command.index("app") + 1 :], variables, Path(stdout.name), Path.cwd()
    )
