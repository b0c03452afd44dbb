"""How a process of this application begins, before anything heavy is imported, and how it starts another."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

AGENT = "APP_AGENT"  # environment of a rank that our agent starts: id of the agent
STARTER = "APP_STARTER"  # environment of a run that another command of this application starts: that one's id
TRUST = "APP_TRUST"  # environment: modules of `--trust`, with commas between them
ON_NCCL_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
WORKER = {"TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
# set by a launcher for each process that it starts; a run that finds them takes itself for one of several
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
SLURM_MAX_NORMAL_STEP_ID = 0xFFFFFFF0
ADDRESSES = ("MASTER_ADDR", "MASTER_PORT")


def trust_flags() -> list[str]:
    """The `--trust` flags that were given."""
    return [part for module in os.environ.get(TRUST, "").split(",") if module for part in ("--trust", module)]


def is_task_of_srun() -> bool:
    """Whether srun has started this process as a task of a step; a batch script and a shell of salloc are none.

    Where a site has salloc open its shell on a node, that is a step with a number of its own, SLURM_INTERACTIVE_STEP.
    Source: https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h.in.
    """
    return int(os.environ.get("SLURM_STEP_ID", SLURM_MAX_NORMAL_STEP_ID + 1)) <= SLURM_MAX_NORMAL_STEP_ID


def is_worker() -> bool:
    """Whether a torch elastic agent has started this process: torchrun's, or our own."""
    return os.environ.keys() >= WORKER


def begin() -> None:
    """Settle how this process ends: with its parent, where that is ours or an agent; in order on SIGTERM.

    NCCL's watchdog would end it in the midst of an error that Python is to report. It is told to end what communicates
    (2), and to leave the process alone, also in a rank for which torch elastic has set 1, "end the process".
    Source: ErrorHandlingMode in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp.
    """
    if os.environ.get(ON_NCCL_ERROR, "1") == "1":
        os.environ[ON_NCCL_ERROR] = "2"
    for pid in (os.environ.pop(STARTER, None), os.environ.get(AGENT), os.getppid() if is_worker() else None):
        if pid is not None:
            end_with_parent(int(pid))
    if threading.current_thread() is not threading.main_thread():
        return
    if is_worker():
        _handle(signal.SIG_DFL, signal.SIG_DFL)  # while it starts, it has nothing to save, and nothing to say
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # which our agent has blocked
        if os.environ["LOCAL_RANK"] != "0":
            os.environ["PYTHONBREAKPOINT"] = "0"  # rank zero alone has the terminal
        return
    signal.signal(signal.SIGTERM, _end)
    if is_task_of_srun():
        task = os.getpid()
        signal.signal(signal.SIGUSR1, lambda *_: os.getpid() == task and requeue())  # its workers get it, too


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent dies, however that happens; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_in_order() -> None:
    """From here on, a signal to a worker ends it by an exception, so that what it has begun is brought to an end."""
    _handle(signal.default_int_handler, _end)


def end_undisturbed() -> None:
    """Have a worker that is ending do so: its agent may be ending it, too, and Python would report an exception."""
    _handle(signal.SIG_IGN, signal.SIG_IGN)


def _handle(interrupt: Any, terminate: Any) -> None:
    """Set the handlers of a worker, but for what is ignored."""
    if is_worker() and threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGINT, interrupt), (signal.SIGTERM, terminate)):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


def _end(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def requeue() -> bool:
    """Have SLURM start this job again, which it has announced to end: SLURM then ends its tasks with SIGTERM.

    Returns whether it will, as far as this task knows.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it comes twice
    if os.environ["SLURM_PROCID"] != "0":
        return True
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        print(f"SLURM does not start job {job} again ({reason}): submit it anew with --ckpt_path auto", flush=True)
        return False
    print(f"SLURM starts job {job} again, which goes on from its last checkpoint", flush=True)
    return True


def environment_of_a_run() -> dict[str, str]:
    """Environment for a run that starts on its own and shall not outlive this process.

    Without what a launcher has set for this one. Not a `preexec_fn`, which could see to the end with its parent, too:
    Python runs hooks after such a fork, and a Ctrl-C that comes in one of them is lost.
    """
    theirs = (*RANKS, *ADDRESSES, AGENT)
    own = {key: value for key, value in os.environ.items() if key not in theirs and key[:6] != "SLURM_"}
    return own | {STARTER: str(os.getpid())}


def run_app(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m app …` in a process of its own, to the end, or to a `TimeoutExpired`."""
    return subprocess.run(
        [sys.executable, "-m", "app", *argv],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=environment_of_a_run(),
    )
