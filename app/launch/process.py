"""How a process of this application begins, before anything heavy is imported, and how it starts another."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

AGENT = "APP_AGENT"  # environment of a rank that our agent starts: id of the agent
STARTER = "APP_STARTER"  # environment of a run that another command of this application starts: that one's id
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# set by a launcher for each process that it starts; a run that finds them takes itself for one of several
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
SLURM_MAX_NORMAL_STEP_ID = 0xFFFFFFF0
ADDRESSES = ("MASTER_ADDR", "MASTER_PORT")


def is_task_of_srun() -> bool:
    """Whether srun has started this process as a task of a step; a batch script and a shell of salloc are none.

    Where a site has salloc open its shell on a node, that is a step with a number of its own, SLURM_INTERACTIVE_STEP.
    Source: https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h.in.
    """
    return int(os.environ.get("SLURM_STEP_ID", SLURM_MAX_NORMAL_STEP_ID + 1)) <= SLURM_MAX_NORMAL_STEP_ID


def begin() -> None:
    """Settle how this process ends: with the one that started it, where that is ours; in order on SIGTERM."""
    for pid in (os.environ.pop(STARTER, None), os.environ.get(AGENT)):
        if pid is not None:
            end_with_parent()
            if os.getppid() != int(pid):
                os._exit(1)
    if threading.current_thread() is not threading.main_thread():
        return
    if is_worker():
        if AGENT not in os.environ:
            end_with_parent()  # of a torchrun that is killed, the workers would go on
        for number in (signal.SIGINT, signal.SIGTERM):  # while it starts, it has nothing to save, and nothing to say
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # which our agent has blocked
        if os.environ["LOCAL_RANK"] != "0":
            os.environ["PYTHONBREAKPOINT"] = "0"  # rank zero alone has the terminal
        return
    signal.signal(signal.SIGTERM, _end)
    if is_task_of_srun():
        task = os.getpid()
        signal.signal(signal.SIGUSR1, lambda *_: os.getpid() == task and requeue())  # its workers get it, too


def is_worker() -> bool:
    """Whether a torch elastic agent has started this process: torchrun's, or our own."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ and "LOCAL_RANK" in os.environ


def end_in_order() -> None:
    """From here on, a signal to a worker ends it by an exception, so that what it has begun is brought to an end."""
    if is_worker() and threading.current_thread() is threading.main_thread():
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, _end)):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, handler)


def end_undisturbed() -> None:
    """Have a worker that is ending do so: its agent may be ending it, too, and Python would report an exception."""
    if is_worker() and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _end(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def requeue() -> bool:
    """Have SLURM start this job again, which it has announced to end: SLURM then ends its tasks with SIGTERM.

    Returns:
        Whether it will, as far as this task knows.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it comes twice
    if os.environ["SLURM_PROCID"] != "0":
        return True
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        refused = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        refused = str(error)
    if refused:
        print(f"SLURM does not start job {job} again ({refused}): submit it anew with --ckpt_path auto", flush=True)
    else:
        print(f"SLURM starts job {job} again, which goes on from its last checkpoint", flush=True)
    return not refused


def environment_of_a_run() -> dict[str, str]:
    """Environment for a run that starts on its own and shall not outlive this process.

    Without what a launcher has set for this one. Not a `preexec_fn`, which could see to the end with its parent, too:
    Python runs hooks after such a fork, and a Ctrl-C that comes in one of them is lost.
    """
    theirs = (*RANKS, *ADDRESSES, AGENT)
    own = {key: value for key, value in os.environ.items() if key not in theirs and key[:6] != "SLURM_"}
    return own | {STARTER: str(os.getpid())}


def run_app(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run `python -m app …` in a process of its own, to the end.

    Raises:
        subprocess.TimeoutExpired: When it is not done in time.
    """
    return subprocess.run(
        [sys.executable, "-m", "app", *argv],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=environment_of_a_run(),
    )


def end_with_parent(by: signal.Signals | None = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent dies, however that happens, or no longer; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by or 0)
