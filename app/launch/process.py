"""Start and end of processes, and their environment. Imports no heavy library."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from app.errors import CAUSES, UserError

# environment variables
AGENT = "APP_AGENT"  # process id of our agent, in the ranks that it started
STARTER = "APP_STARTER"  # process id of the command, such as `compare`, that started this run
SPAWNED = "APP_SPAWNED"  # set for the processes of SpawnLauncher; app/__init__.py reads it
# start of the command, in seconds of the host's monotonic clock, because the date may jump
BEGAN = "APP_BEGAN"
ON_NCCL_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SLURM_MAX_NORMAL_STEP_ID = 0xFFFFFFF0
# variables of torch elastic's workers
WORKER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
)
# variables of launchers; a leftover variable would make a run wait for other processes
RANKS = (*WORKER, "NODE_RANK")
ADDRESSES = ("MASTER_ADDR", "MASTER_PORT")
# variables that srun sets for each of its tasks
TASK = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
)
NUMERIC = ("MASTER_PORT", "NODE_RANK", "PL_GLOBAL_SEED")  # variables that users set


def check_environment() -> None:
    """Check the environment variables that this application or its libraries read.

    Raises:
        UserError: When a variable is invalid, or left over from another process; or the current
            folder is deleted.
    """
    for name in NUMERIC:
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            del os.environ[name]  # so that the error report does not use the invalid value
            raise UserError(f"{name}={value} in the environment: give a whole number, or unset it")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        message = "the current folder has been deleted: change to another one (cd)"
        raise UserError(message) from error
    for name in (STARTER, AGENT):
        parent = os.environ.get(name)
        if parent is not None and parent != str(os.getppid()):
            del os.environ[name]
            raise UserError(
                f"{name}={parent} in the environment is left over from another run: unset {name}"
            )


def is_task_of_srun() -> bool:
    """Return whether this process is a task of an srun step, not a batch script or salloc's shell.

    Some sites run salloc's shell as a step on a node. The id of such a step is above
    SLURM_MAX_NORMAL_STEP_ID. Source: https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h.in.
    """
    is_task = os.environ.keys() >= {*TASK}
    return is_task and int(os.environ["SLURM_STEP_ID"]) <= SLURM_MAX_NORMAL_STEP_ID


def is_worker() -> bool:
    """Return whether a torch elastic agent, torchrun's or ours, started this process."""
    return os.environ.keys() >= {*WORKER}


def begin() -> None:
    """Make this process exit with its parent, an agent or a command; handle signals.

    Also set NCCL's error handling to mode 2: after an error, NCCL's watchdog only aborts
    communicators. In mode 1, torch elastic's default, it would also end the process, even while
    Python reports the error. Source: ErrorHandlingMode in
    torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp.
    """
    if os.environ.get(ON_NCCL_ERROR, "1") == "1":
        os.environ[ON_NCCL_ERROR] = "2"
    starter = os.environ.pop(STARTER, None)
    if starter is not None:
        end_with_parent(int(starter))
    if is_worker():
        end_with_parent(int(os.environ.get(AGENT, os.getppid())))
        # end at once, because a starting rank has nothing to save
        handle(CAUSES, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)  # our agent blocks them
        if os.environ["LOCAL_RANK"] != "0":
            # ignore breakpoint(): only local rank 0 has the terminal
            os.environ["PYTHONBREAKPOINT"] = "0"
        return
    handle((signal.SIGTERM, signal.SIGHUP), _end)
    if is_task_of_srun():
        task = os.getpid()
        # a loader's worker inherits this handler, and must not requeue
        signal.signal(signal.SIGUSR1, lambda *_: os.getpid() == task and requeue())


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies (Linux only); exit if it has died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_in_order() -> None:
    """Make later signals raise exceptions in an agent's rank, so that it can clean up."""
    if is_worker():
        handle(CAUSES, _end)


def end_undisturbed() -> None:
    """Ignore signals in an agent's rank that ends, because Python would report an exception."""
    if is_worker():
        handle(CAUSES, signal.SIG_IGN)


def handle(numbers: Iterable[int], handler: Any) -> None:
    """Set the handler of signals. A signal that is ignored, as under nohup, stays ignored."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore signal handlers and mask after the block, except after `stop_only_once`."""
    handlers = {number: signal.getsignal(number) for number in CAUSES}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            if signal.getsignal(number) is not _ignore:
                signal.signal(number, handler)


def stop_only_once() -> None:
    """Ignore further SIGTERMs and SIGHUPs, because they would interrupt the end of the process."""
    handle((signal.SIGTERM, signal.SIGHUP), _ignore)


def _ignore(*_: object) -> None:
    """Do nothing. Unlike SIG_IGN, child processes do not inherit this handler."""


def _end(number: int, *_: object) -> None:
    stop_only_once()
    sys.exit(128 + number)


def requeue() -> bool:
    """Make SLURM requeue this job, and so end its tasks by SIGTERM. Only task 0 sends the request.

    Returns:
        Whether SLURM accepted the request; true in tasks other than 0.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # requeue only once: SLURM may send SIGUSR1 again
    if os.environ["SLURM_PROCID"] != "0":
        return True
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        print(
            f"SLURM does not requeue job {job} ({reason}): submit it anew with --ckpt_path auto",
            flush=True,
        )
        return False
    print(f"SLURM requeues job {job}, which then resumes from its last checkpoint", flush=True)
    return True


def environment_of_a_run() -> dict[str, str]:
    """Return the environment for a separate run, which exits with this process.

    A `preexec_fn` is no alternative to STARTER, because it would lose a Ctrl-C that arrives during
    the fork.
    """
    environment = {}
    for name, value in os.environ.items():
        if name not in (*RANKS, *ADDRESSES) and not name.startswith("SLURM_"):
            environment[name] = value
    environment[STARTER] = str(os.getpid())
    return environment
