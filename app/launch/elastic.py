"""torch elastic's agent, in the process in which the command was typed, starts and supervises the ranks of this node.

Each rank is `python -m app …` with the same arguments, told by the environment who it is, as under torchrun.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import distributed
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from app.errors import EXIT_CODES, RankError, RankLostError, UserError
from app.launch.failures import explain, root_cause
from app.launch.process import AGENT
from app.launch.rendezvous import Cluster, NodeRendezvous
from app.system.machine import usable_cores

TAIL = 30  # lines of a failed rank's output that are shown
RUN_DIR = "run_dir"  # beside torch's error file of rank zero: the directory of its run
STOPPED = "stopped"  # beside that of a rank that a signal has ended in order: its exit code
OnFailure = Callable[[str, str], None]


def launch(
    argv: Sequence[str], processes: int, rendezvous: NodeRendezvous, cluster: Cluster, on_failure: OnFailure
) -> int:
    """Run a command line as several ranks, of which this node has some.

    Args:
        argv: The arguments of `python -m app`.
        processes: Ranks of this node.
        rendezvous: How this node meets the others.
        cluster: Settings of the launch.
        on_failure: Called with the directory of the run and the reason when a rank of this node has failed.

    Returns:
        Exit code: 0 when all ranks are done, 130 or 143 when a signal has ended them in order.

    Raises:
        UserError: What a user did wrong, as a rank has found.
        RankError: When a rank has failed otherwise.
    """
    rendezvous_handler_registry.register(rendezvous.get_backend(), _handler)
    with _log_dir(cluster.log_dir) as folder, _agent(processes, cluster.timeout):
        config = LaunchConfig(
            min_nodes=rendezvous.world_size,
            max_nodes=rendezvous.world_size,
            nproc_per_node=processes,
            run_id=rendezvous.get_run_id(),
            role="rank",
            rdzv_backend=rendezvous.get_backend(),
            rdzv_configs={"handler": rendezvous},
            max_restarts=cluster.max_restarts,
            logs_specs=DefaultLogsSpecs(
                str(folder),
                redirects=dict.fromkeys(range(0 if cluster.log_dir else 1, processes), Std.ALL),
                tee={0: Std.ALL} if cluster.log_dir else Std.NONE,
            ),
            log_line_prefix_template="[${role_name} ${rank}] ",
            # one that is ignored, as by nohup, stays so
            signals_to_handle=",".join(
                name for name in ("SIGTERM", "SIGINT") if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN
            ),
        )

        def attempts() -> list[Path]:
            found = folder.glob(f"{rendezvous.get_run_id()}_*/attempt_*")
            return sorted(found, key=lambda path: int(path.name.removeprefix("attempt_")))

        def refuse_restart() -> None:
            """Do not start again what a signal has ended in order, or a user's error."""
            for file in attempts()[-1].glob("*/error.json"):
                message = json.loads(file.read_text())["message"]["message"]
                if message.startswith(f"{UserError.__name__}: "):
                    raise UserError(message.partition(": ")[2])
            for file in attempts()[-1].glob(f"*/{STOPPED}"):
                number = signal.Signals(int(file.read_text()) - 128)
                raise SignalException(f"ended in order by {number.name}", number)

        rendezvous.before_restart = refuse_restart
        said: UserError | RankError | None = None
        try:
            # torch fills in `${local_rank}` in each argument
            elastic_launch(config, sys.executable)("-m", "app", *(argument.replace("$", "$$") for argument in argv))
        except ChildFailedError as error:
            rank, failure = root_cause(error.failures)
            if failure.exitcode in EXIT_CODES.values():
                return failure.exitcode
            said = explain(rank, failure)
            if type(said) is RankError and failure.local_rank:
                _show_output(rank, attempts()[-1] / str(failure.local_rank))
        except distributed.DistError as error:
            said = RankLostError(f"lost the connection to another node: {str(error).splitlines()[0]}")
        except SignalException as error:
            return 128 + error.sigval
        reasons = [*["a rank has failed, and all were started again"] * (len(attempts()) - 1), said]
        for attempt, reason in zip(attempts(), reasons, strict=False):  # none where the nodes have not met
            for note in attempt.rglob(RUN_DIR) if reason is not None else ():
                on_failure(note.read_text(), str(reason))
        if said is not None:
            raise said
    return 0


@contextmanager
def _log_dir(given: str | None) -> Iterator[Path]:
    """Where the ranks' output and errors go; torch's own temporary folder would stay behind."""
    if given is not None:
        try:
            Path(given).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--cluster.log_dir {given}: no folder can be made there ({error.strerror})") from error
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(prefix="data-parallel-lab-") as folder:
        yield Path(folder)


@contextmanager
def _agent(processes: int, timeout: float) -> Iterator[None]:
    """What the agent's processes inherit, and what torch elastic says of itself: only with --verbose."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before, mask = os.environ.copy(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(usable_cores() // processes, 1)))
    # torch 2.12 and later: seconds in which the ranks may save their last checkpoint
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(timeout)))
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.")]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    if "APP_DEBUG" not in os.environ:
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(before)
        for logger, level in levels.items():
            logger.setLevel(level)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return parameters.config["handler"]


def note_run_dir(directory: str) -> None:
    """Tell the agent that started this rank, if one did, where the run's record is."""
    _note(RUN_DIR, directory)


def note_stopped(exit_code: int) -> None:
    """Tell the agent that started this rank, if one did, that a signal has ended it in order."""
    _note(STOPPED, str(exit_code))


def _note(name: str, text: str) -> None:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if AGENT in os.environ and error_file:
        Path(error_file).with_name(name).write_text(text)


def _show_output(rank: int, folder: Path) -> None:
    """The last lines of a rank's output, which has gone to files in a folder, each under its name."""
    for log in (folder / "stdout.log", folder / "stderr.log"):
        lines = log.read_text(errors="replace").splitlines()[-TAIL:] if log.exists() else []
        for line in lines:
            print(f"[rank {rank}] {line}", file=sys.stderr)
    sys.stderr.flush()
